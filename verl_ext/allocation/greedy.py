"""One solver for every rule: separable concave objectives with bounds, exactly as greedy would, without its loop.

Maximise sum_i V_i(n_i) over integers lower_i <= n_i <= upper_i with sum_i n_i = budget, where each gain
g_i(n) = V_i(n + 1) - V_i(n) does not grow with n. Greedy gives one rollout at a time to the largest gain, ties to the
lowest index, and is optimal (Knapsack-RL, Theorem 1; HORA, Proposition 3.1). It ends with exactly the ``budget``
largest gains. So it is enough to find the smallest gain it still takes, the threshold, and count per prompt:

1. Equal prompts become one group with a size.
2. Between what is certainly taken and what is certainly not, a sample of the gains gives a pivot; a binary search per
   group counts the gains above it. A few rounds leave about as many candidates as there are groups.
3. Sorting these gives the threshold. Gains equal to it are handed out from the lowest index on.

With ``costs`` (say, expected tokens per rollout) the budget is in their unit, gains are per unit of cost, and a rollout
is taken only if it still fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Gain = Callable[[np.ndarray | slice, np.ndarray], np.ndarray]
"""(groups, counts) -> what one more rollout is worth to each of these groups at these counts."""

Objective = Callable[..., Gain]
"""(columns of the groups) -> their gain function; prompts with equal columns have equal gains."""

LEAST_SAMPLE, MOST_SAMPLE = 2048, 65536  # gains looked at to choose pivots: about one per group
BLOCK = 16384  # groups searched together, so that what they need stays in the processor's cache
TIE = 1e-13  # gains closer than this (relative) are a tie: mirror images such as 0.1 and 0.9 differ by rounding only


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
    """Counts that greedy would give.

    Args:
        objective: makes the gain function from ``columns``, reduced to one row per group of equal prompts.
        columns: arrays of shape (n,) that gains depend on.
        budget: rollouts, or units of cost.
        lower: (n,) int64.
        upper: (n,) int64, at least ``lower``.
        costs: (n,) greater than zero; None: one per rollout, and the budget is spent to the unit.
        tie: relative distance below which two gains are equal.

    Returns:
        (n,) int64.

    Raises:
        ValueError: ``budget`` is less than ``lower`` needs or more than ``upper`` takes.
    """
    if costs is not None and (costs == costs[0]).all():
        budget, costs = np.floor(budget / costs[0] + 1e-9), None
    unit = np.ones(lower.size) if costs is None else costs
    require_feasible(budget, lower, upper, unit)
    counts, left = lower.copy(), budget - float(lower @ unit)
    slack = 1e-9 * float(unit.min())  # of sums of costs that are not whole numbers
    eligible = np.flatnonzero((counts < upper) & (unit <= left + slack))
    while eligible.size:
        keys = [*(column[eligible] for column in columns), counts[eligible], upper[eligible], unit[eligible]]
        first, member, size = _group(keys)
        *parameters, start, stop, cost = (key[first] for key in keys)
        gain = _per_cost(objective(*parameters), cost) if costs is not None else objective(*parameters)
        stop = np.minimum(stop, start + np.floor((left + slack) / cost).astype(np.int64))
        sure, tied = _take(gain, start, stop, size * cost, left + slack, tie)
        given = sure[member] + _in_order(tied[member], cost[member], left + slack - float((sure * size) @ cost))
        counts[eligible] += given
        left -= float(given @ unit[eligible])
        eligible = eligible[(counts[eligible] < upper[eligible]) & (unit[eligible] <= left + slack)]
    return counts


def even(*columns: np.ndarray) -> Gain:
    """An objective that gives the next rollout to the prompt with the fewest."""
    return lambda groups, counts: 1 / (counts + 1.0)


def require_feasible(budget: float, lower: np.ndarray, upper: np.ndarray, unit: np.ndarray) -> None:
    """Refuse a budget that the bounds cannot meet, in one sentence.

    Raises:
        ValueError: naming ``upper`` or ``budget``.
    """
    if (upper < lower).any():
        row = int(np.argmax(upper < lower))
        raise ValueError(f"upper[{row}]={upper[row]} is less than lower[{row}]={lower[row]}.")
    least, most = float(lower @ unit), float(upper @ unit)
    if budget < least * (1 - 1e-12):
        raise ValueError(f"budget={budget:g} is less than the {least:g} that lower asks for; raise it or lower lower.")
    if budget > most * (1 + 1e-12):
        raise ValueError(f"budget={budget:g} is more than the {most:g} that upper allows; lower it or raise upper.")


Rows = np.ndarray | slice


def _group(keys: Sequence[np.ndarray]) -> tuple[Rows, Rows, np.ndarray]:
    """Equal rows of ``keys``: an example of each group, the group of each row, and the group's size."""
    varying = [key for key in keys if (key != key[0]).any()]
    if any(_mostly_distinct(key) for key in varying):
        return slice(None), slice(None), np.ones(keys[0].size, dtype=np.int64)  # not worth the sorting
    order = np.lexsort(varying) if len(varying) > 1 else np.argsort(varying[0]) if varying else np.arange(keys[0].size)
    new = np.zeros(order.size, dtype=bool)
    new[0] = True
    for key in varying:
        ordered = key[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    member = np.empty(order.size, dtype=np.int64)
    member[order] = np.cumsum(new) - 1
    starts = np.flatnonzero(new)
    return order[starts], member, np.diff(starts, append=order.size)


def _mostly_distinct(key: np.ndarray, sample: int = 512) -> bool:
    if key.size <= sample:
        return False
    return np.unique(key[:: key.size // sample]).size > 0.9 * sample


def _per_cost(gain: Gain, cost: np.ndarray) -> Gain:
    return lambda groups, counts: gain(groups, counts) / cost[groups]


def _take(
    gain: Gain, start: np.ndarray, stop: np.ndarray, weight: np.ndarray, amount: float, tie: float
) -> tuple[np.ndarray, np.ndarray]:
    """Per group: rollouts that greedy surely takes beyond ``start``, and those that tie at its threshold.

    ``weight`` is what one rollout for every prompt of a group takes out of ``amount``.
    """
    if float((stop - start) @ weight) <= amount:
        return stop - start, np.zeros_like(start)
    threshold, count = _threshold(gain, start, stop, weight, amount)
    sure = _shrink(gain, start, count, threshold * (1 + tie))
    reach = _grow(gain, count, stop, threshold * (1 - tie))
    return sure - start, reach - sure


def _threshold(
    gain: Gain, start: np.ndarray, stop: np.ndarray, weight: np.ndarray, amount: float
) -> tuple[float, np.ndarray]:
    """The first gain, from the largest on, that ``amount`` does not last beyond, and the counts that reach it."""
    low, high = start, stop  # gains below low are taken, gains from high on are not
    while (candidates := int((high - low).sum())) > max(LEAST_SAMPLE, 2 * start.size):
        sample = min(LEAST_SAMPLE + start.size, MOST_SAMPLE)
        groups, counts = _candidates(low, high, sample)
        wanted = (amount - float((low - start) @ weight)) * (sample / candidates)
        above, below = _ranked(gain(groups, counts), weight[groups], wanted, 2 + int(np.sqrt(sample)))
        count = _count(gain, low, high, above)
        if float((count - start) @ weight) > amount:
            high = count
        else:
            low, count = count, _grow(gain, count, high, below)
            low, high = (low, count) if float((count - start) @ weight) > amount else (count, high)
        if int((high - low).sum()) == candidates:  # many gains may be equal to the lower pivot
            count = _count(gain, low, high, below, strictly=True)
            if float((count - start) @ weight) <= amount or (count == high).all():
                return below, high
            high = count
    groups, counts = _candidates(low, high)
    values = gain(groups, counts)
    threshold = _ranked(values, weight[groups], amount - float((low - start) @ weight), 0)[0]
    return threshold, low + np.bincount(groups[values >= threshold], minlength=low.size)


def _candidates(low: np.ndarray, high: np.ndarray, sample: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Group and count of the gains from ``low`` up to ``high``: all, or ``sample`` of them, evenly spaced."""
    length = high - low
    ends = np.cumsum(length)
    total = int(ends[-1])
    if sample is None:
        groups, positions = np.repeat(np.arange(length.size), length), np.arange(total)
    else:
        positions = ((np.arange(sample) + 0.5) * (total / sample)).astype(np.int64)
        groups = np.searchsorted(ends, positions, side="right")
    return groups, positions - (ends - high)[groups]


def _ranked(values: np.ndarray, weight: np.ndarray, wanted: float, margin: int) -> np.ndarray:
    """The values, largest first, that are ``margin`` before and after the one where their weights reach ``wanted``."""
    last = values.size - 1
    if (weight == weight[0]).all():
        rank = int(np.ceil(wanted / weight[0])) - 1
        ranks = np.clip([rank - margin, rank + margin], 0, last)
        return np.partition(values, last - ranks)[last - ranks]
    order = np.argsort(-values)
    rank = int(np.searchsorted(np.cumsum(weight[order]), wanted))
    return values[order[np.clip([rank - margin, rank + margin], 0, last)]]


def _count(gain: Gain, low: np.ndarray, high: np.ndarray, pivot: float, *, strictly: bool = False) -> np.ndarray:
    """(groups,) the counts, between ``low`` and ``high``, that the gains of at least (or above) ``pivot`` lead to."""
    result = low.copy()
    reaches = np.greater if strictly else np.greater_equal
    for begin in range(0, low.size, BLOCK):
        rows = slice(begin, begin + BLOCK)
        count, most = result[rows], high[rows]  # count is a view: it grows in place
        step = 1 << int((most - count).max()).bit_length()
        while step := step >> 1:
            trial = count + step
            passes = reaches(gain(rows, trial - 1), pivot)
            passes &= trial <= most
            count += step * passes
    return result


def _shrink(gain: Gain, start: np.ndarray, count: np.ndarray, pivot: float) -> np.ndarray:
    """``count`` less the gains that are not above ``pivot``."""
    count = count.copy()
    rows = np.flatnonzero((_at(gain, np.maximum(count - 1, start)) <= pivot) & (count > start))
    count[rows] = _count(_of(gain, rows), start[rows], count[rows], pivot, strictly=True)
    return count


def _grow(gain: Gain, count: np.ndarray, stop: np.ndarray, pivot: float) -> np.ndarray:
    """``count`` and the gains after it that reach ``pivot``."""
    count = count.copy()
    rows = np.flatnonzero((_at(gain, count) >= pivot) & (count < stop))
    count[rows] = _count(_of(gain, rows), count[rows], stop[rows], pivot)
    return count


def _at(gain: Gain, counts: np.ndarray) -> np.ndarray:
    """(groups,) the gain of each group at its count."""
    blocks = (slice(begin, begin + BLOCK) for begin in range(0, counts.size, BLOCK))
    return np.concatenate([gain(rows, counts[rows]) for rows in blocks])


def _of(gain: Gain, rows: np.ndarray) -> Gain:
    return lambda groups, counts: gain(rows[groups], counts)


def _in_order(units: np.ndarray, cost: np.ndarray, amount: float) -> np.ndarray:
    """``units`` of each prompt, from the first prompt on, until one does not fit into ``amount``."""
    ends = np.cumsum(units * cost)
    fits = np.floor((amount - (ends - units * cost)) / cost)
    return np.clip(fits, 0, units).astype(np.int64)
