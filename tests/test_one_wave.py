"""VIP and Knapsack-RL: one wave, divided by the predicted success rates."""

from __future__ import annotations

import itertools
import json
from functools import partial

import numpy as np
import pytest
from support.engine import controller, run_step

from recipe.knapsack.policy import STATUSES, Knapsack, status
from recipe.vip.policy import Vip
from verl_ext.allocation import gradient_variance, knapsack
from verl_ext.allocation.by_name import RULES
from verl_ext.errors import CannotFillBatch
from verl_ext.estimation.by_name import BY_ID, BY_TEXT
from verl_ext.one_wave import OneWave, prediction_metrics
from verl_ext.policy import Group, Prompt, Rollout

RATES = [0.0, 0.1, 0.4, 0.7, 1.0] * 12


@pytest.fixture
def features(tmp_path):
    path = tmp_path / "features.npy"
    np.save(path, np.array(RATES)[:, None] + 0.01 * np.random.default_rng(0).normal(size=(len(RATES), 3)))
    return str(path)


def test_vip_divides_by_predicted_variance_and_learns(features):
    policy = Vip(train_batch_size=20, n=8, U=24, estimator_options={"features": features, "noise": 0.5})
    run = controller(policy, RATES)
    errors = []
    for step in range(1, 10):
        run.engine.version = step - 1
        batch = run_step(run, step)
        by_prompt = dict(run.engine.submitted[-1])
        predicted = np.array([policy._predicted[prompt] for prompt in by_prompt])
        expected = gradient_variance.allocate(predicted, 160, lower=3, upper=24)
        assert list(by_prompt.values()) == expected.tolist()
        assert sum(len(group.rollouts) for group in batch) == 160
        metrics = run.metrics()
        errors.append((metrics["vip/prediction_mae"], metrics["vip/prediction_mae_moving_average"]))
    assert np.mean(errors[3:], axis=0)[0] < 0.5 * np.mean(errors[3:], axis=0)[1]
    assert metrics["vip/prediction_correlation"] > 0.8 and metrics["vip/prediction_calibration_error"] < 0.2


def test_vip_has_the_papers_bounds(features):
    policy = Vip(train_batch_size=4, n=8, estimator_options={"features": features})
    assert (policy.lower, policy.upper) == (3, 32)
    assert Vip.settings_for(4, 8, seed=0) == {"n": 8, "L": 3, "U": 32}
    assert Vip.settings_for(4, 40, seed=0) == {"n": 40, "L": 3, "U": 80}


def test_vip_with_continuous_rewards_predicts_variances(features):
    options = {"features": features, "link": "softplus", "noise": 2.0}
    run = controller(Vip(train_batch_size=20, n=8, rewards="continuous", estimator_options=options), RATES)
    given = np.zeros(5)
    for step in range(1, 13):
        batch = run_step(run, step)
        assert sum(len(group.rollouts) for group in batch) == 160
        if step > 3:
            given += np.bincount([group.prompt.row % 5 for group in batch], [len(group.rollouts) for group in batch], 5)
    assert min(given[2], given[3]) > 1.3 * max(given[0], given[4])  # 0.4 and 0.7 vary, 0 and 1 do not


def test_knapsack_is_uniform_in_the_first_epoch_and_then_follows_the_rule():
    policy = Knapsack(train_batch_size=20, n=8)
    run = controller(policy, RATES)
    for step in range(1, 4):
        assert {len(group.rollouts) for group in run_step(run, step)} == {8}
    for step in range(4, 10):
        batch = run_step(run, step)
        by_prompt = dict(run.engine.submitted[-1])
        predicted = np.array([policy._predicted[prompt] for prompt in by_prompt])
        assert list(by_prompt.values()) == knapsack.allocate(predicted, 160).tolist()
        assert len({len(group.rollouts) for group in batch}) > 1
        assert run.metrics()["rollouts/sampled"] == 160


def test_knapsack_has_more_effective_gradients_than_uniform():
    ratio = {}
    for allocator in ("knapsack", "uniform"):
        run = controller(Knapsack(train_batch_size=20, n=4, allocator=allocator), [0.0, 0.08, 0.5, 0.95, 1.0] * 12)
        ratios = []
        for step in range(1, 31):
            batch = run_step(run, step)
            weights = [len(group.usable) for group in batch]
            effective = [0 < sum(group.verdicts) < len(group.verdicts) for group in batch]
            ratios.append(np.dot(weights, effective) / sum(weights))
        ratio[allocator] = np.mean(ratios[6:])
    assert ratio["knapsack"] > ratio["uniform"] + 0.05


def test_status_transitions_are_counted():
    assert [STATUSES[status(p)] for p in (0, 0.2, 0.21, 0.79, 0.8, 1)] == [
        "extremely_hard",
        "hard",
        "medium",
        "medium",
        "easy",
        "extremely_easy",
    ]
    run = controller(Knapsack(train_batch_size=60, n=4), RATES)
    for step in range(1, 5):
        run_step(run, step)
        metrics = run.metrics()
    counted = sum(value for name, value in metrics.items() if name.startswith("knapsack/from_"))
    assert counted == 3 * 60 and sum(metrics[f"knapsack/status_{name}"] for name in STATUSES) == 60
    assert metrics["knapsack/from_extremely_hard_to_extremely_hard"] >= 3 * 12


@pytest.mark.parametrize("allocator", RULES)
@pytest.mark.parametrize("estimator", [*BY_ID, *BY_TEXT])
def test_any_estimator_goes_with_any_rule(estimator, allocator, features):
    options = {"features": features} if estimator in BY_TEXT else {}
    make = partial(Vip, train_batch_size=12, n=6, U=20, estimator=estimator, estimator_options=options)
    if allocator == "hard_first" and estimator != "history":  # every step would be uniform
        with pytest.raises(ValueError, match="allocator=hard_first is not valid: .* only estimator=history predicts 0"):
            make(allocator=allocator)
        return
    policy = make(allocator=allocator)
    run = controller(policy, RATES)
    for step in range(1, 4):
        sizes = [len(group.rollouts) for group in run_step(run, step)]
        assert sum(sizes) == 72 and min(sizes) >= 3 and max(sizes) <= 20


def test_dynamic_sampling_trains_only_on_groups_with_signal():
    run = controller(Knapsack(train_batch_size=6, n=6, dynamic_sampling=True), RATES)
    for step in range(1, 6):
        batch = run_step(run, step)
        assert len(batch) == 6 and all(len(set(group.rewards)) == 2 for group in batch)
        assert run.metrics()["knapsack/rounds"] > 1


def test_dynamic_sampling_of_continuous_rewards_goes_by_the_rewards(features):
    options = {"features": features, "link": "softplus"}
    policy = Vip(
        train_batch_size=2, n=4, rewards="continuous", estimator_options=options, dynamic_sampling=True, max_rounds=1
    )
    policy.start_run(1, [""] * len(RATES))
    policy.start_step(1, lambda count, but=(): [Prompt("a", 0), Prompt("b", 1)])
    for prompt, rewards in (("a", (0.1, 0.4)), ("b", (0.2, 0.2))):
        policy.on_group(Group(prompt, Prompt(prompt, 0), [Rollout(reward, False, 3, 0) for reward in rewards]))
    assert [group.id for group in policy.take_batch()] == ["a"]


def test_a_short_batch_of_dynamic_sampling_is_warned_about(caplog):
    short = "trains on 1 of 2 prompts"
    run = controller(Knapsack(train_batch_size=2, n=16, dynamic_sampling=True, max_rounds=2), [0.5, 0.0, 0.0])
    assert len(run_step(run, 1)) == 1 and short in caplog.text
    caplog.clear()
    run = controller(Knapsack(train_batch_size=2, n=16, dynamic_sampling=True), [0.5, 0.5, 0.5])
    assert len(run_step(run, 1)) == 2 and not caplog.text
    run = controller(Knapsack(train_batch_size=8, n=2), [0.5] * 8, failure_rate=0.8)
    assert len(run_step(run, 1)) < 8 and not caplog.text  # the ledger counts the groups without a rollout


def test_by_default_a_step_has_one_round():
    policy = OneWave(train_batch_size=2, n=4, lower=2, upper=8, estimator="history", allocator="uniform")
    run = controller(policy, [0.0, 1.0] * 4)
    assert len(run_step(run, 1)) == 2 and run.metrics()["one_wave/rounds"] == 1


def test_further_rounds_cost_and_count_with_dynamic_sampling_only():
    sizes = {"train_batch_size": 5, "n": 4, "max_rounds": 3}
    assert Knapsack(**sizes).step_cost() == (5, 4, 20, 20)
    assert Knapsack(**sizes, dynamic_sampling=True).step_cost() == (5, 4, 20, 60)


@pytest.mark.parametrize("weight", ["equal", "rollouts"])
def test_the_weight_of_a_prompt_can_be_chosen(weight):
    assert Knapsack(train_batch_size=5, n=4, prompt_weight=weight).prompt_weight == weight
    assert Vip(train_batch_size=5, n=4, estimator="history", prompt_weight=weight).prompt_weight == weight


@pytest.mark.parametrize("make", [Vip, Knapsack])
def test_state_is_restored(make, features):
    options = {"estimator": "gaussian_process", "estimator_options": {"features": features}} if make is Vip else {}
    run = controller(make(train_batch_size=12, n=6, **options), RATES)
    for step in range(1, 8):
        run_step(run, step)
    state = json.loads(json.dumps(run.policy.state_dict()))
    other = make(train_batch_size=12, n=6, **options)
    other.start_run(None, [""] * len(RATES))
    other.load_state_dict(state)
    assert other.state_dict() == run.policy.state_dict()
    prompts = [group.prompt for group in run.batch]
    assert other.estimator.predict(prompts).tolist() == run.policy.estimator.predict(prompts).tolist()


def test_a_bound_that_the_allocator_refuses_has_its_configured_name():
    with pytest.raises(ValueError, match="^N_low=1 is not valid: use an integer of at least 2"):
        Knapsack(train_batch_size=4, n=8, N_low=1, allocator="gradient_variance")


def test_a_state_of_another_estimator_is_refused(features):
    saved = Knapsack(train_batch_size=4, n=4).state_dict()
    with pytest.raises(ValueError, match="history"):
        Knapsack(train_batch_size=4, n=4, estimator="beta_posterior", estimator_options={}).load_state_dict(saved)


def test_prediction_metrics_by_hand():
    metrics = prediction_metrics(np.array([0.1, 0.9, 0.95]), np.array([0.2, 0.7, 1.0]))
    assert metrics["mae"] == pytest.approx((0.1 + 0.2 + 0.05) / 3)
    assert metrics["calibration_error"] == pytest.approx((0.1 + 0.15) / 3)  # 0.9 and 0.95 share a bin
    assert metrics["correlation"] == pytest.approx(np.corrcoef([0.1, 0.9, 0.95], [0.2, 0.7, 1.0])[0, 1])
    assert prediction_metrics(np.array([]), np.array([])) == {}
    for predicted, realised in (([0.5, 0.5], [0.0, 1.0]), ([0.2, 0.4], [1.0, 1.0])):  # constants have no correlation
        assert prediction_metrics(np.array(predicted), np.array(realised)).keys() == {"mae", "calibration_error"}


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (Vip, "L", 0),
        (Vip, "L", 9),
        (Vip, "L", 2.5),
        (Vip, "U", 7),
        (Vip, "gradient", "grpo"),
        (Vip, "rewards", "some"),
        (Vip, "n", 1),
        (Vip, "dynamic_sampling", "yes"),
        (Knapsack, "N_low", 0),
        (Knapsack, "N_low", 9),
        (Knapsack, "N_up", 4),
        (Knapsack, "max_rounds", 0),
        (Knapsack, "train_batch_size", 0),
    ],
)
def test_bad_parameters_are_named(make, key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        make(**{"train_batch_size": 16, "n": 8, "estimator": "history", key: value})


def best_counts(cost, budget: int, prompts: int, lower: int, upper: int) -> tuple[float, set[tuple[int, ...]]]:
    """By brute force: the least summed cost, and all counts that have this cost."""
    every = [c for c in itertools.product(range(lower, upper + 1), repeat=prompts) if sum(c) == budget]
    total = {counts: sum(cost(place, n) for place, n in enumerate(counts)) for counts in every}
    least = min(total.values())
    return least, {counts for counts, value in total.items() if value <= least + 1e-12}


@pytest.mark.parametrize("gradient", ["rloo", "dr_grpo"])
def test_the_policy_minimises_the_variance_of_its_gradient_estimator(gradient, features):
    """Propositions 4.2 and 4.3, by brute force on success rates for which the two optima differ."""
    rates = np.array([0.5, 0.02, 0.3, 0.06])
    a = 4 * rates * (1 - rates)
    costs = {"rloo": lambda q, n: a[q] / (n - 1), "dr_grpo": lambda q, n: a[q] * (n - 1) / n**2}
    best = {name: best_counts(cost, 32, 4, 3, 16)[1] for name, cost in costs.items()}
    assert not best["rloo"] & best["dr_grpo"]
    policy = Vip(train_batch_size=4, n=8, U=16, gradient=gradient, estimator_options={"features": features})
    policy.start_run(1, [""] * len(RATES))
    prompts = [Prompt(f"p{row}", row) for row in range(4)]
    latent = np.zeros(len(RATES))
    latent[:4] = np.log(rates / (1 - rates))
    state = policy.state_dict()
    state["estimator"]["estimator"]["mean"] = latent.tolist()
    policy.load_state_dict(state)
    requests = policy.start_step(1, lambda count, but=(): prompts[:count])
    assert tuple(request.rollouts for request in requests) in best[gradient]


def test_dr_grpo_needs_three_rollouts():
    with pytest.raises(ValueError, match="^L=2 is not valid"):
        Vip(train_batch_size=4, n=8, L=2, gradient="dr_grpo", estimator="history")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allocator": "best"}, "allocator"),
        ({"allocator_options": {"speed": 1}}, "allocator_options"),
        ({"estimator": "oracle"}, "estimator"),
        ({"estimator_options": {"length": 3}}, "estimator_options"),
        ({"rewards": "continuous"}, "estimator"),
        ({"rewards": "continuous", "allocator": "knapsack"}, "allocator"),
        ({"estimator": "gaussian_process", "estimator_options": {"model": "/nowhere"}}, "model"),
        (
            {"estimator": "gaussian_process", "estimator_options": {"link": "softplus"}},
            "^rollout_policy.estimator_options.link=softplus is not valid: it predicts reward variances",
        ),
        ({"gradient": "dr_grpo", "allocator_options": {"estimator": "rloo"}}, "^allocator_options.estimator=rloo"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Vip(**{"train_batch_size": 16, "n": 8, "estimator": "history", **options})


def test_a_round_without_prompts_is_none():
    policy = Knapsack(train_batch_size=2, n=2, dynamic_sampling=True)
    policy.start_run(1, ["a", "b"])
    draws = iter([[Prompt("a", 0), Prompt("b", 1)], []])
    for request in policy.start_step(1, lambda count, but=(): next(draws)):
        policy.on_group(Group(request.target.id, request.target, [Rollout(0.0, False, 3, 0)] * 2))
    with pytest.raises(CannotFillBatch, match="none of 2 groups in 1 rounds"):
        policy.take_batch()
