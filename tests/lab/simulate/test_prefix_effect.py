from __future__ import annotations

import numpy as np
import pytest

from verl_ext.lab.simulate.prefix_effect import PrefixEffect


def test_the_effect_grows_with_the_ratio_as_its_curvature_says():
    effect = PrefixEffect(median_gain=4.0, gain_spread=0.5, curvature=2.0)
    gains = effect.gains(np.array([0.0, 1.0]))
    assert gains == pytest.approx([4.0, 4.0 * np.exp(0.5)])
    assert effect.moved(np.array([1.0, 1.0]), gains * [1, -1], 0.5) == pytest.approx([2.0, 1 - np.exp(0.5)])


@pytest.mark.parametrize("arguments", [{"median_gain": 0}, {"gain_spread": -1}, {"curvature": 0}])
def test_bad_parameters_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        PrefixEffect(**arguments)
