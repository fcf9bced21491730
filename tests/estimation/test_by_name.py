"""Estimators by name: files that cannot be used are refused at once, before a cluster is up."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verl_ext.estimation.by_name import PromptEstimator
from verl_ext.estimation.probe import LinearProbe
from verl_ext.policy import Prompt

FEATURES = np.random.default_rng(0).normal(size=(6, 4))
OPTIONS = "rollout_policy.estimator_options"


@pytest.fixture
def write(tmp_path):
    """Write an array (.npy) or a text, and return the path."""

    def write(name, content):
        path = tmp_path / name
        np.save(path, content) if isinstance(content, np.ndarray) else path.write_text(content)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ("{", "it is not JSON"),
        ("[1]", "use the JSON of an estimator's state_dict"),
        ("{}", "saved with width=None"),
        (json.dumps(LinearProbe(FEATURES[:, :3]).state_dict()), "saved with width=3, and this estimator has 4"),
        (json.dumps(LinearProbe(FEATURES, dual=True).state_dict()), "saved with dual=True"),
    ],
)
def test_a_state_that_does_not_suit_the_probe_is_refused_at_once(write, state, named):
    with pytest.raises(ValueError, match=rf"^{OPTIONS}\.state=.*probe\.json.* is not valid") as refusal:
        PromptEstimator("probe", {"features": write("f.npy", FEATURES), "state": write("probe.json", state)})
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("features", "named"),
    [
        (np.where(np.eye(6, 4) == 1, np.nan, FEATURES), r"features[0] is not finite"),
        (FEATURES[0], "has shape (4,)"),
        (np.array(["a", "b"]), "matrix of numbers"),
        ("no array", "f.npy"),
    ],
)
@pytest.mark.parametrize("name", ["probe", "gaussian_process", "ridge_regression"])
def test_features_that_are_no_finite_matrix_are_refused_at_once(write, name, features, named):
    with pytest.raises(ValueError, match=rf"^{OPTIONS}\.features=.*f\.npy is not valid: ") as refusal:
        PromptEstimator(name, {"features": write("f.npy", features)})
    assert named in str(refusal.value)


def test_a_probe_without_state_must_learn_online(write):
    options = {"features": write("f.npy", FEATURES)}
    with pytest.raises(ValueError, match=rf"^{OPTIONS}\.state=null is not valid: a probe with online=false needs"):
        PromptEstimator("probe", {**options, "online": False})
    fitted = LinearProbe(FEATURES, online=False, learning_rate=0.1)
    fitted.fit(np.arange(6), np.arange(6) / 5, np.full(6, 8))
    state = write("probe.json", json.dumps(fitted.state_dict()))
    estimator = PromptEstimator("probe", {**options, "online": False, "state": state})
    estimator.start_run([""] * 6)
    prompts = [Prompt(str(row), row) for row in range(6)]
    assert (estimator.predict(prompts) == fitted.predict(np.arange(6))).all()
    assert np.ptp(estimator.predict(prompts)) > 0.3
    PromptEstimator("probe", options)  # online


def test_the_first_state_of_an_estimator_by_id_is_read(write):
    first = PromptEstimator("beta_posterior")
    first.observe([Prompt("a", 0)], np.array([0.25]), np.array([8]))
    state = json.dumps(first.state_dict()["estimator"])
    estimator = PromptEstimator("beta_posterior", {"state": write("state.json", state)})
    estimator.start_run(["", ""])
    assert estimator.predict([Prompt("a", 0), Prompt("b", 1)]).tolist() == [0.3, 0.5]
    with pytest.raises(ValueError, match=rf"^{OPTIONS}\.state=.* is not valid: history cannot load it: "):
        PromptEstimator("history", {"state": write("state.json", state)})


def test_the_strength_of_a_posterior_is_its_prior_and_its_trials():
    estimator = PromptEstimator("beta_posterior")
    estimator.observe([Prompt("a", 0)], np.array([0.25]), np.array([8]))
    assert estimator.strength([Prompt("a", 0), Prompt("b", 1)]).tolist() == [10, 2]


def test_features_need_a_row_for_each_row_of_the_data(write):
    estimator = PromptEstimator("ridge_regression", {"features": write("f.npy", FEATURES)})
    with pytest.raises(ValueError, match="it has 6 rows, and the run 7 prompts"):
        estimator.start_run([""] * 7)


def test_model_and_cache_reach_the_embeddings(monkeypatch, tmp_path):
    asked = []

    def embed(texts, **options):
        asked.append((texts, options))
        return FEATURES[: len(texts)]

    monkeypatch.setattr("verl_ext.estimation.by_name.find_model", lambda model: model)
    monkeypatch.setattr("verl_ext.estimation.by_name.embed", embed)
    options = {"model": "another", "cache": str(tmp_path)}
    PromptEstimator("gaussian_process", options).start_run(["a", "b", "c"])
    assert asked == [(["a", "b", "c"], {"cache": tmp_path, "model": "another"})]
    for cache in (3, ""):
        with pytest.raises(ValueError, match=f"cache={cache!r} is not valid: it must be a folder"):
            PromptEstimator("gaussian_process", {"cache": cache})
