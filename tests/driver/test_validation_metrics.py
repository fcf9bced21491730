"""Metrics of a validation are verl's, bit by bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_ext.driver.modes import PolicyTrainerColocateAsync, PolicyTrainerSeparateAsync, PolicyTrainerSync
from verl_ext.driver.validation_metrics import bootstrap_at_once, bootstrap_metric

VERLS = metric_utils.bootstrap_metric
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
REWARDS = FINITE | st.sampled_from([0, 1, True, False, np.float32(0.1), np.int64(3)])


def unused(*_):
    raise AssertionError("verl's own function is called")


def same(data, k, functions, verls=unused):
    """Assert equal values, and that numpy goes on with the same random numbers."""
    ours = bootstrap_metric(verls, data=data, subset_size=k, reduce_fns=functions, n_bootstrap=40, seed=42)
    after = np.random.random()
    theirs = VERLS(data=data, subset_size=k, reduce_fns=functions, n_bootstrap=40, seed=42)
    assert np.random.random() == after
    np.testing.assert_array_equal(ours, theirs, strict=True)


@given(data=st.lists(REWARDS, min_size=1, max_size=12), k=st.integers(1, 12))
def test_best_and_worst(data, k):
    same(data, k, [np.max, np.min])


@given(
    data=st.lists(st.tuples(st.sampled_from(["1", "2", "3", 4, None]), REWARDS), min_size=1, max_size=12),
    k=st.integers(1, 12),
)
def test_the_majority_and_its_first_value_with_ties(data, k):
    vote = partial(metric_utils.calc_maj_val, vote_key="pred", val_key="val")
    same([{"pred": pred, "val": value} for pred, value in data], k, [vote])


@pytest.mark.parametrize("other", [[np.max], [np.mean], [np.min, np.max]])
def test_other_functions_are_left_to_verl(other):
    same([0.0, 1.0, 0.5], 2, other, VERLS)


def test_lists_of_numbers_are_left_to_verl():
    same([[0.0, 1.0], [0.5, 3.0], [2.0, 0.0]], 2, [np.max, np.min], VERLS)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")
def test_nan_is_left_to_verl():
    """In verl's arrays of objects, max and min are NaN only where NaN comes last in a sample."""
    data = [float(value) for value in range(30)]
    np.random.seed(42)
    first, last = np.random.choice(len(data), size=(40, 2)).T
    data[next(place for place in first if place not in last)] = float("nan")
    same(data, 2, [np.max, np.min], VERLS)
    assert np.isfinite(VERLS(data, 2, [np.max, np.min], n_bootstrap=40)).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_infinite_rewards():
    same([0.0, float("inf"), 0.5], 2, [np.max, np.min])


def metrics(trainer_class, calls):
    """Of 3 prompts with 4 rollouts each, one of which has failed, with answers to vote on."""
    trainer = object.__new__(trainer_class)
    random = np.random.default_rng(0)
    uids = [str(prompt) for prompt in range(3) for _ in range(4)][:-1]
    infos = {"reward": random.integers(0, 2, len(uids)).astype(float).tolist()}
    infos |= {"acc": infos["reward"], "pred": [str(vote) for vote in random.integers(0, 3, len(uids))]}
    expected = {("sums", uid): 4 for uid in uids}
    before = len(calls)
    found = trainer._val_metrics_update(["sums"] * len(uids), uids, infos, [], expected)
    return found, len(calls) - before


def test_a_validation_of_every_mode_has_verls_metrics(monkeypatch):
    calls = []

    def counted(data, subset_size, reduce_fns, n_bootstrap, seed):
        calls.append(data)
        return VERLS(data, subset_size, reduce_fns, n_bootstrap, seed)

    monkeypatch.setattr(metric_utils, "bootstrap_metric", counted)
    theirs, called = metrics(PPOTrainerSync, calls)
    assert called > 0 and {"val-core/sums/acc/maj@4/mean", "val-aux/sums/acc/worst@2/std"} <= set(theirs)
    for trainer_class in (PolicyTrainerSync, PolicyTrainerColocateAsync, PolicyTrainerSeparateAsync):
        assert metrics(trainer_class, calls) == (theirs, 0)
    assert metric_utils.bootstrap_metric is counted


def test_verls_function_comes_back_after_an_error():
    with pytest.raises(KeyError), bootstrap_at_once():
        assert metric_utils.bootstrap_metric is not VERLS
        raise KeyError
    assert metric_utils.bootstrap_metric is VERLS
