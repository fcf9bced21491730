"""Generates without a model: draws outcomes from the success rates of the moment, and finishes waves in time."""

from __future__ import annotations

import heapq
import math

import numpy as np

from verl_ext.lab.simulate.hardware import Hardware, Slots
from verl_ext.lab.simulate.learning import Ability
from verl_ext.lab.simulate.lengths import LengthModel
from verl_ext.lab.simulate.population import sigmoid
from verl_ext.lab.simulate.prefix_effect import PrefixEffect
from verl_ext.policy import Group, Rollout
from verl_ext.trajectory import Trajectory

Wave = tuple[str, list[Rollout]]

# A trajectory is so many tokens that all say how it ended: what a prefix of it has to say is how long it is, and that.
TRAJECTORY = 100
TRAJECTORIES = tuple(Trajectory(np.full(TRAJECTORY, end), np.ones(TRAJECTORY, dtype=bool)) for end in (0, 1))


class SimulatedEngine:
    """What the controller submits to (:class:`~verl_ext.controller.Engine`), with a clock of its own.

    The clock runs while rollouts are generated and stands still during updates, as engines sleep or are interrupted
    then; whoever trains moves it on where they are not. A rollout succeeds with the probability of its prompt when it
    was submitted; one that is interrupted by an update keeps it, and its version.

    Args:
        ability: success rates; changed by whoever trains.
        lengths: of responses.
        hardware: what generates them.
        prefixes: what starting from one does.
        rng: of everything that is drawn.
        trajectories: whether rollouts carry one.
    """

    def __init__(
        self,
        ability: Ability,
        lengths: LengthModel,
        hardware: Hardware,
        prefixes: PrefixEffect,
        rng: np.random.Generator,
        trajectories: bool = False,
    ):
        self.ability, self.lengths, self.hardware, self.prefixes = ability, lengths, hardware, prefixes
        self.rng, self.trajectories = rng, trajectories
        self.slots = Slots(hardware)
        self.clock = 0.0
        self.version = 0
        self._gains: np.ndarray | None = None  # of prefixes, by prompt
        self._waiting: list[tuple[float, int, str, list[Rollout]]] = []  # a heap, by the time at which they finish
        self._submitted = 0

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        """Draw everything that this wave will bring, and when; the first groups get the first free places."""
        counts = np.array([count for _, count in wave])
        logits = self.ability.logits(np.array([group.prompt.row for group, _ in wave]))
        share = np.zeros(len(wave))  # of a response that is replayed
        if any(group.prefix is not None for group, _ in wave):
            logits, share = self._behind_prefixes([group for group, _ in wave], logits)
        correct = self.rng.random(counts.sum()) < np.repeat(sigmoid(logits), counts)
        whole = self.lengths.draw(correct, self.rng)
        replayed = np.repeat(share, counts)
        tokens = np.maximum(1, np.rint(whole * (1 - replayed))).astype(np.int64)
        ends = self.slots.schedule(tokens, self.clock)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        finished = np.maximum.reduceat(ends, starts).tolist()
        truncated = ~correct & (whole >= self.lengths.maximum)
        rollouts = self._rollouts(correct, tokens, truncated, np.rint(replayed * self.lengths.median).astype(int))
        for (group, count), start, finish in zip(wave, starts.tolist(), finished, strict=True):
            self._submitted += 1
            entry = (finish, self._submitted, group.id, rollouts[start : start + count])
            heapq.heappush(self._waiting, entry)

    def release(self, groups: list[Group]) -> None:
        """Nothing is kept of them."""

    def finish(self) -> list[Wave]:
        """Let time pass until the driver next sees a finished wave; all that it then sees, in the order of time;
        nothing once nothing is being generated."""
        poll = self.hardware.poll_interval
        if self._waiting and self._waiting[0][0] > self.clock:
            self.clock = max(self._waiting[0][0], poll * math.ceil(self._waiting[0][0] / poll))
        waves = []
        while self._waiting and self._waiting[0][0] <= self.clock:
            _, _, group_id, rollouts = heapq.heappop(self._waiting)
            waves.append((group_id, rollouts))
        return waves

    def _rollouts(
        self, correct: np.ndarray, tokens: np.ndarray, truncated: np.ndarray, replayed: np.ndarray
    ) -> list[Rollout]:
        version = self.version
        rows = zip(correct.tolist(), tokens.tolist(), truncated.tolist(), replayed.tolist(), strict=True)
        if not self.trajectories:
            return [
                Rollout(1.0 if right else 0.0, right, length, version, truncated=cut) for right, length, cut, _ in rows
            ]
        return [
            Rollout(
                1.0 if right else 0.0, right, length, version, before, truncated=cut, trajectory=TRAJECTORIES[right]
            )
            for right, length, cut, before in rows
        ]

    def _behind_prefixes(self, groups: list[Group], logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits, and shares of a response, of groups of which some start from a prefix."""
        if self._gains is None:
            self._gains = self.prefixes.gains(self.rng.standard_normal(self.ability.initial.size))
        shares = np.array([0.0 if group.prefix is None else len(group.prefix) / TRAJECTORY for group in groups])
        ends = np.array([0.0 if group.prefix is None else 2.0 * group.prefix.tokens[0] - 1 for group in groups])
        gains = ends * self._gains[[group.prompt.row for group in groups]]
        return self.prefixes.moved(logits, gains, shares), shares
