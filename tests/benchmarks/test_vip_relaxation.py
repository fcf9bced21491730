"""VIP's relaxation (Theorems 5.1 and 5.2) and its rounding (Algorithm 2), against SLSQP and the exact optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from vip_relaxation import allocate_rounded, continuous

from verl_ext.allocation import gradient_variance

ESTIMATORS = ("rloo", "dr_grpo")


@given(st.lists(st.floats(0.02, 0.98), min_size=2, max_size=8), st.floats(0, 1), st.sampled_from(ESTIMATORS))
@settings(max_examples=40)
def test_continuous_solution_is_a_minimum(rates, position, estimator):
    """Theorems 5.1 and 5.2."""
    n = len(rates)
    budget = round(3 * n + position * 17 * n)
    real = continuous(rates, budget, lower=3, upper=20, estimator=estimator)
    assert real.sum() == pytest.approx(budget, abs=1e-8) and real.min() >= 3 and real.max() <= 20

    def total(counts):
        return gradient_variance.variance(np.clip(counts, 3, 20), rates, estimator=estimator).sum()

    found = optimize.minimize(
        total,
        np.full(n, budget / n),
        bounds=[(3, 20)] * n,
        constraints={"type": "eq", "fun": lambda counts: counts.sum() - budget},
        method="SLSQP",
    )
    assert total(real) <= found.fun + 1e-6


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0, 1), st.sampled_from(ESTIMATORS))
@settings(max_examples=100)
def test_exact_is_between_the_relaxation_and_the_papers_rounding(rates, position, estimator):
    n = len(rates)
    budget = round(3 * n + position * 29 * n)
    options = {"lower": 3, "upper": 32, "estimator": estimator}

    def total(counts):
        return gradient_variance.variance(counts, rates, estimator=estimator).sum()

    exact = gradient_variance.allocate(rates, budget, **options)
    rounded = allocate_rounded(rates, budget, **options)
    assert exact.sum() == rounded.sum() == budget
    assert rounded.min() >= 3 and rounded.max() <= 32
    relaxed = total(continuous(rates, budget, **options))
    assert relaxed - 1e-9 <= total(exact) <= total(rounded) + 1e-12


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_prompts_without_variance_get_the_least_until_the_others_are_full(estimator):
    rates = [0.0, 0.5, 1.0]
    options = {"lower": 3, "upper": 10, "estimator": estimator}
    assert continuous(rates, 15, **options) == pytest.approx([3, 9, 3])
    assert continuous(rates, 20, **options) == pytest.approx([5, 10, 5])
    assert continuous([0.0, 1.0], 9, **options) == pytest.approx([4.5, 4.5])
