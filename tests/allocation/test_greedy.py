"""The solver by itself: any concave objective, bounds, ties, huge budgets, costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocation import one_at_a_time, one_at_a_time_with_costs

from verl_ext.allocation import greedy
from verl_ext.checks import InvalidValue


def geometric(scale, ratio):
    """Gains scale * ratio^n."""
    return lambda groups, counts: scale[groups] * ratio[groups] ** counts


def solve(scale, ratio, budget, lower, upper, **options):
    columns = [np.asarray(scale, dtype=float), np.asarray(ratio, dtype=float)]
    return greedy.maximize(geometric, columns, budget, np.asarray(lower), np.asarray(upper), **options)


@st.composite
def problems(draw):
    n = draw(st.integers(1, 30))
    # Powers of two: every gain is exact, and ties are everywhere.
    scale = draw(st.lists(st.sampled_from([1.0, 0.5, 0.25, 0.125]), min_size=n, max_size=n))
    ratio = draw(st.lists(st.sampled_from([0.5, 0.25, 1.0]), min_size=n, max_size=n))
    lower = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    room = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    upper = [low + extra for low, extra in zip(lower, room, strict=True)]
    return scale, ratio, draw(st.integers(sum(lower), sum(upper))), lower, upper


@given(problems())
@settings(max_examples=300)
def test_equals_one_at_a_time_with_ties(problem):
    scale, ratio, budget, lower, upper = problem
    expected = one_at_a_time(lambda i, n: scale[i] * ratio[i] ** n, lower, upper, budget)
    assert solve(*problem).tolist() == expected


@pytest.mark.parametrize("n", [3000, 20_000])
def test_equals_one_at_a_time_where_pivots_are_needed(n):
    rng = np.random.default_rng(n)
    scale, ratio = rng.random(n), 0.3 + 0.69 * rng.random(n)
    lower, upper = np.full(n, 1), rng.integers(2, 200, n)
    expected = one_at_a_time(lambda i, k: scale[i] * ratio[i] ** k, lower, upper, 8 * n)
    assert solve(scale, ratio, 8 * n, lower, upper).tolist() == expected


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_equals_one_at_a_time_where_every_kth_group_misleads(factor):
    n = 5 * greedy.THINNED
    rng = np.random.default_rng(n)
    scale, ratio = rng.random(n), 0.3 + 0.6 * rng.random(n)
    scale[::5] *= factor  # the groups whose exact solution gives the first pivots
    lower, upper = np.zeros(n, dtype=np.int64), np.full(n, 10**6)
    expected = one_at_a_time(lambda i, k: scale[i] * ratio[i] ** k, lower, upper, 6 * n)
    assert solve(scale, ratio, 6 * n, lower, upper).tolist() == expected


def test_a_budget_of_a_billion_takes_no_loop_per_rollout():
    counts = greedy.maximize(
        lambda scale: lambda groups, n: scale[groups] / (n + 1.0),
        [np.array([1.0, 3.0])],
        10**9,
        np.zeros(2, dtype=np.int64),
        np.full(2, 10**9),
    )
    assert counts.sum() == 10**9
    assert abs(counts[1] - 3 * counts[0]) <= 3


@pytest.mark.parametrize("n", [5, 5000])
def test_gains_of_zero_go_to_the_lowest_index(n):
    counts = solve(np.zeros(n), np.ones(n), 3 * n + 100, [1] * n, [50] * n)
    expected = one_at_a_time(lambda i, k: 0.0, [1] * n, [50] * n, 3 * n + 100)
    assert counts.tolist() == expected


def test_mirror_images_are_a_tie_although_they_differ_by_rounding():
    rates = np.array([0.9, 0.1, 0.7, 0.3])  # 1 - 0.9 is not 0.1 in floating point

    def spread(rate):
        return lambda groups, n: rate[groups] * (1 - rate[groups]) / ((n + 1.0) * (n + 2.0))

    counts = greedy.maximize(spread, [rates], 11, np.zeros(4, dtype=np.int64), np.full(4, 11))
    assert counts[0] - counts[1] in (0, 1) and counts[2] - counts[3] in (0, 1)
    assert counts.sum() == 11


@given(problems(), st.data())
@settings(max_examples=300)
def test_costs_equal_one_at_a_time(problem, data):
    scale, ratio, _, lower, upper = problem
    costs = data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=len(scale), max_size=len(scale)))
    least = sum(n * cost for n, cost in zip(lower, costs, strict=True))
    most = sum(n * cost for n, cost in zip(upper, costs, strict=True))
    budget = data.draw(st.integers(least, most))
    counts = solve(scale, ratio, budget, lower, upper, costs=np.array(costs, dtype=float))
    expected = one_at_a_time_with_costs(lambda i, n: scale[i] * ratio[i] ** n, lower, upper, budget, costs)
    if len(set(costs)) > 1:  # equal costs: the counts equal those of the greedy loop with a budget of budget // cost
        assert counts.tolist() == expected
    assert counts @ np.array(costs) <= budget


@given(problems(), st.sampled_from([1.0, 0.1, 1 / 3, 700.0]))
@settings(max_examples=100)
def test_equal_costs_change_nothing(problem, cost):
    scale, ratio, budget, lower, upper = problem
    plain = solve(*problem)
    costly = solve(scale, ratio, budget * cost, lower, upper, costs=np.full(len(scale), cost))
    assert costly.tolist() == plain.tolist()


def test_costs_on_many_prompts_leave_no_rollout_that_fits():
    rng = np.random.default_rng(0)
    n = 5000
    costs = rng.integers(50, 4000, n).astype(float)
    upper = np.full(n, 64)
    counts = solve(rng.random(n), 0.5 + 0.4 * rng.random(n), 8 * 1000 * n, np.ones(n, int), upper, costs=costs)
    left = 8 * 1000 * n - counts @ costs
    assert left >= 0
    assert not ((costs <= left) & (counts < upper)).any()


@pytest.mark.parametrize("budget", [3, 11])
def test_a_budget_outside_of_the_bounds_is_refused(budget):
    with pytest.raises(InvalidValue, match="^budget=.* lower needs at least 4 and upper allows at most 10$"):
        solve([1.0, 0.5], [0.5, 0.5], budget, [1, 3], [4, 6])
    assert solve([1.0, 0.5], [0.5, 0.5], 4, [1, 3], [4, 6]).tolist() == [1, 3]
    assert solve([1.0, 0.5], [0.5, 0.5], 10, [1, 3], [4, 6]).tolist() == [4, 6]
