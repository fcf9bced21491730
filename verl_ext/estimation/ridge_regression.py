"""Linear regression on prompt features over the most recent samples (VIP §6, baseline of Figure 3 and Table 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.estimation.estimator import Features, Prompts, observed, require_state


class RidgeRegression:
    """w, b = argmin sum (p - w x - b)^2 + penalty |w|^2 over the last ``window`` samples; cut to [0, 1].

    Args:
        features: (Q, d), for instance embeddings.
        window: samples kept; 1,024 in the paper.
        penalty: greater than 0. The intercept is not penalised.
        initial: prediction before the first observation.

    Raises:
        ValueError: the argument named in the message is not finite, out of range or of the wrong shape.
    """

    def __init__(
        self,
        features: ArrayLike,
        *,
        window: int = 1024,
        penalty: float = 1.0,
        initial: float = 0.5,
    ):
        self._features = Features("features", features)
        self.window = checks.integer("window", window, 1)
        self.penalty = checks.positive_number("penalty", penalty)
        self.initial = checks.number("initial", initial, 0, 1)
        self._samples: deque[tuple[int, float]] = deque(maxlen=self.window)
        self._fit()

    def predict(self, prompts: Prompts) -> np.ndarray:
        """(B,) predictions in [0, 1]."""
        features = self._features.matrix[self._features.rows(prompts)].astype(np.float64)
        return np.clip((features - self._center) @ self._weights + self._mean, 0, 1)

    def observe(self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Add one sample per prompt and fit again. O(window d^2 + d^3).

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        rows = self._features.rows(prompts)
        rates, _ = observed(success_rates, trials, rows.size)
        self._samples.extend(zip(rows.tolist(), rates.tolist(), strict=True))
        self._fit()

    def _fit(self) -> None:
        width = self._features.matrix.shape[1]
        if not self._samples:
            self._center, self._weights, self._mean = np.zeros(width), np.zeros(width), self.initial
            return
        rows, rates = (np.array(column) for column in zip(*self._samples, strict=True))
        x = self._features.matrix[rows].astype(np.float64)
        self._center, self._mean = x.mean(axis=0), float(rates.mean())
        x -= self._center
        self._weights = np.linalg.solve(x.T @ x + self.penalty * np.eye(width), x.T @ (rates - self._mean))

    def state_dict(self) -> dict[str, Any]:
        """The kept samples."""
        return {"window": self.window, "samples": [list(sample) for sample in self._samples]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the saved estimator has another window, or rows beyond these features.
        """
        require_state(state, window=self.window)
        self._features_cover([row for row, _ in state["samples"]])
        self._samples = deque(((row, rate) for row, rate in state["samples"]), maxlen=self.window)
        self._fit()

    def _features_cover(self, rows: list[int]) -> None:
        if rows and max(rows) >= len(self._features.matrix):
            raise ValueError(f"the state has row {max(rows)}, and features has {len(self._features.matrix)} rows.")
