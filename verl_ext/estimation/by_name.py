"""Estimators by name, over the prompts of a training run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext import checks
from verl_ext.estimation.beta_posterior import BetaPosterior
from verl_ext.estimation.embeddings import embed, find_model
from verl_ext.estimation.estimator import Estimator, Features
from verl_ext.estimation.gaussian_process import GaussianProcess
from verl_ext.estimation.history import History
from verl_ext.estimation.moving_average import MovingAverage
from verl_ext.estimation.ridge_regression import RidgeRegression
from verl_ext.policy import Prompt

CACHE = "~/.cache/verl_ext"
OPTIONS = "rollout_policy.estimator_options"


def _probe(features: np.ndarray, **options: Any) -> Estimator:
    from verl_ext.estimation.probe import LinearProbe

    return LinearProbe(features, **options)


BY_ID: dict[str, Callable[..., Estimator]] = {
    "beta_posterior": BetaPosterior,
    "history": History,
    "moving_average": MovingAverage,
}
BY_TEXT: dict[str, Callable[..., Estimator]] = {
    "gaussian_process": GaussianProcess,
    "ridge_regression": RidgeRegression,
    "probe": _probe,
}


def _read_state(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        state = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise checks.InvalidValue(f"{OPTIONS}.state", str(file), f"it is not JSON ({error})") from error
    checks.require(isinstance(state, dict), f"{OPTIONS}.state", str(file), "use the JSON of an estimator's state_dict")
    return state


class PromptEstimator:
    """An estimator chosen by name. Callers pass prompts; the estimator itself gets ids or rows.

    Args:
        name: a key of :data:`BY_ID` or :data:`BY_TEXT`.
        options: further arguments of the estimator. Estimators over texts also take ``model`` (a sentence-transformers
            model: folder, package, or name on the hub if it is in the hub's cache; default all-MiniLM-L6-v2) and
            ``cache`` (folder of embeddings), or ``features`` (an .npy file of shape (rows of the data, d), for instance
            hidden states). All estimators take ``state``, a JSON file with a first ``state_dict``, for instance of a
            probe fitted on logged rollouts (``verl-ext fit_probe``). A probe that does not learn online needs
            this file.
        variances: reward variances are predicted, and not success rates.

    Raises:
        ValueError: the name is unknown, the options do not suit the estimator, or a model or file does not exist or
            cannot be used.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, *, variances: bool = False):
        self.name = checks.choice("rollout_policy.estimator", name, (*BY_ID, *BY_TEXT))
        self._options = dict(options or {})
        valid = "it predicts reward variances, for rewards=continuous; success rates need link=sigmoid, the default"
        softplus = self._options.get("link") == "softplus"
        checks.require(variances or not softplus, f"{OPTIONS}.link", "softplus", valid)
        self._features, self._model = self._options.pop("features", None), self._options.pop("model", None)
        self._state_file = state = self._options.pop("state", None)
        cache = self._options.pop("cache", CACHE)
        folder = isinstance(cache, str | os.PathLike) and bool(cache)
        checks.require(folder, f"{OPTIONS}.cache", cache, "it must be a folder")
        self._cache = Path(cache).expanduser()
        for key, file in (("features", self._features), ("state", state)):
            found = file is None or (isinstance(file, str | os.PathLike) and Path(file).expanduser().is_file())
            checks.require(found, f"{OPTIONS}.{key}", str(file), "there is no such file")
        # Everything that can be refused without the data is refused now, not once a cluster is up.
        self._state = None if state is None else _read_state(state)
        if name == "probe" and self._state is None and self._options.get("online") is False:
            valid = "a probe with online=false needs the file of a fitted probe (verl-ext fit_probe)"
            raise checks.InvalidValue(f"{OPTIONS}.state", None, valid)
        self._estimator: Estimator
        if name in BY_ID:
            self._estimator = self._build(BY_ID[name])
            self._load()
            return
        features = np.eye(2) if self._features is None else self._read_features()
        self._estimator = self._build(BY_TEXT[name], features)
        if self._features is not None:
            self._load()
            return
        try:
            find_model(self._model)
        except ValueError as error:
            raise ValueError(f"{OPTIONS}.model is not valid: {error}") from error

    def _build(self, make: Callable[..., Estimator], *features: np.ndarray) -> Estimator:
        try:
            return make(*features, **self._options)
        except TypeError as error:
            raise ValueError(f"{OPTIONS}={self._options} does not suit {self.name!r}: {error}.") from error
        except ValueError as error:
            raise ValueError(f"{OPTIONS}.{error}" if str(error).startswith(tuple(self._options)) else error) from error

    def start_run(self, texts: Sequence[str]) -> None:
        """Read or compute the features of all prompts, with a progress bar; ``texts[row]`` is the text of a prompt.

        Raises:
            ValueError: the number of rows of the features is not the number of prompts.
        """
        if self.name in BY_ID:
            return
        if self._features is None:
            features = embed(list(texts), cache=self._cache, model=self._model)
        else:
            features = self._read_features()
            if len(features) != len(texts):
                valid = (
                    f"it has {len(features)} rows, and the run {len(texts)} prompts; verl drops prompts longer than "
                    "data.max_prompt_length, so leave these out of the data and of the features"
                )
                raise checks.InvalidValue(f"{OPTIONS}.features", str(self._features), valid)
        self._estimator = self._build(BY_TEXT[self.name], features)
        self._load()

    def _read_features(self) -> np.ndarray:
        try:
            matrix = np.load(Path(self._features).expanduser(), allow_pickle=False)
            return Features("features", matrix).matrix
        except (ValueError, OSError, EOFError) as error:
            raise checks.InvalidValue(f"{OPTIONS}.features", str(self._features), str(error)) from error

    def _load(self) -> None:
        """Continue from the state of the options, if there is one."""
        if self._state is None:
            return
        try:
            self._estimator.load_state_dict(self._state)
        except (ValueError, KeyError, TypeError) as error:
            valid = f"{self.name} cannot load it: {error}"
            raise checks.InvalidValue(f"{OPTIONS}.state", self._state_file, valid) from error

    def _names(self, prompts: Sequence[Prompt]) -> Sequence[str] | np.ndarray:
        if self.name in BY_ID:
            return [prompt.id for prompt in prompts]
        return np.array([prompt.row for prompt in prompts], dtype=np.int64)

    def known(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """(B,) bool: whether the prompt has a prediction of its own; False only for a history with too few outcomes."""
        if isinstance(self._estimator, History):
            return self._estimator.known(self._names(prompts))
        return np.ones(len(prompts), dtype=bool)

    def predict(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """(B,) predictions."""
        return self._estimator.predict(self._names(prompts))

    def strength(self, prompts: Sequence[Prompt]) -> np.ndarray | float:
        """Strength of the predictions as priors, in rollouts (HORA eq. 14); 2 for estimators without strengths."""
        if hasattr(self._estimator, "predict_prior"):
            return self._estimator.predict_prior(self._names(prompts))[1]
        if isinstance(self._estimator, BetaPosterior):
            return np.add(*self._estimator.parameters(self._names(prompts)))
        return 2.0

    def observe(self, prompts: Sequence[Prompt], observed: np.ndarray, trials: np.ndarray) -> None:
        """Learn from success rates of finished groups, or from reward variances with the GP's softplus link."""
        self._estimator.observe(self._names(prompts), observed, trials)

    def state_dict(self) -> dict[str, Any]:
        """The estimator's name and state."""
        return {"name": self.name, "estimator": self._estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: another estimator, or another configuration of the estimator, wrote the state.
        """
        if state["name"] != self.name:
            raise ValueError(f"the state is of estimator={state['name']!r}, this run uses {self.name!r}.")
        self._estimator.load_state_dict(state["estimator"])
