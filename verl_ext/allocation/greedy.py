"""The solver behind every allocator: exact greedy allocation, without a loop over rollouts.

Maximise sum_i V_i(n_i) over integers lower_i <= n_i <= upper_i with sum_i n_i = budget, where the gain
g_i(n) = V_i(n + 1) - V_i(n) never grows with n. Greedy gives one rollout at a time to the prompt with the largest gain,
ties to the lowest index, and is optimal (Knapsack-RL, Theorem 1; HORA, Proposition 3.1). Greedy therefore takes exactly
the ``budget`` largest gains, and the solver only needs the smallest gain taken, the threshold:

1. Equal prompts become one group with a size.
2. Two pivots, one just above and one just below the threshold, come from the exact solution for every k-th group, or
   from a sample of the remaining gains. A search per group counts the gains above each pivot. One round, seldom a few,
   leaves so few gains that sorting them is cheap.
3. Sorting the remaining gains gives the threshold. Gains equal to the threshold go to the lowest indices.

With ``costs`` (for instance expected tokens per rollout) the budget is in units of cost, gains are per unit of cost,
and greedy skips rollouts that no longer fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from verl_ext.checks import InvalidValue

Rows = np.ndarray | slice
Gain = Callable[[Rows, np.ndarray], np.ndarray]
"""(groups, counts) -> gain of one more rollout for each of these groups at these counts."""

Objective = Callable[..., Gain]
"""(columns of the groups) -> their gain function; prompts with equal columns have equal gains."""

LEAST_SAMPLE, MOST_SAMPLE = 2048, 65536  # gains in a sample: about one per group
THINNED = 2048  # groups of which the exact threshold gives the first pivots
BLOCK = 16384  # groups searched together, so that their arrays stay in the processor's cache
TIE = 1e-13  # relative distance of equal gains: the gains of the rates 0.1 and 0.9 differ by rounding


def maximize(
    objective: Objective,
    columns: Sequence[np.ndarray],
    budget: float,
    lower: np.ndarray,
    upper: np.ndarray,
    *,
    costs: np.ndarray | None = None,
    tie: float = TIE,
) -> np.ndarray:
    """The counts of the greedy allocation.

    Args:
        objective: makes the gain function from ``columns``, reduced to one row per group of equal prompts.
        columns: arrays of shape (n,) on which gains depend.
        budget: rollouts, or units of cost.
        lower: (n,) int64.
        upper: (n,) int64, at least ``lower``.
        costs: (n,) above 0; None: every rollout costs one unit, and the budget is spent exactly.
        tie: relative distance below which two gains are equal.

    Returns:
        (n,) int64.

    Raises:
        InvalidValue: ``budget`` is less than ``lower`` needs or more than ``upper`` takes.
    """
    require_feasible(budget, lower, upper, np.ones(lower.size) if costs is None else costs)
    if costs is not None and (costs == costs[0]).all():
        budget, costs = np.clip(np.floor(budget / costs[0] + 1e-9), lower.sum(), upper.sum()), None
    unit = np.ones(lower.size) if costs is None else costs
    slack = 1e-9 * float(unit.min())  # rounding of sums of costs
    counts, left = lower.copy(), budget - float(lower @ unit) + slack
    while (eligible := np.flatnonzero((counts < upper) & (unit <= left))).size:
        keys = [*(column[eligible] for column in columns), counts[eligible], upper[eligible], unit[eligible]]
        first, member, size = _group(keys)
        *parameters, start, stop, cost = (key[first] for key in keys)
        gain = objective(*parameters) if costs is None else _per_cost(objective(*parameters), cost)
        stop = np.minimum(stop, start + np.floor(left / cost).astype(np.int64))
        sure, tied = _take(gain, start, stop, size * cost, left, tie)
        given = sure[member] + _in_order(tied[member], cost[member], left - float((sure * size) @ cost))
        counts[eligible] += given
        left -= float(given @ unit[eligible])
    return counts


def even(lower: np.ndarray) -> Gain:
    """An objective under which the prompt with the fewest rollouts beyond ``lower`` gets the next rollout."""
    return lambda groups, counts: 1 / (counts - lower[groups] + 1.0)


def require_feasible(budget: float, lower: np.ndarray, upper: np.ndarray, unit: np.ndarray) -> None:
    """Raise InvalidValue, naming ``upper`` or ``budget``, if the bounds cannot meet the budget."""
    if (upper < lower).any():
        row = int(np.argmax(upper < lower))
        raise InvalidValue(f"upper[{row}]", int(upper[row]), f"use at least lower[{row}]={lower[row]}")
    least, most = float(lower @ unit), float(upper @ unit)
    if not least * (1 - 1e-12) <= budget <= most * (1 + 1e-12):
        raise InvalidValue(
            "budget", np.float64(budget), f"lower needs at least {least:g} and upper allows at most {most:g}"
        )


def _group(keys: Sequence[np.ndarray]) -> tuple[Rows, Rows, np.ndarray]:
    """Groups of equal rows of ``keys``: the first row of each group, the group of each row, the size of each group."""
    varying = [key for key in keys if (key != key[0]).any()]
    samples = (key[:: max(key.size // 512, 1)] for key in varying)
    if any(sample.size > 256 and np.unique(sample).size > 0.9 * sample.size for sample in samples):
        return slice(None), slice(None), np.ones(keys[0].size, dtype=np.int64)  # too few equal rows to sort for
    order = np.lexsort(varying or keys[:1])
    differs = [key[order][1:] != key[order][:-1] for key in varying]
    new = np.concatenate([[True], np.logical_or.reduce(differs) if differs else np.zeros(order.size - 1, dtype=bool)])
    member = np.empty(order.size, dtype=np.int64)
    member[order] = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    return order[starts], member, np.diff(starts, append=order.size)


def _per_cost(gain: Gain, cost: np.ndarray) -> Gain:
    return lambda groups, counts: gain(groups, counts) / cost[groups]


def _take(
    gain: Gain, start: np.ndarray, stop: np.ndarray, weight: np.ndarray, amount: float, tie: float
) -> tuple[np.ndarray, np.ndarray]:
    """Per group: the number of gains above the threshold, and the number of gains that tie with the threshold.

    ``weight`` is the cost of one rollout for every prompt of a group, and ``amount`` the budget.
    """
    if _cost(stop - start, weight) <= amount:
        return stop - start, np.zeros_like(start)
    threshold, low, high = _threshold(gain, start, stop, weight, amount, tie)
    sure = _count(gain, low, high, threshold * (1 + tie), np.greater)
    return sure - start, _count(gain, sure, high, threshold * (1 - tie), np.greater_equal) - sure


def _threshold(
    gain: Gain, start: np.ndarray, stop: np.ndarray, weight: np.ndarray, amount: float, tie: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """The threshold: the largest gain g for which all gains of at least g together cost more than ``amount``.

    Also returns two counts per group, low and high. A group's gains before low are above the threshold, its gains from
    high on are below the threshold, and none of these gains ties with it.
    """
    low, high = start, stop  # gains before low are taken, gains from high on are not
    top, bottom = np.inf, -np.inf  # no gain before low is below top, and no gain from high on is above bottom
    threshold, before = None, 0
    while threshold is None and (remaining := int((high - low).sum())) > LEAST_SAMPLE + 2 * low.size:
        if not before and low.size > 2 * THINNED:
            above, below = _thinned_pivots(gain, start, stop, weight, amount, tie)
        else:
            above, below = _sampled_pivots(gain, low, high, weight, amount - _cost(low - start, weight))
        if remaining == before:  # many of the remaining gains are equal
            above = below
        before = remaining
        count = _count(gain, low, high, above, np.greater, amount / float(weight.sum()))
        if _cost(count - start, weight) > amount:
            high, bottom = count, above
            continue
        low, top = count, above
        count = _count(gain, low, high, below, np.greater_equal)
        if _cost(count - start, weight) <= amount:
            low, top = count, below
            continue
        high, bottom = count, below
        if above == below:
            threshold = above
    if threshold is None:
        values, rank = _ranked(gain, low, high, weight, amount - _cost(low - start, weight), remaining)
        threshold = float(values[rank])
    if top <= threshold * (1 + tie):
        low = start
    if bottom >= threshold * (1 - tie):
        high = stop
    return threshold, low, high


def _cost(counts: np.ndarray, weight: np.ndarray) -> float:
    return float((counts * weight).sum())


def _thinned_pivots(
    gain: Gain, start: np.ndarray, stop: np.ndarray, weight: np.ndarray, amount: float, tie: float
) -> tuple[float, float]:
    """Gains probably just above and just below the threshold, from the exact counts of every k-th group."""
    some = np.arange(0, start.size, start.size // THINNED)
    first, last = start[some], stop[some]

    def gain_of_some(groups: Rows, counts: np.ndarray) -> np.ndarray:
        return gain(some[groups], counts)

    share = amount * _cost(last - first, weight[some]) / _cost(stop - start, weight)
    count = first + sum(_take(gain_of_some, first, last, weight[some], share, tie))
    margin = int(2 * np.linalg.norm(count - first))  # two standard deviations of the sum of counts
    taken, left = np.flatnonzero(count > first), np.flatnonzero(count < last)
    above = np.sort(np.append(gain_of_some(taken, count[taken] - 1), np.inf))
    below = np.sort(np.append(gain_of_some(left, count[left]), -np.inf))
    return float(above[min(margin, taken.size)]), float(below[max(left.size - margin, 0)])


def _sampled_pivots(
    gain: Gain, low: np.ndarray, high: np.ndarray, weight: np.ndarray, amount: float
) -> tuple[float, float]:
    """Gains probably just above and just below the threshold, from evenly spaced gains."""
    number = min(LEAST_SAMPLE + low.size, MOST_SAMPLE)
    values, rank = _ranked(gain, low, high, weight, amount, number)
    margin = 2 + int(np.sqrt(number))
    return float(values[max(rank - margin, 0)]), float(values[min(rank + margin, number - 1)])


def _ranked(
    gain: Gain, low: np.ndarray, high: np.ndarray, weight: np.ndarray, amount: float, number: int
) -> tuple[np.ndarray, int]:
    """``number`` evenly spaced gains between ``low`` and ``high``, largest first, and the index of the threshold."""
    ends = np.cumsum(high - low)
    positions = ((np.arange(number) + 0.5) * (ends[-1] / number)).astype(np.int64)
    groups = np.searchsorted(ends, positions, side="right")
    values = gain(groups, positions - (ends - high)[groups])
    order = np.argsort(-values)
    spent = np.cumsum(weight[groups[order]])
    rank = int(np.searchsorted(spent, amount * (spent[-1] / _cost(high - low, weight)), side="right"))
    return values[order], min(rank, number - 1)


def _count(
    gain: Gain, low: np.ndarray, high: np.ndarray, pivot: float, reaches: np.ufunc, expected: float = 0
) -> np.ndarray:
    """(groups,) counts between ``low`` and ``high`` up to which the gains reach ``pivot``.

    A binary search covers about twice the ``expected`` increase, because most counts move little. If a group's count
    increases by the whole range, the group's search goes on over a range that grows with the square.
    """
    result = low.copy()
    for begin in range(0, low.size, BLOCK):
        groups = begin + np.flatnonzero((high > low)[begin : begin + BLOCK])
        step = 1 << int(expected).bit_length()
        while groups.size:
            before, most = result[groups], high[groups]
            count, width = before.copy(), 2 * step
            while step:
                passes = reaches(gain(groups, count + (step - 1)), pivot)
                passes &= count + step <= most
                count += step * passes
                step >>= 1
            result[groups] = count
            groups = groups[count - before == width - 1]
            step = min(width**2, 2**53)  # no count is larger
    return result


def _in_order(units: np.ndarray, cost: np.ndarray, amount: float) -> np.ndarray:
    """``units`` of each prompt, from the first prompt on, as far as ``amount`` pays for them."""
    before = np.cumsum(units * cost) - units * cost
    return np.clip(np.floor((amount - before) / cost), 0, units).astype(np.int64)
