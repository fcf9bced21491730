from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocation import best_of_all, one_at_a_time, one_at_a_time_with_costs

from verl_ext.allocation import hit_utility


def exact_utility(alpha: int, beta: int, n: int) -> Fraction:
    """1 - E[(1 - P)^n] for P ~ Beta(alpha, beta), by the product of (beta + j) / (alpha + beta + j)."""
    miss = Fraction(1)
    for j in range(n):
        miss *= Fraction(beta + j, alpha + beta + j)
    return 1 - miss


def exact_gain(alpha: int, beta: int, n: int) -> Fraction:
    return exact_utility(alpha, beta, n + 1) - exact_utility(alpha, beta, n)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.integers(0, 9), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=150)
def test_equals_trying_all_allocations(successes, budget, a, b):
    expected = best_of_all(
        lambda i, n: exact_utility(a + successes[i], b + 8 - successes[i], n),
        [0] * len(successes),
        [budget] * len(successes),
        budget,
    )
    assert hit_utility.allocate(successes, 8, budget, prior=(a, b)).tolist() == expected


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_equals_algorithm_1_on_a_batch_with_exact_ties(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 200))
    trials = rng.integers(1, 17, n)
    successes = rng.integers(0, trials + 1)
    gains = {}

    def gain(i, k):
        key = (1 + int(successes[i]), 1 + int(trials[i] - successes[i]), k)
        if key not in gains:
            gains[key] = exact_gain(*key)
        return gains[key]

    expected = one_at_a_time(gain, [0] * n, [24 * n] * n, 12 * n)
    assert hit_utility.allocate(successes, trials, 12 * n).tolist() == expected


@pytest.mark.parametrize("beta", [9_990, 10**6, 10**9])
def test_equals_algorithm_1_where_gains_are_nearly_equal(beta):
    """From Beta(1, 10^9) on, one rollout lowers a gain by 2e-9, less than the rounding of log-gamma there."""
    trials, budget = [24, 5], 60  # an even number apart, gains would tie to nine digits
    gain = lambda i, k: exact_gain(1, beta + trials[i], k)  # noqa: E731
    expected = one_at_a_time(gain, [0, 0], [budget, budget], budget)
    assert expected == [25, 35]
    assert hit_utility.allocate([0, 0], trials, budget, prior=(1, beta)).tolist() == expected


@pytest.mark.parametrize("order", [1, -1])
def test_equal_gains_go_to_the_lowest_index_although_log_gamma_rounds(order):
    """For Beta(1, b) the gain is b / ((b + n)(b + n + 1)), and 3 · 1065 · 1066 = 1845 · 1846."""
    betas, before = [1800, 600][::order], [45, 465][::order]
    assert exact_gain(1, betas[0], before[0]) == exact_gain(1, betas[1], before[1])
    counts = hit_utility.allocate([0, 0], 0, sum(before) + 1, prior=(1, betas))
    assert counts.tolist() == [before[0] + 1, before[1]]


@pytest.mark.parametrize(("alpha", "beta", "n"), [(1, 9_990, 50), (40, 9_990, 8), (3, 10**6, 10), (2, 10**11, 200)])
def test_gains_are_exact_to_ten_digits(alpha, beta, n):
    """Below and above the size from which Stirling's series replaces log-gamma."""
    gain = hit_utility._gain(np.array([float(alpha)]), np.array([float(beta)]))
    for count in (0, 1, n, n + 1):
        exact = float(exact_gain(alpha, beta, count))
        assert gain(slice(None), np.array([count]))[0] == pytest.approx(exact, rel=2e-10)


def test_equals_the_papers_recursion_with_priors_per_prompt():
    """M(0) = a / (a + b), M(n + 1) = M(n) (b + n) / (a + b + n + 1): HORA §3.2, as implemented there."""
    rng = np.random.default_rng(3)
    n, budget = 600, 600 * 24
    successes = rng.integers(0, 9, n)
    rates, strength = rng.uniform(0.02, 0.98, n), rng.uniform(0.25, 16, n)
    prior = hit_utility.prior_from_prediction(rates, strength)
    alpha, beta = prior[0] + successes, prior[1] + 8 - successes
    table = {}

    def gain(i, k):
        if k == 0:
            table[i] = alpha[i] / (alpha[i] + beta[i])
        else:
            table[i] *= (beta[i] + k - 1) / (alpha[i] + beta[i] + k)
        return table[i]

    expected = one_at_a_time(gain, [0] * n, [budget] * n, budget)
    assert hit_utility.allocate(successes, 8, budget, prior=prior).tolist() == expected


@given(st.floats(0.1, 20), st.floats(0.1, 20), st.integers(0, 40))
def test_utility_is_the_expected_chance_of_a_hit(alpha, beta, n):
    """1 - E[(1 - P)^n] (HORA eq. 3), by Gauss-Jacobi quadrature under the Beta density: exact for polynomials."""
    from scipy.special import roots_jacobi

    with np.errstate(invalid="ignore"):  # in scipy's own recurrence, at parameters with sum 0
        nodes, weights = roots_jacobi(32, beta - 1, alpha - 1)
    miss = weights @ ((1 - nodes) / 2) ** n / weights.sum()
    assert hit_utility.utility([0], [0], [n], prior=(alpha, beta))[0] == pytest.approx(1 - miss, abs=1e-9)


def test_utility_is_exact_with_a_strong_prior():
    """The product of (b + j) / (a + b + j) over the rollouts j, as exact fractions."""
    miss = Fraction(1)
    for rollout in range(10):
        miss *= Fraction(10**7 + rollout, 10**7 + 40 + rollout)
    assert hit_utility.utility([0], [0], [10], prior=(40, 1e7))[0] == pytest.approx(float(1 - miss), rel=1e-7)


def test_utility_without_a_prior_is_that_of_the_uniform_one():
    assert hit_utility.utility([1, 0], 3, [2, 1]) == pytest.approx([1 - 3 / 5 * 4 / 6, 1 / 5])


def test_a_prompt_without_success_gets_the_most_and_one_with_all_still_something():
    counts = hit_utility.allocate(np.arange(9), 8, 9 * 24)
    assert counts.argmax() == 0 and counts[8] > 0  # HORA §4.1: c = 8 keeps a share


@given(st.lists(st.integers(0, 8), min_size=2, max_size=30), st.integers(0, 400))
def test_bounds_hold_and_the_budget_is_spent(successes, budget):
    n = len(successes)
    if not 2 * n <= budget <= 20 * n:
        with pytest.raises(ValueError, match="budget"):
            hit_utility.allocate(successes, 8, budget, lower=2, upper=20)
        return
    counts = hit_utility.allocate(successes, 8, budget, lower=2, upper=20)
    assert counts.sum() == budget and counts.min() >= 2 and counts.max() <= 20


@pytest.mark.parametrize(
    ("costs", "budget", "expected"), [([1, 2], 0.5, [0, 0]), ([1, 2], 1.5, [1, 0]), ([2, 2], 5, [1, 1])]
)
def test_without_a_limit_a_budget_too_small_for_a_rollout_is_kept(costs, budget, expected):
    assert hit_utility.allocate([0, 0], 2, budget, costs=costs).tolist() == expected


def test_strength_two_and_rate_a_half_are_the_uniform_prior():
    alpha, beta = hit_utility.prior_from_prediction([0.5, 0.5])
    assert alpha.tolist() == beta.tolist() == [1.0, 1.0]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.25, 0.5, 1.0, 3.0])), min_size=2, max_size=6),
    st.integers(0, 100),
    st.integers(0, 2),
)
@settings(max_examples=150)
def test_costs_turn_the_budget_into_tokens(prompts, quarters, least):
    """No sum of these costs is rounded. Without ``upper`` a cheap prompt may take the whole budget."""
    successes, costs = zip(*prompts, strict=True)
    lower, budget = [least] * len(costs), least * sum(costs) + quarters / 4
    expected = one_at_a_time_with_costs(
        lambda i, n: exact_gain(1 + successes[i], 9 - successes[i], n), lower, [10**6] * len(costs), budget, costs
    )
    assert hit_utility.allocate(successes, 8, budget, lower=least, costs=costs).tolist() == expected
