"""The moving average's window and first prediction."""

from __future__ import annotations

import json

import pytest

from verl_ext.checks import InvalidValue
from verl_ext.estimation.moving_average import MovingAverage


def test_a_restored_average_keeps_its_window():
    run, resumed = MovingAverage(window=2), MovingAverage(window=2)
    run.observe(["a", "b"], [0.0, 1.0])
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    for average in (run, resumed):
        average.observe(["c", "d"], [1.0, 1.0])
        average.observe(["e", "f"], [0.5, 1.0])
    assert resumed.state_dict() == run.state_dict()
    assert resumed.predict(["x"]).tolist() == run.predict(["x"]).tolist()


def test_bounds_of_the_arguments():
    assert MovingAverage(window=1, initial=1.0).predict(["x"]).tolist() == [1.0]
    for key, value in (("window", 0), ("initial", 1.5), ("initial", -0.1)):
        with pytest.raises(InvalidValue, match=f"^{key}="):
            MovingAverage(**{key: value})
