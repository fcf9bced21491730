"""Every allocator, on finite inputs of any magnitude: the allocation is exact, or the refused argument is named."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_ext.allocation import gradient_variance, heuristics, hit_utility, knapsack

LARGEST = np.finfo(float).max
magnitudes = st.one_of(
    st.floats(-308, 308).map(lambda exponent: 10.0**exponent),
    st.sampled_from([5e-324, 1e-9, 0.5, 1.0, 1e9, 1e305, LARGEST]),
)
room = st.one_of(st.integers(0, 40), st.integers(0, 60).map(lambda bits: 2**bits))
rates = st.one_of(
    st.floats(0, 1),
    st.floats(-300, 0).map(lambda exponent: 10.0**exponent),
    st.sampled_from([0.0, 5e-324, 1 - 2**-53, 1.0]),
)


def many(size, values):
    return st.lists(values, min_size=size, max_size=size).map(np.array)


@st.composite
def problems(draw):
    """(allocator, arguments, options): finite numbers, of magnitudes that no run would have."""
    n = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["hit_utility", "knapsack", "variance", "proportional", "hard_first"]))
    lower = draw(many(n, st.integers(3 if kind == "variance" else 0, 9)))
    upper = lower + draw(many(n, room))
    share = draw(st.one_of(st.floats(0, 1), magnitudes.filter(lambda share: share < 1)))
    options = {"lower": lower, "upper": upper}
    budget = int(lower.sum()) + math.floor(share * int((upper - lower).sum()))
    if kind in ("hit_utility", "knapsack", "variance") and draw(st.booleans()):
        costs = options["costs"] = draw(st.one_of(many(n, magnitudes), many(n, st.floats(0.1, 10))))
        with np.errstate(all="ignore"):
            budget = float(np.nan_to_num(lower @ costs + share * ((upper - lower) @ costs)))
    if kind == "hit_utility":
        trials = draw(st.one_of(many(n, st.integers(0, 32)), many(n, magnitudes)))
        successes = trials * draw(many(n, st.floats(0, 1)))
        options["prior"] = draw(st.one_of(st.tuples(magnitudes, magnitudes), st.tuples(*2 * [many(n, magnitudes)])))
        return hit_utility.allocate, (successes, trials, budget), options
    if kind == "knapsack":
        options |= {"info_gain": draw(st.booleans()), "fallback": draw(st.booleans())}
        options["gradient"] = draw(st.sampled_from(knapsack.GRADIENTS))
        return knapsack.allocate, (draw(many(n, rates)), budget), options
    if kind == "variance":
        options["estimator"] = draw(st.sampled_from(list(gradient_variance.LEAST)))
        if draw(st.booleans()):
            options["reward_variance"] = draw(many(n, st.one_of(magnitudes, st.just(0.0))))
        return gradient_variance.allocate, (draw(many(n, rates)), budget), options
    if kind == "hard_first":
        options, budget = {"upper": upper}, math.floor(share * int(upper.sum()))
        return heuristics.hard_first, (draw(many(n, st.one_of(magnitudes, st.just(0.0)))), budget), options
    options["epsilon"] = draw(magnitudes)
    if draw(st.booleans()):
        return heuristics.inverse_accuracy, (draw(many(n, rates)), budget), options
    options["reward_variance"] = draw(st.one_of(st.none(), many(n, magnitudes)))
    return heuristics.inverse_variance, (draw(many(n, rates)), budget), options


NAMES = ("successes", "trials", "budget", "lower", "upper", "costs", "prior", "epsilon", "reward_variance")


@given(problems())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_an_allocation_is_exact_or_refused_by_name(problem):
    allocate, arguments, options = problem
    with np.errstate(all="ignore"):
        try:
            given_counts = allocate(*arguments, **options)
        except ValueError as refusal:
            assert str(refusal).startswith(NAMES), refusal
            return
    budget, size = arguments[-1], given_counts.size
    lower, upper = np.broadcast_to(options.get("lower", 0), size), np.broadcast_to(options["upper"], size)
    assert given_counts.dtype == np.int64 and (given_counts >= lower).all() and (given_counts <= upper).all()
    costs = options.get("costs")
    if costs is None:
        assert sum(given_counts.tolist()) == budget
        return
    spent = math.fsum(count * cost for count, cost in zip(given_counts.tolist(), costs.tolist(), strict=True))
    assert spent <= budget * (1 + 1e-9)
    if allocate is not knapsack.allocate:
        assert (costs[given_counts < upper] > (budget - spent) * (1 - 1e-9) - 1e-9 * costs.min()).all()
