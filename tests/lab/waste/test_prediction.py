"""Predictions of estimators, computed by hand for small logs."""

import numpy as np
import pytest
from support.rollout_logs import log_of

from verl_ext.lab.waste.prediction import history_error, predict, seen_before, summary, transitions
from verl_ext.lab.waste.rates import RecordedRates

LOG = log_of([(1, 0, 8, 8), (1, 1, 0, 8), (2, 0, 4, 8), (4, 1, 2, 8), (4, 0, 6, 8), (9, 1, 8, 8)])


def test_the_last_outcomes():
    """At most 16 outcomes; before the first, 0.5."""
    found = predict(LOG, "history")
    assert found.predicted.tolist() == [0.5, 0.5, 1.0, 0.0, 0.75, 0.125]
    assert found.error.tolist() == [0.5, 0.5, 0.5, 0.25, 0.0, 0.875]
    assert found.mae.tolist() == [0.5, 0.5, 0.125, 0.875]


def test_the_moving_average_knows_only_earlier_steps():
    found = predict(LOG, "moving_average")
    assert found.predicted == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, (1 + 0 + 0.5 + 0.25 + 0.75) / 5])


def test_the_posterior():
    assert predict(LOG, "beta_posterior").predicted == pytest.approx([0.5, 0.5, 0.9, 0.1, 13 / 18, 3 / 18])


def test_what_predicts_from_features(tmp_path):
    """Success rates that depend on the features are predicted for unseen prompts; a common mean cannot predict them."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 3))
    np.save(tmp_path / "features.npy", features)
    correct = np.round(16 / (1 + np.exp(-2 * features[:, 0]))).astype(int)
    log = log_of([(1 + prompt // 50, prompt, count, 16) for prompt, count in enumerate(correct)])
    file = tmp_path / "features.npy"
    # Without noise the Gaussian process overshoots.
    assert predict(log, "gaussian_process", features=file, noise=0.1).mae[-1] < 0.1
    assert predict(log, "ridge_regression", features=file).mae[-1] < 0.1
    assert predict(log, "moving_average").mae[-1] > 0.2


def test_a_prompt_is_not_seen_before_by_its_own_step():
    log = log_of([(1, 0, 1, 2), (1, 0, 0, 2), (2, 0, 1, 2), (2, 1, 1, 2)])
    assert seen_before(log).tolist() == [False, False, True, False]


def test_figure_15():
    steps, errors = history_error(LOG, predict(LOG, "history"))
    assert steps.tolist() == [2, 4, 9] and errors.tolist() == [0.5, 0.125, 0.875]


def test_transitions():
    """Prompt 0: extremely easy, medium, medium. Prompt 1: extremely hard, medium, extremely easy."""
    statuses, counts = transitions(LOG)
    assert statuses[0] == "extremely_hard" and counts.sum() == 4
    assert counts[4, 2] == counts[2, 2] == counts[0, 2] == counts[2, 4] == 1
    _, counts = transitions(log_of([(step, 0, correct, 5) for step, correct in enumerate((1, 4, 3, 2))]))
    assert counts[1, 3] == counts[3, 2] == counts[2, 2] == 1  # a fifth is hard, four fifths are easy


def test_summary():
    log = log_of([(step, prompt, 4 * (prompt % 2) + 2, 8) for step in range(1, 4) for prompt in range(200)])
    predictions = {name: predict(log, name) for name in ("history", "moving_average")}
    found = summary(log, predictions, RecordedRates(log, (1.0, 1.0)))
    assert found["groups"] == 600 and found["groups_seen_before"] == 400
    history = found["estimators"]["history"]
    assert history["mae_seen_before"] == 0.0 and history["mae"] == pytest.approx(0.25 / 3)
    assert found["estimators"]["moving_average"]["mae"] == pytest.approx(0.25)
    # A rate of about 0.3 or 0.7 and 8 rollouts: a standard deviation of 0.16, so an absolute error of about 0.12.
    assert 0.08 < found["floor"]["mae"] < 0.15


def test_a_single_step_has_no_history():
    log = log_of([(1, 0, 1, 2), (1, 1, 2, 2)])
    found = summary(log, {"history": predict(log, "history")}, RecordedRates(log, (1.0, 1.0)))
    assert found["estimators"]["history"]["mae_seen_before"] is None and found["floor"]["mae_seen_before"] is None
    steps, errors = history_error(log, predict(log, "history"))
    assert steps.size == errors.size == 0 and transitions(log)[1].sum() == 0
    assert np.isfinite(found["floor"]["mae"])
