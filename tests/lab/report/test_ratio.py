"""Ratios of costs over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from verl_ext.lab.report.ratio import paired


def test_the_ratio_is_paired_by_seed_with_students_interval():
    ours, theirs = np.random.default_rng(0).uniform(100, 1000, (2, 12))
    ratio = paired(ours, theirs)
    expected = stats.ttest_rel(np.log(ours), np.log(theirs)).confidence_interval(0.95)
    assert ratio.mean == pytest.approx(math.exp(np.log(ours / theirs).mean()))
    assert (ratio.low, ratio.high) == (pytest.approx(math.exp(expected.low)), pytest.approx(math.exp(expected.high)))


def test_the_interval_of_the_best_of_several_methods_has_bonferronis_quantile():
    ours, theirs = np.random.default_rng(0).uniform(100, 1000, (2, 12))
    ratio = paired(ours, theirs, chosen_among=5)
    expected = stats.ttest_rel(np.log(ours), np.log(theirs)).confidence_interval(1 - 0.05 / 5)
    assert (ratio.low, ratio.high) == (pytest.approx(math.exp(expected.low)), pytest.approx(math.exp(expected.high)))
