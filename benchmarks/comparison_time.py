"""Seconds of a run of benchmarks/comparison.py on a cluster, from its counts and the models of ``verl-ext simulate``.

docs/comparison.md says what is assumed. Nobody measured these seconds, so only their ratios are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from recipe.pods.policy import Pods
from recipe.reinforce_ada.policy import ReinforceAda
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel, Slots

DRAWS = 4  # waves that are drawn for each size


@dataclass(frozen=True)
class Cluster:
    """A cluster on which a step of GRPO has ``step`` rollouts.

    Args:
        step: by default 128 prompts with 64 rollouts each (Pilot-Commit, Table 4).
        largest: rollouts of the largest wave.
        speed: model of engines and updates.
        lengths: model of response lengths.
    """

    step: int = 8192
    largest: int = 2**17
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    lengths: LengthModel = field(default_factory=LengthModel)

    def seconds(self, run: Mapping[str, Any], step: int, usual: float) -> np.ndarray:
        """(measurements,) seconds from the start of a run to each of its measurements.

        Between two measurements, all waves have the same size. A wave waits for its slowest rollout.

        Args:
            run: settings and counts of the run, as :class:`~comparison_runs.Kept` keeps them.
            step: rollouts of GRPO's step in the comparison.
            usual: tokens of a rollout in the comparison that stands for a rollout of ``lengths``.

        Raises:
            ValueError: rollouts without a wave, or a wave above ``largest``.
        """
        rollouts, tokens, waves, steps = (np.diff(run[unit]) for unit in ("rollouts", "tokens", "waves", "steps"))
        scale = self.step / step
        sizes = rollouts / np.maximum(waves, 1) * scale
        if ((waves < 1) & (rollouts > 0)).any() or (sizes > self.largest).any():
            name = f"{run['method']}, seed {run['seed']}"
            raise ValueError(f"{name}: rollouts without a wave, or a wave of more than {self.largest:,} rollouts.")
        longer = tokens / np.maximum(rollouts, 1) / usual
        generation = waves * longer * np.interp(sizes, *self._waves)
        trained = steps * run["prompts"] * trained_of_prompt(run["method"], run["n"]) * scale
        update = steps * self.speed.update_seconds + trained * longer * self._update_of_rollout
        return np.concatenate([[0.0], np.cumsum(generation + update)])

    @cached_property
    def _update_of_rollout(self) -> float:
        """Seconds of an update for each rollout of usual length."""
        return float(self._draw(self.largest, 0).mean()) * self.speed.update_seconds_per_token

    @cached_property
    def _waves(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of waves, from 0 on, and the mean seconds of a wave of each size."""
        sizes = 2 ** np.arange(self.largest.bit_length())
        means = [np.mean([self._wave(size, seed) for seed in range(DRAWS)]) for size in sizes]
        return np.concatenate([[0], sizes]), np.array([0.0, *means])

    def _wave(self, size: int, seed: int) -> float:
        return float(Slots(self.speed).schedule(self._draw(size, seed), 0.0).max())

    def _draw(self, size: int, seed: int) -> np.ndarray:
        """(size,) tokens of responses, half of them correct."""
        return self.lengths.draw(np.arange(size) % 2 == 0, np.random.default_rng(seed))


def trained_of_prompt(method: str, n: int) -> int:
    """Rollouts that an update trains on, of a prompt with n rollouts."""
    if method == "pods":
        return Pods.settings_for(1, n, 0)["m"]
    if method == "reinforce_ada":
        return ReinforceAda.settings_for(1, n, 0)["n"]
    return n
