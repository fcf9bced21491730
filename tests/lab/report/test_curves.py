"""Mean and range over seeds that were measured at different places."""

import numpy as np
import pytest

from verl_ext.lab.report.curves import of_methods, over_seeds, parts_over_seeds
from verl_ext.lab.report.methods import by_method
from verl_ext.lab.report.runs import Run


def series(x, y):
    return np.array(x, dtype=float), np.array(y, dtype=float)


def test_seeds_measured_at_the_same_places_are_not_interpolated():
    curve = over_seeds("a", [series([0, 10, 20], [1, 2, 6]), series([0, 10, 20], [3, 2, 0])])
    assert curve.x.tolist() == [0, 10, 20]
    assert (curve.mean.tolist(), curve.low.tolist(), curve.high.tolist()) == ([2, 2, 3], [1, 2, 0], [3, 2, 6])
    assert (curve.name, curve.seeds) == ("a", 2)


def test_between_its_own_points_a_seed_is_linear_and_beyond_them_it_ends():
    curve = over_seeds("a", [series([0, 10, 20], [0, 10, 20]), series([5, 15, 30], [0, 0, 0])])
    assert curve.x.tolist() == [5, 10, 15, 20]
    assert curve.high.tolist() == [5, 10, 15, 20] and curve.mean.tolist() == [2.5, 5, 7.5, 10]


def test_one_seed_is_its_own_band():
    curve = over_seeds("a", [series([1, 2], [0.5, 0.25]), series([], [])])
    assert curve.seeds == 1
    assert curve.mean.tolist() == curve.low.tolist() == curve.high.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("found", [[], [series([], [])], [series([1], [1]), series([2], [1])]])
def test_without_a_place_that_all_seeds_have_there_is_no_curve(found):
    assert over_seeds("a", found) is None


def test_a_method_without_the_metric_keeps_its_place():
    runs = [Run("a", (1, 2), ({"m": 1.0}, {"m": 3.0})), Run("b", (1,), ({},))]
    first, second = of_methods(by_method(runs), lambda run: run.series("m"))
    assert first.mean.tolist() == [1, 3] and second is None


def test_a_part_is_over_the_seeds_that_have_it():
    parts = parts_over_seeds("a", [{"k1": series([1], [1])}, {"k1": series([1], [3]), "k2": series([1], [5])}])
    assert {part: (curve.mean.tolist(), curve.seeds) for part, curve in parts.items()} == {
        "k1": ([2], 2),
        "k2": ([5], 1),
    }
