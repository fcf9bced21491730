from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocation import best_of_all, one_at_a_time

from verl_ext.allocation import gradient_variance

ESTIMATORS = ("rloo", "dr_grpo")
FALLS = {"rloo": lambda n: Fraction(1, n - 1), "dr_grpo": lambda n: Fraction(n - 1, n * n)}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(0, 9), st.sampled_from(ESTIMATORS))
@settings(max_examples=200)
def test_equals_trying_all_allocations(twentieths, extra, estimator):
    n = len(twentieths)
    budget = min(3 * n + extra, 11 * n)
    scale = [4 * Fraction(k, 20) * (1 - Fraction(k, 20)) for k in twentieths]
    expected = best_of_all(lambda i, k: -scale[i] * FALLS[estimator](k), [3] * n, [11] * n, budget)
    rates = [k / 20 for k in twentieths]
    counts = gradient_variance.allocate(rates, budget, lower=3, upper=11, estimator=estimator)
    assert counts.tolist() == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equals_greedy_on_a_large_batch(estimator):
    n = 4000
    rates = np.random.default_rng(5).random(n)

    def gain(i, k):
        fall = 1 / (k * (k - 1)) if estimator == "rloo" else (k * k - k - 1) / (k * (k + 1)) ** 2
        return 4 * rates[i] * (1 - rates[i]) * fall

    expected = one_at_a_time(gain, [3] * n, [64] * n, 16 * n)
    counts = gradient_variance.allocate(rates, 16 * n, lower=3, upper=64, estimator=estimator)
    assert counts.tolist() == expected


def test_variance_of_a_simulated_gradient():
    """Propositions 4.2 and 4.3 on a million simulated groups."""
    rng = np.random.default_rng(0)
    groups, n, p, sigma = 400_000, 5, 0.3, 0.7
    rewards = np.where(rng.random((groups, n)) < p, 1.0, -1.0)
    gradients = rng.normal(0, sigma, (groups, n))  # zero mean: the propositions omit the contribution of the mean
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    for estimator, advantages in (("dr_grpo", centered), ("rloo", centered * n / (n - 1))):
        simulated = (advantages * gradients).mean(axis=1).var()
        predicted = sigma**2 * gradient_variance.variance([n], [p], estimator=estimator)[0]
        assert predicted == pytest.approx(simulated, rel=0.02), estimator


def test_binary_rewards_are_a_case_of_any_reward():
    rates = np.array([0.1, 0.4, 0.8])
    by_variance = gradient_variance.allocate(None, 40, lower=3, upper=30, reward_variance=4 * rates * (1 - rates))
    assert by_variance.tolist() == gradient_variance.allocate(rates, 40, lower=3, upper=30).tolist()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_prompts_without_variance_get_the_least_until_the_others_are_full(estimator):
    rates = [0.0, 0.5, 1.0]
    options = {"lower": 3, "upper": 10, "estimator": estimator}
    assert gradient_variance.allocate(rates, 15, **options).tolist() == [3, 9, 3]
    assert gradient_variance.allocate(rates, 20, **options).tolist() == [7, 10, 3]


def test_costs_turn_the_budget_into_tokens():
    costs = np.array([1.0, 9.0])
    counts = gradient_variance.allocate([0.5, 0.5], 200, lower=3, upper=100, costs=costs)
    assert counts @ costs <= 200 and counts[0] > 2 * counts[1]
    assert not ((costs <= 200 - counts @ costs) & (counts < 100)).any()
