from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.allocation import balance


def loads(costs, owner, workers):
    return np.bincount(owner, weights=np.asarray(costs, dtype=float), minlength=workers)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 12))
@settings(max_examples=200)
def test_every_item_has_a_worker_and_no_worker_is_far_behind(costs, workers):
    owner = balance.partition(costs, workers)
    assert owner.shape == (len(costs),) and owner.min() >= 0 and owner.max() < workers
    load = loads(costs, owner, workers)
    # No partition by differencing is worse than one item: the spread never exceeds the largest cost.
    assert load.max() - load.min() <= max(costs)


def test_textbook_example():
    """{8, 7, 6, 5, 4} on two workers: differencing ends with 16 and 14."""
    load = loads([8, 7, 6, 5, 4], balance.partition([8, 7, 6, 5, 4], 2), 2)
    assert sorted(load) == [14, 16]


@pytest.mark.parametrize("workers", [2, 3])
def test_close_to_the_best_of_all(workers):
    rng = np.random.default_rng(workers)
    ratios = []
    for _ in range(20):
        costs = rng.integers(2, 128, 8)
        best = min(
            loads(costs, np.array(owner), workers).max() for owner in itertools.product(range(workers), repeat=8)
        )
        ratios.append(loads(costs, balance.partition(costs, workers), workers).max() / best)
    assert max(ratios) < 1.2 and np.mean(ratios) < 1.06


def test_better_than_dealing_out_at_random():
    costs = np.random.default_rng(0).integers(2, 129, 512)
    dealt = loads(costs, balance.random_dispatch(512, 16, seed=0), 16)
    assert np.ptp(loads(costs, balance.partition(costs, 16), 16)) < np.ptp(dealt) / 100


def test_random_dispatch_deals_evenly_and_repeats_itself():
    owner = balance.random_dispatch(100, 8, seed=3)
    assert np.ptp(np.bincount(owner)) <= 1
    assert (owner == balance.random_dispatch(100, 8, seed=3)).all()
    assert (owner != balance.random_dispatch(100, 8, seed=4)).any()
    assert balance.random_dispatch(3, 1, seed=0).tolist() == [0, 0, 0]
    assert balance.random_dispatch(1, 1, seed=0).tolist() == [0]
