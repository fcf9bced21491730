"""Partition of prompts among workers with balanced loads (Knapsack-RL Appendix C)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks


def partition(costs: ArrayLike, workers: int) -> np.ndarray:
    """(n,) int64 worker of each item, by the largest differencing method of Karmarkar and Karp.

    At first each item is a partition of its own: one worker has the item's cost, the others have none. Each step merges
    the two partitions of largest spread, and gives the fullest worker of the first the items of the emptiest worker of
    the second, and so on, until one partition is left.
    O(n (log n + workers)).

    Args:
        costs: (n,) at least 0, for instance the rollouts or tokens of each prompt.
        workers: number of workers.

    Raises:
        ValueError: the argument named in the message is not finite, negative or of the wrong shape.
    """
    costs = checks.within("costs", checks.vector("costs", costs), 0, np.inf)
    workers = checks.integer("workers", workers, 1)
    # (minus the spread, first item for ties, ((load, items) of each loaded worker, fullest first))
    heap = [(-cost, item, [(cost, (item, None))]) for item, cost in enumerate(costs.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        merged = _merge(one, other, workers)
        least = merged[-1][0] if len(merged) == workers else 0.0
        heapq.heappush(heap, (least - merged[0][0], min(first, second), merged))
    owner = np.empty(costs.size, dtype=np.int64)
    for worker, (_, items) in enumerate(heap[0][2]):
        owner[list(_flatten(items))] = worker
    return owner


def random_dispatch(items: int, workers: int, *, seed: int) -> np.ndarray:
    """(items,) int64 worker of each item, in random order; numbers of items per worker differ by at most one.

    Raises:
        ValueError: a count that is not a whole number of at least 1.
    """
    items, workers = checks.integer("items", items, 1), checks.integer("workers", workers, 1)
    owner = np.arange(items) % workers
    np.random.default_rng(checks.integer("seed", seed)).shuffle(owner)
    return owner


def _merge(one: list, other: list, workers: int) -> list:
    """Merge two partitions: the fullest loads of ``one`` join the emptiest loads of ``other``."""
    paired = max(len(one) + len(other) - workers, 0)  # the other loads meet empty workers
    kept = len(one) - paired
    merged = one[:kept] + other[: len(other) - paired]
    merged += [
        (load + extra, (items, more))
        for (load, items), (extra, more) in zip(one[kept:], reversed(other[len(other) - paired :]), strict=True)
    ]
    merged.sort(key=lambda entry: -entry[0])
    return merged


def _flatten(items: tuple) -> Iterator[int]:
    """The items of nested pairs, without recursion, since a worker may have thousands."""
    stack = [items]
    while stack:
        entry = stack.pop()
        if isinstance(entry, tuple):
            stack.extend(entry)
        elif entry is not None:
            yield entry
