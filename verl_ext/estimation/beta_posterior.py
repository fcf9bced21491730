"""A Beta posterior per prompt (HORA eq. 2)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.estimation.estimator import Prompts, observed, require_state


class BetaPosterior:
    """P | c of t ~ Beta(a0 + c, b0 + t - c); the prediction is its mean.

    Args:
        prior: (a0, b0), both greater than 0. Prediction for a prompt never observed: a0 / (a0 + b0).

    Raises:
        ValueError: the prior is not a pair of positive numbers.
    """

    def __init__(self, prior: tuple[float, float] = (1.0, 1.0)):
        pair = checks.positive("prior", checks.vector("prior", prior))
        if pair.size != 2:
            raise ValueError(f"prior={prior!r} must be a pair (alpha, beta).")
        self.prior = float(pair[0]), float(pair[1])
        self._counts: dict[Hashable, tuple[float, int]] = {}  # successes, trials

    def parameters(self, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
        """(alpha, beta), each (B,): a prior for :func:`verl_ext.allocation.hit_utility.allocate`."""
        successes, trials = np.array([self._counts.get(p, (0.0, 0)) for p in prompts], dtype=float).reshape(-1, 2).T
        return self.prior[0] + successes, self.prior[1] + trials - successes

    def predict(self, prompts: Prompts) -> np.ndarray:
        """(B,) posterior means."""
        alpha, beta = self.parameters(prompts)
        return alpha / (alpha + beta)

    def observe(self, prompts: Prompts, success_rates: ArrayLike, trials: ArrayLike | None = None) -> None:
        """Add the outcomes of finished rollouts.

        Raises:
            ValueError: the argument named in the message is out of range or of the wrong shape.
        """
        rates, trials = observed(success_rates, trials, len(prompts))
        for prompt, rate, new in zip(prompts, rates.tolist(), trials.tolist(), strict=True):
            successes, before = self._counts.get(prompt, (0.0, 0))
            self._counts[prompt] = successes + rate * new, before + new

    def state_dict(self) -> dict[str, Any]:
        """Successes and trials of every observed prompt."""
        return {"prior": list(self.prior), "counts": [[prompt, *counts] for prompt, counts in self._counts.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            ValueError: the saved estimator has another prior.
        """
        require_state(state, prior=list(self.prior))
        self._counts = {prompt: (successes, trials) for prompt, successes, trials in state["counts"]}
