from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.configs import compose
from support.engine import controller, prompts, run_step

from recipe.hora.policy import Hora
from recipe.hora.warm_up import WarmUp
from verl_ext.allocation import hit_utility
from verl_ext.errors import BadReward, RunError
from verl_ext.estimation.probe import LinearProbe
from verl_ext.policy import Group, Rollout

RATES = [0.0, 0.05, 0.3, 0.6, 1.0] * 16


@pytest.fixture
def features(tmp_path):
    path = tmp_path / "features.npy"
    np.save(path, np.array(RATES)[:, None] + 0.01 * np.random.default_rng(0).normal(size=(len(RATES), 3)))
    return str(path)


def test_the_budget_is_spent_to_the_unit_in_two_waves_of_one_group():
    run = controller(Hora(train_batch_size=16, G=12, G0=4, shards=4), RATES)
    for step in range(1, 6):
        batch = run_step(run, step)
        sizes = [len(group.rollouts) for group in batch]
        assert len(batch) == 16 and sum(sizes) == 16 * 12 and min(sizes) >= 4 and len(set(sizes)) > 1
        metrics = run.metrics()
        assert metrics["rollouts/sampled"] == metrics["rollouts/trained"] == 16 * 12


def test_every_shard_gets_what_algorithm_1_gives_it():
    """Replayed from the pre-rollouts of each group, shard by shard."""
    policy = Hora(train_batch_size=12, G=10, G0=4, shards=3, alpha0=1.0, beta0=2.0)
    run = controller(policy, RATES)
    batch = {group.prompt.id: group for group in run_step(run, 1)}
    order = [prompt for prompt, _ in run.engine.submitted[0]]
    for shard in np.array_split(np.array(order), 3):
        groups = [batch[prompt] for prompt in shard]
        successes = [sum(rollout.correct for rollout in group.rollouts[:4]) for group in groups]
        expected = hit_utility.allocate(successes, 4, len(groups) * 6, prior=(1.0, 2.0))
        assert [len(group.rollouts) - 4 for group in groups] == expected.tolist()


def test_a_shard_goes_on_as_soon_as_its_own_pre_rollouts_are_in():
    policy = Hora(train_batch_size=8, G=4, G0=2, shards=4)
    run = controller(policy, RATES)
    run.begin_step(1)
    waves = run.engine.waiting
    first_shard = {prompt for prompt, _ in run.engine.submitted[0][:2]}
    run.engine.waiting = [wave for wave in waves if wave[0].prompt.id in first_shard]
    rest = [wave for wave in waves if wave[0].prompt.id not in first_shard]
    run.finish_waves(run.engine.finish())
    assert len(run.engine.submitted) == 2 and {prompt for prompt, _ in run.engine.submitted[1]} <= first_shard
    assert run.outstanding == sum(count for _, count, _ in rest) + 2 * 2


def test_upper_bounds_the_additional_rollouts():
    policy = Hora(train_batch_size=20, G=10, G0=4, shards=2, upper=7)
    run = controller(policy, RATES)
    batch = {group.prompt.id: group for group in run_step(run, 1)}
    order = [prompt for prompt, _ in run.engine.submitted[0]]
    reached = 0
    for shard in np.array_split(np.array(order), 2):
        groups = [batch[prompt] for prompt in shard]
        successes = [sum(rollout.correct for rollout in group.rollouts[:4]) for group in groups]
        additional = [len(group.rollouts) - 4 for group in groups]
        assert additional == hit_utility.allocate(successes, 4, 60, upper=7).tolist()
        reached += additional.count(7)
        assert max(hit_utility.allocate(successes, 4, 60)) > 7  # without the bound, some prompt gets more
    assert reached >= 2


def test_failed_pre_rollouts_are_no_trials():
    policy = Hora(train_batch_size=12, G=10, G0=4, shards=1)
    run = controller(policy, RATES, failure_rate=0.3, seed=5)
    batch = run_step(run, 1)
    requested = run.engine.submitted[0]
    counts = dict(run.engine.submitted[1])
    groups = {group.prompt.id: group.rollouts[:4] for group in batch}
    alive = [prompt for prompt, _ in requested if prompt in groups]
    trials = [sum(not rollout.failed for rollout in groups[prompt]) for prompt in alive]
    successes = [sum(bool(rollout.correct) for rollout in groups[prompt]) for prompt in alive]
    expected = hit_utility.allocate(successes, trials, 12 * 6)
    assert [counts.get(prompt, 0) for prompt in alive] == expected.tolist()
    assert min(trials) < 4 and expected.tolist() != hit_utility.allocate(successes, 4, 12 * 6).tolist()


def test_the_strength_of_a_learned_prior_counts(tmp_path):
    """Equation 14: alpha = s p + c, beta = s (1 - p) + G0 - c, with the strength s of each prompt."""
    kinds = np.tile(np.eye(5), (16, 1))
    np.save(tmp_path / "kinds.npy", kinds)
    probe = LinearProbe(kinds, dual=True, learning_rate=0.05)
    outcomes = np.array([0.0, 0.25, 1.0, 0.5, 1.0] * 16)  # the third kind is 0 or 1: a weak prior of a half
    outcomes[2::10] = 0.0
    probe.fit(np.arange(80), outcomes, np.full(80, 8), steps=200)
    (tmp_path / "probe.json").write_text(json.dumps(probe.state_dict()))
    options = {
        "features": str(tmp_path / "kinds.npy"),
        "state": str(tmp_path / "probe.json"),
        "dual": True,
        "online": False,
    }
    policy = Hora(train_batch_size=15, G=10, G0=4, shards=1, estimator="probe", estimator_options=options)
    run = controller(policy, RATES)
    batch = {group.prompt.id: group for group in run_step(run, 1)}
    groups = [batch[prompt] for prompt, _ in run.engine.submitted[0]]
    successes = [sum(rollout.correct for rollout in group.rollouts[:4]) for group in groups]
    rates, strength = probe.predict_prior([group.prompt.row for group in groups])
    assert np.ptp(strength) > 2

    def allocated(strength):
        prior = hit_utility.prior_from_prediction(rates.clip(1e-3, 1 - 1e-3), strength)
        return hit_utility.allocate(successes, 4, 15 * 6, prior=prior).tolist()

    assert [len(group.rollouts) - 4 for group in groups] == allocated(strength) != allocated(2.0)


def test_predicted_rates_are_clipped_to_0_001_and_0_999():
    """A history of 16 successes predicts a rate of 1, which no Beta prior has."""
    policy = Hora(train_batch_size=3, shards=1, estimator="history", estimator_options={"size": 16})
    policy.start_run(7, ["a", "b", "c"])
    assert policy.total_steps == 7
    policy.estimator.observe(prompts(3), np.array([0.0, 0.5, 1.0]), np.array([16, 16, 16]))
    alpha, beta = policy._prior([Group(f"g{row}", prompt) for row, prompt in enumerate(prompts(3))])
    assert alpha == pytest.approx([0.002, 1, 1.998]) and beta == pytest.approx([1.998, 1, 0.002])


@pytest.mark.parametrize("failure_rate", [0.0, 0.2])
def test_priors_learn_from_the_counts_of_phase_a(failure_rate):
    """Not from the pooled groups, in which a hard prompt has several times the rollouts of a solved one."""
    policy = Hora(train_batch_size=20, G=16, G0=4, shards=2, estimator="beta_posterior")
    run = controller(policy, RATES, failure_rate=failure_rate, seed=1)
    batch = run_step(run, 1)
    observed = {prompt: counts for prompt, *counts in policy.estimator.state_dict()["estimator"]["counts"]}
    pre = {group.prompt.id: [r for r in group.rollouts[:4] if not r.failed] for group in batch}
    assert observed == {prompt: [sum(r.correct for r in rollouts), len(rollouts)] for prompt, rollouts in pre.items()}
    assert len({len(group.rollouts) for group in batch}) > 3  # the groups differ in size


def test_in_the_warm_up_priors_learn_from_whole_groups():
    policy = Hora(train_batch_size=5, G=6, G0=2, estimator="beta_posterior", warm_up_component="format")
    run = controller(policy, RATES)
    batch = run_step(run, 1)
    observed = {prompt: counts for prompt, *counts in policy.estimator.state_dict()["estimator"]["counts"]}
    assert observed == {group.prompt.id: [sum(r.correct for r in group.rollouts), 6] for group in batch}


@pytest.mark.parametrize("rates", [RATES, [0.9] * 40], ids=["some_unsolved", "none_unsolved"])
def test_hard_first_is_table_2s_ablation(rates):
    """Phase B goes evenly to prompts with c = 0; without such prompts, evenly to all (ours)."""
    policy = Hora(train_batch_size=16, G=10, G0=8, shards=2, allocator="hard_first")
    run = controller(policy, rates)
    batch = {group.prompt.id: group for group in run_step(run, 1)}
    order = [prompt for prompt, _ in run.engine.submitted[0]]
    without_hard = 0
    for shard in np.array_split(np.array(order), 2):
        groups = [batch[prompt] for prompt in shard]
        hard = [not any(rollout.correct for rollout in group.rollouts[:8]) for group in groups]
        without_hard += not any(hard)
        eligible = [place for place in range(8) if hard[place] or not any(hard)]
        share, rest = divmod(8 * 2, len(eligible))
        expected = [0] * 8
        for rank, place in enumerate(eligible):
            expected[place] = share + (rank < rest)
        assert [len(group.rollouts) - 8 for group in groups] == expected
    assert without_hard == (0 if rates is RATES else 2)


def test_every_bucket_of_figure_3_is_logged_also_at_0():
    """Shares average over steps as the paper's do: 0 where a count did not occur, and nothing in the warm-up."""
    run = controller(Hora(train_batch_size=10, G=8, G0=4, shards=2), [0.0] * 20 + [1.0] * 20)
    buckets = {f"hora/share_of_{kind}_c{count}" for kind in ("prompts", "rollouts") for count in range(5)}
    for step in (1, 2):
        batch = run_step(run, step)
        values = {name: value for name, value in run.metrics().items() if name in buckets}
        assert set(values) == buckets and not any(values[f"hora/share_of_prompts_c{c}"] for c in (1, 2, 3))
        solved = [group for group in batch if group.rollouts[0].correct]
        share = sum(len(group.rollouts) - 4 for group in solved) / 40
        assert values["hora/share_of_prompts_c4"] == pytest.approx(len(solved) / 10)
        assert values["hora/share_of_rollouts_c4"] == pytest.approx(share)
        assert values["hora/share_of_rollouts_c0"] == pytest.approx(1 - share)
    warm = controller(Hora(train_batch_size=4, G=4, G0=2, warm_up_component="format"), RATES)
    run_step(warm, 1)
    assert not [name for name in warm.metrics() if "share" in name]


def test_hard_prompts_get_more_than_their_share_and_solved_ones_less():
    run = controller(Hora(train_batch_size=40, G=16, G0=8, shards=4), RATES)
    shares = defaultdict(float)
    for step in range(1, 11):
        run_step(run, step)
        for name, value in run.metrics().items():
            shares[name] += value / 10
    assert shares["hora/share_of_rollouts_c0"] > 1.3 * shares["hora/share_of_prompts_c0"]
    assert 0 < shares["hora/share_of_rollouts_c8"] < 0.6 * shares["hora/share_of_prompts_c8"]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 5), st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.8]))
@settings(max_examples=60)
def test_books_balance_whatever_fails(size, extra, pre, shards, failure_rate):
    policy = Hora(train_batch_size=size, G=pre + extra, G0=pre, shards=min(shards, size))
    run = controller(policy, RATES, failure_rate=failure_rate, seed=size)
    sampled = 0
    for step in range(1, 4):
        try:
            batch = run_step(run, step)
        except RunError as error:  # every rollout of a small step can fail
            assert "failed" in str(error) or "no batch" in str(error)
            return
        metrics = run.metrics()
        sampled += metrics["rollouts/sampled"]
        assert metrics["rollouts/sampled"] <= size * (pre + extra)
        assert metrics["rollouts/sampled"] == size * (pre + extra) or failure_rate > 0
        assert all(group.usable for group in batch)
    assert sampled == run.metrics()["rollouts/sampled_total"]


def test_warm_up_is_uniform_until_the_component_was_good_three_times():
    policy = Hora(train_batch_size=8, G=6, G0=2, warm_up_component="format", warm_up_threshold=0.85, warm_up_cycles=3)
    run = controller(policy, RATES)  # the format's mean is 0.3, 0.6, 0.9, 1, 1, 1 by step
    warm, said = [], []
    for step in range(1, 8):
        sizes = {len(group.rollouts) for group in run_step(run, step)}
        warm.append(sizes == {6})
        said.append(policy.metrics()["hora/warm_up"])
        assert sum(len(rollouts) for rollouts in [run.batch[0].rollouts]) > 0
    assert warm == [True] * 5 + [False] * 2 and said == [1.0] * 5 + [0.0] * 2


@pytest.mark.parametrize(
    ("means", "over_after"),
    [("110111", 6), ("0111", 4), ("1101101", None), ("111", 3), ("0000", None)],
)
def test_only_three_good_cycles_in_a_row_end_the_warm_up(means, over_after):
    warm_up, ended = WarmUp("format", 0.85, 3), None
    for cycle, good in enumerate(means, 1):
        values = [1.0, 0.7] if good == "1" else [1.0, 0.69]  # means of 0.85, the threshold itself, and 0.845
        warm_up.see([Rollout(0.0, False, 1, 0, components={"format": value}) for value in values])
        restored = WarmUp("format", 0.85, 3)
        restored.load_state_dict(json.loads(json.dumps(warm_up.state_dict())))
        warm_up = restored
        if warm_up.over and ended is None:
            ended = cycle
    assert ended == over_after


def test_an_unknown_component_is_named():
    run = controller(Hora(train_batch_size=4, G=4, G0=2, warm_up_component="style"), RATES)
    with pytest.raises(BadReward, match="warm_up_component='style'.*format"):
        run_step(run, 1)


@pytest.mark.parametrize(("formatted", "over"), [(1.0, False), (1.2, True)])
def test_an_agent_that_took_too_long_has_not_shown_the_format(formatted, over):
    """The driver reports its acc alone. With 3 of 4 rollouts at 1.2, the mean is 0.9."""
    warm_up = WarmUp("format", 0.85, 1)
    rollouts = [Rollout(0.0, False, 1, 0, components={"acc": 0.0, "format": formatted}) for _ in range(3)]
    warm_up.see([Rollout(0.0, False, 1, 0, components={"acc": 0.0}), *rollouts])
    assert warm_up.over is over


def test_a_run_that_is_resumed_without_a_component_is_not_in_the_warm_up():
    run = controller(Hora(train_batch_size=4, G=4, G0=2, warm_up_component="format"), RATES)
    run_step(run, 1)
    state = json.loads(json.dumps(run.policy.state_dict()))
    assert state["warm_up"]["over"] is False
    resumed = controller(Hora(train_batch_size=4, G=4, G0=2), RATES)
    resumed.policy.load_state_dict(state)
    run_step(resumed, 2)
    assert resumed.metrics()["hora/warm_up"] == 0.0


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ("gaussian_process", {"prior_mean": -1.0}),
        ("probe", {"online": True}),
        ("probe", {"online": True, "dual": True}),
        ("beta_posterior", {}),
        ("history", {}),
    ],
)
@pytest.mark.parametrize("allocator", ["hit_utility", "hard_first", "knapsack", "gradient_variance"])
def test_any_prior_goes_with_any_rule(estimator, options, allocator, features):
    if estimator in ("gaussian_process", "probe"):
        options = {**options, "features": features}
    policy = Hora(
        train_batch_size=8, G=8, G0=4, shards=2, estimator=estimator, estimator_options=options, allocator=allocator
    )
    run = controller(policy, RATES)
    for step in range(1, 4):
        assert sum(len(group.rollouts) for group in run_step(run, step)) == 64


def test_a_probe_fitted_beforehand_is_a_prior_from_the_first_step(features, tmp_path):
    probe = LinearProbe(np.load(features), online=False, learning_rate=0.1)
    probe.fit(np.arange(len(RATES)), RATES, np.full(len(RATES), 8))
    (tmp_path / "probe.json").write_text(json.dumps(probe.state_dict()))
    options = {"features": features, "state": str(tmp_path / "probe.json"), "online": False}
    policy = Hora(train_batch_size=8, G=8, G0=4, estimator="probe", estimator_options=options)
    run = controller(policy, RATES)
    run_step(run, 1)
    prompts = [group.prompt for group in run.batch]
    assert policy.estimator.predict(prompts) == pytest.approx(probe.predict([prompt.row for prompt in prompts]))
    assert np.ptp(policy.estimator.predict(prompts)) > 0.1  # not the same for all prompts, as without the probe


def test_state_is_restored(features):
    options = {"estimator": "probe", "estimator_options": {"features": features}, "warm_up_component": "format"}
    make = lambda: Hora(train_batch_size=8, G=6, G0=2, warm_up_cycles=1, **options)  # noqa: E731
    run = controller(make(), RATES)
    for step in range(1, 6):
        run_step(run, step)
    state = json.loads(json.dumps(run.policy.state_dict()))
    other = make()
    other.start_run(None, [""] * len(RATES))
    other.load_state_dict(state)
    assert other.warm_up.over and other.state_dict() == run.policy.state_dict()
    with pytest.raises(ValueError, match="^Hora: state has version 2, this code reads version 1"):
        other.load_state_dict(state | {"version": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_batch_size", 16.0),
        ("train_batch_size", True),
        ("G0", 0),
        ("G0", 32),
        ("G0", 8.0),
        ("G", 1),
        ("alpha0", 0),
        ("alpha0", 1e308),
        ("alpha0", 1e7),
        ("beta0", 1e13),
        ("beta0", float("nan")),
        ("shards", 0),
        ("shards", 17),
        ("upper", 3),
        ("warm_up_threshold", "high"),
        ("warm_up_cycles", 0),
        ("warm_up_component", 3),
        ("estimator_options", {"size": 3}),
    ],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        Hora(**{"train_batch_size": 16, key: value})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"allocator": "best"}, "allocator"),
        ({"allocator_options": {"speed": 1}}, "allocator_options"),
        ({"allocator_options": {"costs": [1.0, 1.0]}}, "allocator_options.costs=.* is not valid: leave it out"),
        ({"allocator": "gradient_variance", "G0": 1}, "^G0=1 is not valid: use an integer of at least 2"),
        ({"estimator": "oracle"}, "estimator"),
        ({"estimator": "history", "estimator_options": {"length": 3}}, "estimator_options"),
        ({"estimator": "probe", "estimator_options": {"features": "/no/such.npy"}}, "features"),
        ({"estimator": "history", "estimator_options": {"state": "/no/such.json"}}, "state"),
        ({"estimator": "probe", "estimator_options": {"online": False}}, "estimator_options.state=null is not valid"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Hora(train_batch_size=16, **options)


FITTED = {"online": True, "cycles": 10, "steps": 5, "learning_rate": 1e-3, "weight_decay": 1e-2, "decay": 0.97}
FITTED |= {"average": 0.99, "state": "probe.json"}
MPNET = "sentence-transformers/all-mpnet-base-v2"
GP = {"prior_mean": -1.0, "clip": 1e-6, "noise": 1e-4, "model": MPNET}


@pytest.mark.parametrize(
    ("prior", "estimator", "options"),
    [
        ("hidden_static", "probe", {"online": False, "dual": False, "features": "f.npy", "state": "probe.json"}),
        ("hidden_online", "probe", {**FITTED, "dual": False, "features": "f.npy"}),
        ("hidden_dual", "probe", {**FITTED, "dual": True, "features": "f.npy"}),
        ("mpnet_dual", "probe", {**FITTED, "dual": True, "model": MPNET}),
        ("gaussian_process", "gaussian_process", GP),
    ],
)
def test_the_five_priors_of_appendix_f_are_configurations(prior, estimator, options):
    files = {"features": "f.npy", "state": "probe.json"}
    given = [f"rollout_policy.estimator_options.{key}={files[key]}" for key in options if key in files]
    policy = OmegaConf.to_container(compose("hora", f"prior={prior}", *given).rollout_policy)
    assert (policy["estimator"], policy["estimator_options"]) == (estimator, options)
    assert policy["allocator"] == "hit_utility"
