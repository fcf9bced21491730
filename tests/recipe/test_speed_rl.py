"""SPEED-RL: screening, rounds, what waits, and state."""

from __future__ import annotations

import json
import logging
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, prompts, run_step

from recipe.speed_rl.policy import SpeedRL
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import Group, Rollout

RATES = [0.0] * 20 + [1.0] * 20 + [0.3] * 20 + [0.7] * 20


def group(*rewards, correct=True):
    return Group("g", prompts(1)[0], [Rollout(reward, reward == 1 if correct else None, 5, 0) for reward in rewards])


@given(st.integers(2, 12), st.data())
def test_a_prompt_qualifies_strictly_between_the_bounds(n_init, data):
    k = data.draw(st.integers(0, n_init))
    lower, upper = sorted(data.draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    if not any(lower < j / n_init < upper for j in range(1, n_init)):
        with pytest.raises(ValueError, match="^p_lower="):
            SpeedRL(train_batch_size=2, n_init=n_init, p_lower=lower, p_upper=upper)
        return
    policy = SpeedRL(train_batch_size=2, n_init=n_init, p_lower=lower, p_upper=upper)
    rate = Fraction(float(k / n_init))
    expected = "too_hard" if rate <= Fraction(lower) else "too_easy" if rate >= Fraction(upper) else "qualified"
    assert policy.judge(group(*[1.0] * k, *[0.0] * (n_init - k))) == expected


def test_without_verdicts_differing_rewards_qualify():
    policy = SpeedRL(train_batch_size=2)
    assert policy.judge(group(0.2, 0.9, correct=False)) == "qualified"
    assert policy.judge(group(0.2, 0.2, correct=False)) == "no_spread"
    failed = Group("g", prompts(1)[0], [Rollout(float("nan"), None, 0, 0, failed=True)] * 3)
    assert policy.judge(failed) == "empty"


def test_both_phases_are_requested_together_and_only_qualified_prompts_continue():
    run = controller(SpeedRL(train_batch_size=4, n_init=4, n_cont=6, s=2), RATES)
    for step in range(1, 30):
        batch = run_step(run, step)
        assert len(batch) == 4
        for trained in batch:
            screening = [bool(rollout.correct) for rollout in trained.rollouts[:4]]
            assert len(trained.rollouts) == 10 and 0 < sum(screening) < 4
    first, *later = run.engine.submitted
    assert [count for _, count in first] == [4] * 8
    for wave in later:
        counts = [count for _, count in wave]
        assert counts == [6] * counts.count(6) + [4] * 8
    metrics = run.metrics()
    assert metrics["rollouts/buffered"] == 10 * metrics["speed_rl/ready"] + 4 * metrics["speed_rl/waiting"]
    assert metrics["rollouts/discarded_too_hard_total"] > 0 < metrics["rollouts/discarded_too_easy_total"]


@given(st.integers(1, 6), st.sampled_from([1, 1.5, 3, 6]), st.integers(0, 1000))
@settings(max_examples=25)
def test_steps_train_the_oldest_groups_and_none_gets_older_than_s_plus_3(size, s, seed):
    run = controller(SpeedRL(train_batch_size=size, n_init=3, n_cont=2, s=s), RATES, seed=seed)
    for step in range(1, 25):
        before = len(run.engine.submitted)
        had = run.policy._ready[:]
        batch = run_step(run, step)
        waited = min(size, len(had))
        assert len(batch) == size and [group.id for group in batch[:waited]] == [group.id for group in had[:waited]]
        assert (len(run.engine.submitted) == before) == (len(had) >= size)
        assert run.metrics()["off_policy/delay_max"] <= s + 3


def test_a_step_without_enough_groups_is_short_and_says_so(caplog):
    run = controller(SpeedRL(train_batch_size=4, s=2, max_rounds=6), [0.0] * 30 + [0.5] * 3)
    with caplog.at_level(logging.WARNING):
        assert 0 < len(run_step(run, 1)) < 4  # three prompts can qualify
    assert "step 1 trains on" in caplog.text


def test_no_signal_at_all_ends_with_what_to_change():
    run = controller(SpeedRL(train_batch_size=2, max_rounds=2), [0.0, 1.0] * 20)
    with pytest.raises(CannotFillBatch, match=r"step 1: .*too_hard.*rollout_policy\.p_lower"):
        run_step(run, 1)


def test_the_state_keeps_both_kinds_of_waiting_groups():
    policy = SpeedRL(train_batch_size=4, n_init=4, n_cont=4, s=4)
    run = controller(policy, RATES)
    for step in range(1, 6):
        run_step(run, step)
    state = json.loads(json.dumps(policy.state_dict()))
    assert state["ready"] and state["qualified"]
    other = SpeedRL(train_batch_size=4, n_init=4, n_cont=4, s=4)
    other.load_state_dict(state)
    assert other.state_dict() == policy.state_dict()


def test_settings_for_divide_n():
    for n in range(3, 200):
        policy = SpeedRL(train_batch_size=8, **SpeedRL.settings_for(8, n, 0))
        assert policy.n_init + policy.n_cont == n
    screening = [SpeedRL.settings_for(8, n, 0)["n_init"] for n in (3, 4, 5, 24, 29, 30)]
    assert screening == [2, 3, 4, 4, 4, 5]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_init", 1),
        ("n_cont", 0),
        ("s", 0.9),
        ("p_lower", 1.0),
        ("p_lower", -0.1),
        ("p_upper", -0.1),
        ("p_upper", 1.1),
        ("max_rounds", 1),
    ],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        SpeedRL(**{"train_batch_size": 4, key: value})


def test_half_failing_rollouts_are_trained_around():
    run = controller(SpeedRL(train_batch_size=3, n_init=4, n_cont=4), RATES, failure_rate=0.5)
    for step in range(1, 10):
        assert all(np.ptp(group.rewards) > 0 for group in run_step(run, step))
