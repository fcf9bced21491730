"""Allocation without any code of the solver: trying all allocations, and greedy rollout by rollout."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

Value = Callable[[int, int], object]
"""(prompt, rollouts) -> value; Fractions make ties exact."""


def best_of_all(value: Value, lower: Sequence[int], upper: Sequence[int], budget: int) -> list[int]:
    """The optimum by trying every allocation; among equal allocations, the lowest index gets more."""
    ranges = [range(low, high + 1) for low, high in zip(lower, upper, strict=True)]
    feasible = (counts for counts in itertools.product(*ranges) if sum(counts) == budget)
    return list(max(feasible, key=lambda counts: (sum(value(i, n) for i, n in enumerate(counts)), counts)))


def one_at_a_time(gain: Value, lower: Sequence[int], upper: Sequence[int], budget: int) -> list[int]:
    """Greedy with a heap: every rollout to the largest gain, ties to the lowest index."""
    counts, left = list(lower), budget - sum(lower)
    heap = [(-gain(i, n), i) for i, n in enumerate(counts) if n < upper[i]]
    heapq.heapify(heap)
    for _ in range(left):
        _, i = heap[0]
        counts[i] += 1
        if counts[i] < upper[i]:
            heapq.heapreplace(heap, (-gain(i, counts[i]), i))
        else:
            heapq.heappop(heap)
    return counts


def one_at_a_time_with_costs(
    gain: Value, lower: Sequence[int], upper: Sequence[int], budget: float, costs: Sequence[float]
) -> list[int]:
    """Greedy by gain per unit of cost: every rollout to the largest that still fits, ties to the lowest index."""
    counts = list(lower)
    left = budget - sum(n * cost for n, cost in zip(counts, costs, strict=True))
    while True:
        fits = [i for i in range(len(counts)) if counts[i] < upper[i] and costs[i] <= left]
        if not fits:
            return counts
        best = max(fits, key=lambda i: (gain(i, counts[i]) / costs[i], -i))
        counts[best] += 1
        left -= costs[best]
