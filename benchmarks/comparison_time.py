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
AT_MOST = {"prefix_sampling", "without_prefixes", "recall"}
"""Methods that train on groups with both outcomes only, and do not replace the others. The runs do not count the
rollouts that were trained on, so these methods get the time of a whole batch: the longest time that they may take."""


@dataclass(frozen=True)
class Cluster:
    """A cluster on which a step of GRPO has ``rollouts`` rollouts.

    Args:
        rollouts: by default 128 prompts with 64 rollouts each (Pilot-Commit, Table 4).
        largest: rollouts of the largest wave.
        speed: model of engines and updates.
        lengths: model of response lengths.
    """

    rollouts: int = 8192
    largest: int = 2**17
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    lengths: LengthModel = field(default_factory=LengthModel)

    def seconds(self, run: Mapping[str, Any], step: int, usual_tokens: float) -> np.ndarray:
        """(measurements,) seconds from the start of a run to each of its measurements.

        Between two measurements, all waves are taken to be of equal size. A wave waits for its slowest rollout.

        Args:
            run: settings and counts of the run, as :class:`~comparison_runs.Kept` keeps them.
            step: rollouts of GRPO's step in the comparison.
            usual_tokens: mean tokens of a rollout in the comparison; a run's responses are longer than ``lengths`` says
                by the factor by which its rollouts have more tokens.

        Raises:
            ValueError: a step without a wave, or a wave above ``largest``.
        """
        rollouts, tokens, waves, steps = (np.diff(run[unit]) for unit in ("rollouts", "tokens", "waves", "steps"))
        if (waves < 1).any() or (sizes := rollouts / waves * self.rollouts / step).max() > self.largest:
            name = f"{run['method']}, seed {run['seed']}"
            raise ValueError(f"{name}: a step without a wave, or a wave of more than {self.largest:,} rollouts.")
        relative_length = tokens / rollouts / usual_tokens
        generation = waves * relative_length * np.interp(sizes, *self._waves)
        trained = steps * run["prompts"] * trained_of_prompt(run["method"], run["n"]) * self.rollouts / step
        update = steps * self.speed.update_seconds + trained * relative_length * self._update_of_rollout
        return np.concatenate([[0.0], np.cumsum(generation + update)])

    @cached_property
    def _update_of_rollout(self) -> float:
        """Seconds of an update for each rollout whose length ``lengths`` describes."""
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
    """Rollouts that an update trains on, of a prompt with n rollouts; for methods in :data:`AT_MOST` the most."""
    if method == "pods":
        return Pods.settings_for(1, n, 0)["m"]
    if method == "reinforce_ada":
        return ReinforceAda.settings_for(1, n, 0)["n"]
    return n
