from __future__ import annotations

import numpy as np
import pytest

from verl_ext.lab.simulate.lengths import LengthModel


def test_the_medians_are_those_stated_and_nothing_is_beyond_the_maximum():
    model = LengthModel(median=100, spread=0.8, maximum=500, wrong_factor=2.0)
    rng = np.random.default_rng(0)
    correct, wrong = (model.draw(np.full(50_000, end), rng) for end in (True, False))
    assert (np.median(correct), np.median(wrong)) == pytest.approx((100, 200), rel=0.03)
    assert correct.min() >= 1 and max(correct.max(), wrong.max()) == 500


def test_without_spread_all_are_alike():
    assert set(LengthModel(10, 0.0, 50).draw(np.full(5, True), np.random.default_rng(0))) == {10}


@pytest.mark.parametrize("arguments", [{"median": 0}, {"maximum": 0}, {"spread": -1}, {"wrong_factor": 0}])
def test_bad_parameters_are_refused(arguments):
    with pytest.raises(ValueError):
        LengthModel(**arguments)
