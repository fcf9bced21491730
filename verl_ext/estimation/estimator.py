"""The protocol of estimators, and how callers name prompts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks

Prompts = Sequence[Hashable] | np.ndarray
"""Stable prompt ids; for estimators over features, rows of the features."""


class Estimator(Protocol):
    """Predicts the success rate of each prompt, and learns from finished rollouts.

    Ids must be stable across epochs and restarts. ``state_dict`` is JSON-able if the ids are.
    """

    def predict(self, prompts: Prompts) -> np.ndarray:
        """(B,) float64 predictions, also for prompts without observations."""

    def observe(self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Learn from (B,) mean successes of ``trials`` finished rollouts each (None: one rollout each)."""

    def state_dict(self) -> dict[str, Any]:
        """The values changed by ``observe``, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``."""


def observed(success_rates: ArrayLike, trials: ArrayLike | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(size,) rates in [0, 1] and (size,) int64 trials of at least 1.

    Raises:
        ValueError: the argument named in the message is out of range or of the wrong shape.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates, size), 0, 1)
    return rates, checks.integers("trials", 1 if trials is None else trials, size, 1)


class Features:
    """One row of features per prompt.

    Args:
        name: the caller's name of the matrix, for error messages.
        matrix: (Q, d) finite numbers, embeddings or hidden states.

    Raises:
        ValueError: ``matrix`` is not a finite matrix.
    """

    def __init__(self, name: str, matrix: ArrayLike):
        try:
            matrix = np.asarray(matrix)
            self.matrix = matrix if matrix.dtype == np.float32 else matrix.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be a matrix of numbers, one row per prompt.") from error
        if self.matrix.ndim != 2 or 0 in self.matrix.shape:
            raise ValueError(f"{name} has shape {self.matrix.shape}; it must be (prompts, features), both at least 1.")
        finite = np.isfinite(self.matrix).all(axis=1)
        if not finite.all():
            raise ValueError(f"{name}[{int(np.argmin(finite))}] is not finite.")

    def rows(self, prompts: Prompts) -> np.ndarray:
        """(B,) int64 rows of the prompts.

        Raises:
            ValueError: a prompt is not the number of a row.
        """
        rows = np.asarray(prompts)
        if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
            raise ValueError(f"rows must be whole numbers of shape (B,), not {rows.dtype} of shape {rows.shape}.")
        if rows.size and not 0 <= rows.min() <= rows.max() < len(self.matrix):
            raise ValueError(f"rows has {rows.min()} to {rows.max()}; they must be in [0, {len(self.matrix)}).")
        return rows.astype(np.int64)


def require_state(state: Mapping[str, Any], **expected: Any) -> None:
    """Raise ValueError if ``state`` comes from an estimator with another configuration.

    Raises:
        ValueError: naming the first entry that differs.
    """
    for key, value in expected.items():
        if state.get(key) != value:
            raise ValueError(f"the state was saved with {key}={state.get(key)!r}, and this estimator has {value!r}.")
