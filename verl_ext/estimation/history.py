"""The last outcomes of each prompt (Knapsack-RL §4.3 and Appendix F)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.estimation.estimator import Prompts, observed, require_state


class History:
    """Mean of the last ``size`` outcomes of a prompt.

    Outcomes come in groups, and the rollouts of a group have no order. If only part of a group is among the last
    ``size`` outcomes, this part counts with the group's rate.

    Args:
        size: outcomes kept per prompt; 16 in the paper.
        initial: prediction for a prompt never observed.
        least: a prompt with at least this many outcomes is known. None: 8, as in the authors' release
            (``data.min_buffer_length``), or ``size`` if that is smaller.

    Raises:
        ValueError: a size of less than 1, an initial rate outside [0, 1], or ``least`` outside [1, size].
    """

    def __init__(self, size: int = 16, initial: float = 0.5, least: int | None = None):
        self.size = checks.integer("size", size, 1)
        self.initial = checks.number("initial", initial, 0, 1)
        self.least = min(8, self.size) if least is None else checks.integer("least", least, 1)
        checks.require(self.least <= self.size, "least", least, f"it must not exceed size={self.size}")
        self._groups: dict[Hashable, list[tuple[float, int]]] = {}  # rate and trials, newest first

    def known(self, prompts: Prompts) -> np.ndarray:
        """(B,) bool: observed at least ``least`` times."""
        kept = (self._groups.get(prompt, ()) for prompt in prompts)
        return np.array([sum(trials for _, trials in groups) >= self.least for groups in kept], dtype=bool)

    def predict(self, prompts: Prompts) -> np.ndarray:
        """(B,) means of the last outcomes."""
        return np.array([self._mean(self._groups.get(prompt)) for prompt in prompts], dtype=np.float64)

    def _mean(self, groups: list[tuple[float, int]] | None) -> float:
        if groups is None:
            return self.initial
        successes = sum(rate * trials for rate, trials in groups)
        return min(successes / sum(trials for _, trials in groups), 1.0)

    def observe(self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Add a group of outcomes to each prompt and drop outcomes beyond the last ``size``.

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        rates, trials = observed(success_rates, trials, len(prompts))
        for prompt, rate, new in zip(prompts, rates.tolist(), trials.tolist(), strict=True):
            kept, room = [], self.size
            for past, count in [(rate, new), *self._groups.get(prompt, [])]:
                kept.append((past, min(count, room)))
                room -= kept[-1][1]
                if not room:
                    break
            self._groups[prompt] = kept

    def state_dict(self) -> dict[str, Any]:
        """The kept outcomes of every observed prompt."""
        return {"size": self.size, "groups": [[prompt, groups] for prompt, groups in self._groups.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the saved estimator has another size.
        """
        require_state(state, size=self.size)
        self._groups = {prompt: [(rate, trials) for rate, trials in groups] for prompt, groups in state["groups"]}
