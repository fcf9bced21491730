from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, run_step

from recipe.hora.policy import Hora
from verl_ext.allocation import hit_utility
from verl_ext.errors import RunError
from verl_ext.estimation.probe import LinearProbe

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
    assert run.outstanding == sum(count for _, count in rest) + 2 * 2


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
    warm = []
    for step in range(1, 8):
        sizes = {len(group.rollouts) for group in run_step(run, step)}
        warm.append(sizes == {6})
        assert sum(len(rollouts) for rollouts in [run._batch[0].rollouts]) > 0
    assert warm == [True] * 5 + [False] * 2


def test_an_unknown_component_is_named():
    run = controller(Hora(train_batch_size=4, G=4, G0=2, warm_up_component="style"), RATES)
    with pytest.raises(ValueError, match="warm_up_component='style'.*format"):
        run_step(run, 1)


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ("gaussian_process", {"prior_mean": -1.0}),
        ("probe", {"online": True}),
        ("probe", {"online": True, "dual": True}),
        ("probe", {"online": False}),
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
    prompts = [group.prompt for group in run._batch]
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("G0", 0),
        ("G0", 32),
        ("G0", 8.0),
        ("G", 1),
        ("alpha0", 0),
        ("beta0", float("nan")),
        ("shards", 0),
        ("shards", 17),
        ("upper", 3),
        ("warm_up_threshold", "high"),
        ("warm_up_cycles", 0),
        ("warm_up_component", 3),
        ("prompt_weight", "x"),
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
        ({"estimator": "oracle"}, "estimator"),
        ({"estimator": "history", "estimator_options": {"length": 3}}, "estimator_options"),
        ({"estimator": "probe", "estimator_options": {"features": "/no/such.npy"}}, "features"),
        ({"estimator": "history", "estimator_options": {"state": "/no/such.json"}}, "state"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Hora(train_batch_size=16, **options)
