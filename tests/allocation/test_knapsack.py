from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocation import best_of_all, one_at_a_time, one_at_a_time_with_costs

from verl_ext.allocation import knapsack

TENTHS = np.arange(1, 10) / 10
twentieths = st.integers(1, 19).map(lambda k: Fraction(k, 20))


def exact_value(p: Fraction, n: int, info_gain: bool) -> Fraction:
    likely = 1 - p**n - (1 - p) ** n
    return likely * p * (1 - p) ** 2 if info_gain else likely


def authors_rule(
    rates: list[Fraction],
    budget: int,
    *,
    lower: int = 2,
    info_gain: bool = True,
    on_top: bool = True,
    no_more_is_worthless: bool = True,
) -> list[int]:
    """The rule of the authors' release, for batches whose unsolved prompts (rate 0) take the rollouts left over.

    All prompts get ``lower``. A prompt with 0 < p < 1 needs floor(ln 0.1 / ln max(p, 1 - p)) more on top of ``lower``;
    rollouts beyond all needs go to the unsolved prompts in equal shares. The rest is divided among the prompts with
    0 < p < 1 for the largest sum of Value(lower + k), but k = 0 counts 0 instead of Value(lower). Among equal sums,
    the lowest index gets more.

    Args:
        on_top: False: the need is ceil(...) rollouts in total, as Proposition 1 has it.
        no_more_is_worthless: False: k = 0 counts Value(lower), as equation 6 has it.
    """
    between = [i for i, p in enumerate(rates) if 0 < p < 1]
    unsolved = [i for i, p in enumerate(rates) if p == 0]
    left = budget - lower * len(rates)
    quotients = [math.log(0.1) / math.log(float(max(rates[i], 1 - rates[i]))) for i in between]
    needs = [math.floor(q) if on_top else max(math.ceil(q) - lower, 0) for q in quotients]
    spare = max(left - sum(needs), 0) if unsolved else 0
    counts = [lower] * len(rates)
    for place, i in enumerate(unsolved):
        counts[i] += spare // len(unsolved) + (place < spare % len(unsolved))

    best = {0: (Fraction(0), ())}  # rollouts spent on the prompts so far, from the last one: largest sum, and counts
    for i in reversed(between):
        sums = [exact_value(rates[i], lower + k, info_gain) for k in range(left - spare + 1)]
        sums[0] = Fraction(0) if no_more_is_worthless else sums[0]
        best = {
            spent: max((sums[spent - w] + s, (spent - w, *ks)) for w, (s, ks) in best.items() if w <= spent)
            for spent in range(left - spare + 1)
        }
    for i, k in zip(between, best[left - spare][1], strict=True):
        counts[i] += k
    return counts


@given(st.lists(twentieths, min_size=1, max_size=4), st.integers(0, 10), st.integers(1, 3), st.booleans())
@settings(max_examples=200)
def test_equals_trying_all_allocations(rates, extra, lower, info_gain):
    n = len(rates)
    upper, budget = lower + 8, min(lower * n + extra, (lower + 8) * n)
    expected = best_of_all(lambda i, k: exact_value(rates[i], k, info_gain), [lower] * n, [upper] * n, budget)
    for gradient in knapsack.GRADIENTS:
        counts = knapsack.allocate(
            [float(p) for p in rates], budget, lower=lower, upper=upper, info_gain=info_gain, gradient=gradient
        )
        assert counts.tolist() == expected


@pytest.mark.parametrize("info_gain", [True, False])
def test_equals_greedy_on_a_large_batch(info_gain):
    n = 4000
    rates = np.random.default_rng(1).random(n)

    def gain(i, k):
        p = rates[i]
        return (p * (1 - p) ** 2 if info_gain else 1.0) * ((1 - p) * p**k + p * (1 - p) ** k)

    assert knapsack.allocate(rates, 8 * n, info_gain=info_gain).tolist() == one_at_a_time(
        gain, [2] * n, [128] * n, 8 * n
    )


def test_fewer_than_one_rollout_is_refused_since_greedy_is_not_optimal_there():
    rates, budget = [0.5, 0.4, 0.3], 4
    exact = [Fraction(5, 10), Fraction(4, 10), Fraction(3, 10)]
    best = best_of_all(lambda i, k: exact_value(exact[i], k, True) if k else 0, [0] * 3, [4] * 3, budget)
    assert best == [2, 2, 0]  # the second rollout is worth more than the first, so no single rollout looks good
    with pytest.raises(ValueError, match=r"lower\[0\]=0 is not valid: use an integer of at least 1"):
        knapsack.allocate(rates, budget, lower=0)
    with pytest.raises(ValueError, match=r"lower\[1\]=0"):
        knapsack.allocate(rates, budget, lower=[1, 0, 1])
    assert knapsack.allocate(rates, budget, lower=1).tolist() == [1, 2, 1]


def test_the_value_of_no_rollout_is_zero():
    assert knapsack.value([0, 1, 2], [0.5] * 3).tolist() == [0, 0, 0.5 * 0.5**3]


def test_gradients_that_no_advantage_of_the_driver_has_are_absent():
    for gradient in ("remax", "reinforce"):
        with pytest.raises(ValueError, match=f"gradient={gradient} is not valid: use one of grpo, rloo"):
            knapsack.allocate([0.5, 0.5], 16, gradient=gradient)


def test_table_2_of_the_paper():
    """The paper's 29 and 23 are the release's rule: a need of floor(21.85) = 21 on top of 2. Ours is 22 in total."""
    rates = [Fraction(0), Fraction(9, 10), *[Fraction(1)] * 6]
    assert authors_rule(rates, 64) == [29, 23, 2, 2, 2, 2, 2, 2]
    assert authors_rule(rates, 64, on_top=False) == [30, 22, 2, 2, 2, 2, 2, 2]
    ours = [float(p) for p in rates]
    assert knapsack.rollouts_needed(ours).tolist() == [np.inf, 22, *[np.inf] * 6]
    assert knapsack.allocate(ours, 64).tolist() == [30, 22, 2, 2, 2, 2, 2, 2]
    assert knapsack.allocate(ours, 64, fallback=False).tolist() == [2, 50, 2, 2, 2, 2, 2, 2]


def test_table_3_of_the_paper():
    """The paper's first row follows the release's rule: a prompt with N_low rollouts counts as worth 0.

    This rule gives the easiest prompt a third rollout, which equation 6 gives to the hardest prompt. Our counts are
    worth more by equation 6, the paper's counts by the release's rule.
    """
    rates = [Fraction(k, 10) for k in range(1, 10)]
    table = [14, 12, 9, 7, 7, 7, 7, 6, 3]
    assert authors_rule(rates, 72) == table
    ours = knapsack.allocate(TENTHS, 72).tolist()
    assert ours == authors_rule(rates, 72, no_more_is_worthless=False) == [15, 12, 9, 7, 7, 7, 7, 6, 2]

    def worth(counts, skipped=()):
        return sum(exact_value(p, n, True) for p, n in zip(rates, counts, strict=True) if n not in skipped)

    assert worth(ours) > worth(table)
    assert worth(ours, skipped=[2]) < worth(table, skipped=[2])
    assert float(worth(ours) - worth(table)) == pytest.approx(1.04e-3, rel=0.01)


def test_table_3_without_the_value_of_learning():
    """No prompt stays at N_low = 2 here, so the release's rule, equation 6 and the table agree."""
    table = [12, 9, 7, 6, 5, 6, 7, 9, 11]
    assert authors_rule([Fraction(k, 10) for k in range(1, 10)], 72, info_gain=False) == table
    assert knapsack.allocate(TENTHS, 72, info_gain=False).tolist() == table


@given(
    st.lists(twentieths, min_size=1, max_size=4),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 40),
    st.booleans(),
)
@settings(max_examples=100)
def test_those_two_are_the_only_differences_from_the_authors_rule(between, unsolved, solved, extra, info_gain):
    rates = [*between, *[Fraction(0)] * unsolved, *[Fraction(1)] * solved]
    budget = 2 * len(rates) + extra
    expected = authors_rule(rates, budget, info_gain=info_gain, on_top=False, no_more_is_worthless=False)
    assert knapsack.allocate([float(p) for p in rates], budget, info_gain=info_gain).tolist() == expected


@pytest.mark.parametrize(("rate", "needed"), [(0.01, 230), (0.9, 22), (0.5, 4), (0.1, 22)])
def test_rollouts_needed_is_the_least_that_does(rate, needed):
    """Proposition 1; the paper says 229 for 0.01, which is just short of 90 %."""
    assert knapsack.rollouts_needed([rate])[0] == needed
    slowest = max(rate, 1 - rate)
    assert slowest**needed <= 0.1 + 1e-12 < slowest ** (needed - 1)


def test_with_the_rollouts_needed_a_gradient_has_probability_0_86_or_more():
    """Proposition 1 leaves out min(p, 1 - p)^N, so the probability may be below 0.9. It is least at p = 0.438."""
    rates = np.arange(1, 1000) / 1000
    likely = knapsack.nonzero_gradient(knapsack.rollouts_needed(rates).astype(int), rates)
    assert [likely.min(), likely[437], likely[499]] == pytest.approx([0.8634, 0.8634, 0.875], abs=1e-4)
    assert likely[np.abs(rates - 0.5) > 0.2].min() > 0.8998


@given(st.floats(1e-6, 1 - 1e-6), st.integers(1, 200))
def test_proposition_3(p, n):
    """Values never fall, gains shrink, and the harder of two mirrored prompts is worth more."""
    values = knapsack.value(np.arange(n, n + 3), np.full(3, p))
    first, second = np.diff(values)
    assert first >= -1e-16 and second <= first + 1e-16  # values near 1 carry rounding of 1e-16
    if p < 0.5:
        hard, easy = (knapsack.value([n, n + 1], [rate, rate]) for rate in (p, 1 - p))
        assert hard[0] >= easy[0] - 1e-15 and hard[1] - hard[0] >= easy[1] - easy[0] - 1e-15


@given(st.lists(st.floats(0.01, 0.49), min_size=1, max_size=12), st.integers(3, 12))
def test_the_harder_of_two_mirrored_prompts_gets_no_less(rates, average):
    n = len(rates)
    counts = knapsack.allocate([*rates, *(1 - rate for rate in rates)], 2 * n * average)
    assert (counts[:n] >= counts[n:]).all()


@given(st.lists(st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.9, 1.0]), min_size=1, max_size=40), st.data())
@settings(max_examples=200)
def test_fallback_fills_in_the_stated_order(rates, data):
    rates = np.array(rates)
    budget = data.draw(st.integers(2 * rates.size, 128 * rates.size))
    counts = knapsack.allocate(rates, budget)
    assert counts.sum() == budget and counts.min() >= 2 and counts.max() <= 128
    unsolved, solved = rates == 0, rates == 1
    between = ~unsolved & ~solved
    needs = np.minimum(knapsack.rollouts_needed(rates), 128)[between].sum()
    if (counts[unsolved] > 2).any():  # the other prompts are satisfied, so a part of the budget is left for these
        assert counts[between].sum() >= needs
    if counts[between].sum() > needs:
        assert (counts[unsolved] == 128).all()
    if (counts[solved] > 2).any():
        assert (counts[~solved] == 128).all()
    for rows in (unsolved, solved):
        assert not rows.any() or np.ptp(counts[rows]) <= 1


def test_the_fallback_adds_equal_shares_to_the_bounds_of_unsolved_prompts():
    """Unsolved prompts may have different bounds: n for prompts without enough outcomes (recipe/knapsack)."""
    counts = knapsack.allocate([0.5, 1, 0, 0, 0, 0], 48, lower=[2, 2, 2, 8, 8, 8])
    assert counts.tolist() == [4, 2, 6, 12, 12, 12]  # 4 suffice for p = 0.5; 30 of lower, so 16 are left for four
    counts = knapsack.allocate([0.5, 1, 0, 0, 0, 0], 47, lower=[2, 2, 2, 8, 8, 8], upper=11)
    assert counts.tolist() == [4, 2, 8, 11, 11, 11]


def test_costs_turn_the_budget_into_tokens():
    rates = np.array([0.3, 0.3, 0.0, 1.0])
    costs = np.array([100.0, 400.0, 250.0, 50.0])
    counts = knapsack.allocate(rates, 10_000, costs=costs)
    assert counts @ costs <= 10_000 and counts.min() >= 2
    assert counts[0] > counts[1]  # the same value for a quarter of the tokens
    assert knapsack.allocate(rates, 64 * 7, costs=[7.0] * 4).tolist() == knapsack.allocate(rates, 64).tolist()


@given(
    st.lists(st.tuples(twentieths, st.sampled_from([1, 2, 4, 7])), min_size=1, max_size=5),
    st.integers(0, 60),
    st.booleans(),
)
@settings(max_examples=100)
def test_with_costs_each_rollout_goes_to_the_most_value_per_token(prompts, extra, info_gain):
    rates, costs = zip(*prompts, strict=True)
    n, budget = len(rates), 2 * sum(costs) + extra

    def gain(i, k):
        return exact_value(rates[i], k + 1, info_gain) - exact_value(rates[i], k, info_gain)

    expected = one_at_a_time_with_costs(gain, [2] * n, [9] * n, min(budget, 9 * sum(costs)), costs)
    counts = knapsack.allocate(
        [float(p) for p in rates], min(budget, 9 * sum(costs)), upper=9, info_gain=info_gain, costs=costs
    )
    if len(set(costs)) > 1:  # at equal costs the budget is rounded to whole rollouts first
        assert counts.tolist() == expected
    assert counts @ np.array(costs) <= budget


@pytest.mark.parametrize(
    ("budget", "upper", "expected"),
    [
        (
            31,
            128,
            [4, 4, 2],
        ),  # 11 beyond the lower bounds: 4 until p = 0.5 has its four rollouts, 6 of the 7 left for p = 0
        (45, 5, [5, 5, 4]),  # 4, then 9 until p = 0 is full, then 2 until p = 0.5 is full, and the last 10 for p = 1
        (33, 5, [4, 5, 2]),
        (36, 5, [5, 5, 2]),
    ],
)
def test_the_fallback_counts_in_units_of_cost(budget, upper, expected):
    assert knapsack.allocate([0.5, 0, 1], budget, upper=upper, costs=[2.0, 3.0, 5.0]).tolist() == expected


@pytest.mark.parametrize("rate", [0, 1])
def test_equal_shares_are_divided_by_the_costs(rate):
    """4 units beyond the bounds; gains per unit 1, 1/2, 1/3, ... and 1/2, 1/4, ...; at a tie the first prompt wins."""
    assert knapsack.allocate([rate] * 3, 12).tolist() == [4, 4, 4]
    assert knapsack.allocate([rate] * 2, 10, costs=[1.0, 2.0]).tolist() == [4, 3]


@pytest.mark.parametrize("info_gain", [True, False])
def test_without_fallback_prompts_without_value_are_equal(info_gain):
    counts = knapsack.allocate([0.0, 1.0, 0.0], 9, lower=1, info_gain=info_gain, fallback=False)
    assert counts.tolist() == [7, 1, 1]


@pytest.mark.parametrize("options", [{}, {"fallback": False}, {"info_gain": False, "fallback": False}])
def test_rates_of_0_and_1_divide_by_nothing(options):
    """numpy would print a warning in every step."""
    with np.errstate(divide="raise", invalid="raise"):
        assert knapsack.allocate([0.0, 1.0, 0.5], 12, **options).sum() == 12


@pytest.mark.parametrize(("confidence", "needed"), [(0.5, 1), (0.75, 2), (0.875, 3), (0.9375, 4), (0.95, 5)])
def test_rollouts_needed_at_another_confidence(confidence, needed):
    """Where the quotient of the logarithms is a whole number, rounding must not add a rollout."""
    assert knapsack.rollouts_needed([0.5], confidence=confidence).tolist() == [needed]
