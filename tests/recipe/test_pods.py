"""PODS: the choice of largest variance, what is trained, and state."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, prompts, run_step

from recipe.pods.policy import Pods, max_variance
from verl_ext.policy import Group, Rollout


@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, 3.7]) | st.floats(-5, 5), min_size=2, max_size=9), st.data())
@settings(max_examples=150)
def test_no_subset_has_a_larger_variance(rewards, data):
    m = data.draw(st.integers(2, len(rewards)))
    chosen = max_variance(np.array(rewards), m)
    assert chosen.size == m == len(set(chosen.tolist()))
    best = max(np.var(subset) for subset in combinations(rewards, m))
    assert np.var(np.array(rewards)[chosen]) == pytest.approx(best, abs=1e-9)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 10))
def test_of_rewards_0_and_1_half_are_of_each_kind(right, wrong, half):
    if right + wrong < 2 * half:
        return
    rewards = np.random.default_rng(right).permutation([1.0] * right + [0.0] * wrong)
    successes = int(rewards[max_variance(rewards, 2 * half)].sum())
    assert successes == min(max(half, 2 * half - wrong), right)


def test_of_equal_choices_the_one_with_more_high_rewards():
    assert np.array([0.0, 1, 0, 1])[max_variance(np.array([0.0, 1, 0, 1]), 3)].sum() == 2


@pytest.mark.parametrize("n", [8, 64, 1000])
def test_of_equal_rewards_the_first_are_the_low_ones_and_the_last_the_high_ones(n):
    rewards = np.arange(n) % 2 * 1.0
    assert max_variance(rewards, 4).tolist() == [0, 2, n - 3, n - 1]


def test_rewards_far_from_zero_are_compared_exactly():
    for seed in range(20):
        rewards = np.random.default_rng(seed).random(9)
        assert max_variance(rewards + 2.0**26, 4).tolist() == max_variance(rewards, 4).tolist()


@pytest.mark.parametrize("rule", ["max_variance", "max_reward", "random"])
def test_m_usable_rollouts_are_trained_and_the_books_balance(rule):
    policy = Pods(train_batch_size=4, n=8, m=3, rule=rule)
    run = controller(policy, [0.1, 0.5, 0.9] * 20, failure_rate=0.2, seed=2)
    for step in range(1, 8):
        batch = run_step(run, step)
        metrics = run.metrics()
        for group in batch:
            assert len(group.trained_rollouts) == min(3, len(group.usable))
            assert not any(rollout.failed for rollout in group.trained_rollouts)
            rewards = [rollout.reward for rollout in group.trained_rollouts]
            if rule == "max_reward":
                assert sum(rewards) == min(3, group.rewards.sum())
        discarded = sum(len(group.usable) - len(group.trained_rollouts) for group in batch)
        assert metrics["rollouts/discarded_not_trained"] == discarded > 0
        assert metrics["rollouts/sampled"] == 32
        if rule == "max_variance":
            assert metrics["pods/variance_trained"] >= metrics["pods/variance_all"]


def test_a_group_with_too_few_usable_rollouts_is_trained_as_it_is():
    policy = Pods(train_batch_size=1, n=4, m=3)
    made = [Rollout(float(place), None, 5, 0, failed=place == 0) for place in range(4)]
    group = Group("g", prompts(1)[0], made)
    policy._down_sample(group)
    assert group.trained is None and len(group.trained_rollouts) == 3
    made.append(Rollout(9.0, None, 5, 0))
    policy._down_sample(group)
    assert group.trained == [1, 2, 4]  # rewards 1, 2 and 9


def test_a_step_without_a_batch_has_no_variance():
    assert Pods(train_batch_size=4, n=8, m=2).metrics() == {"pods/variance_all": 0.0, "pods/variance_trained": 0.0}


def test_the_seed_is_0_unless_another_is_given():
    rewards = np.arange(99.0)
    sizes = {"train_batch_size": 4, "n": 99, "m": 9, "rule": "random"}
    first, again, other = (Pods(**sizes, **seed)._chosen(rewards) for seed in ({}, {"seed": 0}, {"seed": 1}))
    assert first == again != other


def test_random_choices_go_on_after_a_restart():
    policy = Pods(train_batch_size=4, n=8, m=2, rule="random")
    run = controller(policy, [0.5] * 40)
    run_step(run, 1)
    other = Pods(train_batch_size=4, n=8, m=2, rule="random")
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    rewards = np.arange(8.0)
    assert [policy._chosen(rewards) for _ in range(5)] == [other._chosen(rewards) for _ in range(5)]


@pytest.mark.parametrize(("key", "value"), [("m", 1), ("m", 9), ("n", 1), ("rule", "best"), ("seed", -1)])
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        Pods(**{"train_batch_size": 4, "n": 8, "m": 4, key: value})
