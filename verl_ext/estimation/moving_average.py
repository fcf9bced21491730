"""One success rate for all prompts, the mean of the most recent samples (VIP §6, baseline of Figure 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.estimation.estimator import Prompts, observed, require_state


class MovingAverage:
    """Mean of the last ``window`` observed success rates of any prompts.

    Args:
        window: number of observations that are kept; each is of one prompt. 1,024 in the paper.
        initial: prediction before the first observation.

    Raises:
        ValueError: a window of less than 1 or an initial rate outside [0, 1].
    """

    def __init__(self, window: int = 1024, initial: float = 0.5):
        self.window = checks.integer("window", window, 1)
        self.initial = checks.number("initial", initial, 0, 1)
        self._samples: deque[float] = deque(maxlen=self.window)

    def predict(self, prompts: Prompts) -> np.ndarray:
        """(B,) times the same mean."""
        return np.full(len(prompts), np.mean(self._samples) if self._samples else self.initial)

    def observe(self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Add one sample per prompt. The number of rollouts behind a sample has no effect.

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        rates, _ = observed(success_rates, trials, len(prompts))
        self._samples.extend(rates.tolist())

    def state_dict(self) -> dict[str, Any]:
        """The kept samples."""
        return {"window": self.window, "samples": list(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the saved estimator has another window.
        """
        require_state(state, window=self.window)
        self._samples = deque(state["samples"], maxlen=self.window)
