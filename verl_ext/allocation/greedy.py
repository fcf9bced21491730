"""The solver behind every allocator: exact greedy allocation, without a loop over rollouts.

Maximise sum_i V_i(n_i) over integers lower_i <= n_i <= upper_i with sum_i n_i = budget, where the gain
g_i(n) = V_i(n + 1) - V_i(n) never grows with n. Greedy gives one rollout at a time to the prompt with the largest gain,
ties to the lowest index, and is optimal (Knapsack-RL, Theorem 1; HORA, Proposition 3.1). Greedy therefore takes exactly
the ``budget`` largest gains, and the solver only needs the smallest gain taken, the threshold:

1. Equal prompts become one group with a size.
2. A sample of the remaining gains gives one pivot just above and one just below the threshold, and a search per group,
   in steps that double and then halve, counts the gains above each pivot. A few rounds leave so few gains that sorting
   them is cheap.
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
    if costs is not None and (costs == costs[0]).all():
        budget, costs = np.floor(budget / costs[0] + 1e-9), None
    unit = np.ones(lower.size) if costs is None else costs
    require_feasible(budget, lower, upper, unit)
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


def even(*columns: np.ndarray) -> Gain:
    """An objective under which the prompt with the fewest rollouts gets the next rollout."""
    return lambda groups, counts: 1 / (counts + 1.0)


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
    if float((stop - start) @ weight) <= amount:
        return stop - start, np.zeros_like(start)
    threshold, low, high = _threshold(gain, start, stop, weight, amount)
    close = (low > start) & (gain(slice(None), np.maximum(low - 1, start)) <= threshold * (1 + tie))
    sure = _count(gain, np.where(close, start, low), high, threshold * (1 + tie), np.greater)
    return sure - start, _count(gain, sure, stop, threshold * (1 - tie), np.greater_equal) - sure


def _threshold(
    gain: Gain, start: np.ndarray, stop: np.ndarray, weight: np.ndarray, amount: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """The largest gain at which the gains down to and including it cost more than ``amount``.

    Also returns counts per group: gains before the first reach the threshold, gains from the second on are below it.
    """

    def cost(count: np.ndarray) -> float:
        return float((count - start) @ weight)

    low, high = start, stop  # gains before low are taken, gains from high on are not
    while True:
        remaining = int((high - low).sum())
        number = remaining if remaining <= LEAST_SAMPLE + 2 * low.size else min(LEAST_SAMPLE + low.size, MOST_SAMPLE)
        groups, counts = _places(low, high, number)
        values = gain(groups, counts)
        order = np.argsort(-values)
        values, spent = values[order], np.cumsum(weight[groups[order]])
        rank = int(np.searchsorted(spent, (amount - cost(low)) * spent[-1] / (cost(high) - cost(low)), side="right"))
        if number == remaining:
            return float(values[min(rank, number - 1)]), low, high
        margin = 2 + int(np.sqrt(number))
        for pivot in values[np.clip([rank - margin, rank + margin], 0, number - 1)].tolist():
            above = _count(gain, low, high, pivot, np.greater)
            if cost(above) > amount:
                high = above
                break
            low = _count(gain, above, high, pivot, np.greater_equal)
            if cost(low) > amount:
                return pivot, above, low


def _places(low: np.ndarray, high: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(groups, counts) of ``number`` evenly spaced gains among the gains from ``low`` up to ``high``."""
    ends = np.cumsum(high - low)
    positions = ((np.arange(number) + 0.5) * (ends[-1] / number)).astype(np.int64)
    groups = np.searchsorted(ends, positions, side="right")
    return groups, positions - (ends - high)[groups]


def _count(gain: Gain, low: np.ndarray, high: np.ndarray, pivot: float, reaches: np.ufunc) -> np.ndarray:
    """(groups,) counts between ``low`` and ``high`` up to which the gains reach ``pivot``.

    Steps double while the gains reach the pivot and then halve, because most counts move little after the first pivot.
    """
    result = low.copy()

    def advance(groups: np.ndarray, step: int) -> np.ndarray:
        """Add ``step`` to the counts of the groups whose gains still reach the pivot, and return these groups."""
        groups = groups[result[groups] + step <= high[groups]]
        groups = groups[reaches(gain(groups, result[groups] + step - 1), pivot)]
        result[groups] += step
        return groups

    for begin in range(0, low.size, BLOCK):
        advanced = [np.arange(begin, min(begin + BLOCK, low.size))]
        while advanced[-1].size:
            advanced.append(advance(advanced[-1], 1 << len(advanced) - 1))
        for level in range(len(advanced) - 2, 0, -1):
            advance(advanced[level], 1 << level - 1)
    return result


def _in_order(units: np.ndarray, cost: np.ndarray, amount: float) -> np.ndarray:
    """``units`` of each prompt, from the first prompt on, as far as ``amount`` pays for them."""
    before = np.cumsum(units * cost) - units * cost
    return np.clip(np.floor((amount - before) / cost), 0, units).astype(np.int64)
