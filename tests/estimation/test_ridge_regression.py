from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from verl_ext.estimation import RidgeRegression


def test_equals_scikit_learn_on_the_window():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 12)) + 3
    rates = np.clip(0.5 + 0.1 * features[:, 0] - 0.3 + 0.02 * rng.normal(size=200), 0, 1)
    ridge = RidgeRegression(features, window=64, penalty=0.7)
    assert ridge.predict(np.arange(3)).tolist() == [0.5, 0.5, 0.5]
    for batch in np.array_split(np.arange(150), 10):
        ridge.observe(batch, rates[batch])
    window = np.arange(86, 150)
    expected = Ridge(alpha=0.7).fit(features[window], rates[window]).predict(features)
    assert ridge.predict(np.arange(200)) == pytest.approx(np.clip(expected, 0, 1), abs=1e-10)


def test_unknown_prompts_are_refused():
    with pytest.raises(ValueError, match="rows"):
        RidgeRegression(np.eye(3)).predict([3])
    with pytest.raises(ValueError, match="rows"):
        RidgeRegression(np.eye(3)).predict([0.5])


def test_the_window_is_the_papers_may_be_1_and_survives_a_restart():
    assert RidgeRegression(np.eye(3)).window == 1024
    run, resumed = (RidgeRegression(np.eye(3), window=1) for _ in range(2))
    run.observe([0], [1.0])
    resumed.load_state_dict(run.state_dict())
    assert resumed.predict(range(3)).tolist() == run.predict(range(3)).tolist() == [1.0] * 3
    for ridge in (run, resumed):
        ridge.observe([2], [0.25])
        assert ridge.state_dict() == {"window": 1, "samples": [[2, 0.25]]}
