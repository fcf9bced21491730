from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocation import one_at_a_time

from verl_ext.allocation import heuristics

rates = st.lists(st.floats(0, 1), min_size=1, max_size=40)


def test_hard_first_gives_all_to_prompts_without_success():
    assert heuristics.hard_first([0, 3, 0, 8], 48).tolist() == [24, 0, 24, 0]
    assert heuristics.hard_first([0, 3, 0, 8], 49).tolist() == [25, 0, 24, 0]


def test_hard_first_spreads_what_is_left_over():
    assert heuristics.hard_first([1, 2, 3], 7).tolist() == [3, 2, 2]
    assert heuristics.hard_first([0, 2, 3], 10, upper=6).tolist() == [6, 2, 2]
    assert heuristics.hard_first([0, 2, 3], 10, upper=[6, 1, 9]).tolist() == [6, 1, 3]


@given(rates, st.integers(2, 20))
@settings(max_examples=150)
def test_counts_are_in_proportion_to_the_weights(rates, average):
    """Without active bounds, Webster's method is within one of the exact share, or nearly so."""
    rates = np.array(rates)
    budget = average * rates.size
    for counts, weights in (
        (heuristics.inverse_accuracy(rates, budget, lower=0, upper=budget), 1 - rates + 0.01),
        (heuristics.inverse_variance(rates, budget, lower=0, upper=budget), 1 / (rates * (1 - rates) + 0.01)),
    ):
        assert counts.sum() == budget
        # Divisor methods: max over i of w_i / (n_i + 1/2) <= min over i of w_i / (n_i - 1/2).
        given_some = counts > 0
        if given_some.any():
            assert (weights / (counts + 0.5)).max() <= (weights / (counts - 0.5))[given_some].min() * (1 + 1e-12)


@given(rates, st.integers(0, 10))
def test_bounds_hold(rates, extra):
    n = len(rates)
    budget = 2 * n + min(extra, 6 * n)
    for rule in (heuristics.inverse_accuracy, heuristics.inverse_variance):
        counts = rule(rates, budget, lower=2, upper=8)
        assert counts.sum() == budget and counts.min() >= 2 and counts.max() <= 8


def test_harder_and_surer_prompts_get_more():
    assert (np.diff(heuristics.inverse_accuracy([0.1, 0.5, 0.9], 60, lower=1, upper=60)) < 0).all()
    sure = heuristics.inverse_variance([0.02, 0.5, 0.98], 60, lower=1, upper=60)
    assert abs(sure[0] - sure[2]) <= 1 and sure[2] > sure[1]


def webster(weights, budget):
    """The next rollout goes to the largest weight / (n + 1/2), ties to the lowest index."""
    return one_at_a_time(
        lambda i, n: weights[i] / (n + Fraction(1, 2)), [0] * len(weights), [budget] * len(weights), budget
    )


@given(st.lists(st.integers(1, 99), min_size=1, max_size=9), st.integers(0, 60))
@settings(max_examples=150)
def test_proportional_counts_are_webster_s(weights, budget):
    weights = [Fraction(weight) for weight in weights]
    counts = heuristics.proportional([float(weight) for weight in weights], budget, lower=0, upper=budget)
    assert counts.tolist() == webster(weights, budget)


def test_webster_rounds_to_the_nearest():
    """53 : 24 : 23 for seven: the shares are 3.71, 1.68 and 1.61. Divided by n + 1 (d'Hondt) they give 4, 2, 1."""
    assert heuristics.proportional([53, 24, 23], 7, lower=0, upper=7).tolist() == [3, 2, 2]


@pytest.mark.parametrize("rates", [None, [0.5, 0.0]])
def test_a_known_variance_takes_the_place_of_the_success_rates(rates):
    known = {"lower": 0, "upper": 12, "epsilon": 1.0}
    assert heuristics.inverse_variance(rates, 12, reward_variance=[1.0, 3.0], **known).tolist() == [8, 4]
    assert heuristics.inverse_variance(rates, 12, reward_variance=[0.0, 0.5], **known).tolist() == [7, 5]
