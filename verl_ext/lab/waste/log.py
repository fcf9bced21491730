"""The rollouts of a run, as groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class RolloutLog:
    """One row per group, in the order of steps; a group is what was trained on together for one prompt in one step.

    Attributes:
        step: (G,) training step as verl counts it.
        prompt: (G,) index into ``prompt_ids``.
        rollouts: (G,) rollouts of the group, at least 1.
        correct: (G,) how many of them are correct.
        has_spread: (G,) bool: scores differ, so that the group has a gradient.
        characters: (G,) length of all its responses as text.
        prompt_ids: one per prompt.
        texts: input of each prompt; None unless asked for.
        threshold: scores above it are correct; None where every line has its own verdict (``acc``).
        skipped: lines that could not be used, by reason.
        examples: file and line of the first one, by reason.
        merged: lines that were further outputs of a rollout already counted.
        repeated_steps: steps that lie in several files.
    """

    step: np.ndarray
    prompt: np.ndarray
    rollouts: np.ndarray
    correct: np.ndarray
    has_spread: np.ndarray
    characters: np.ndarray
    prompt_ids: list[str]
    texts: list[str] | None = None
    threshold: float | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    merged: int = 0
    repeated_steps: tuple[int, ...] = ()

    @property
    def success_rate(self) -> np.ndarray:
        """(G,) share of correct rollouts."""
        return self.correct / self.rollouts

    @cached_property
    def visit(self) -> np.ndarray:
        """(G,) int64: 1 for a prompt's first group, 2 for its second, and so on.

        With a loader that goes through the data once per epoch this is the epoch; the log itself does not say.
        """
        order = np.argsort(self.prompt, kind="stable")
        prompts = self.prompt[order]
        first = np.flatnonzero(np.r_[True, prompts[1:] != prompts[:-1]])
        visits = np.empty(order.size, dtype=np.int64)
        visits[order] = np.arange(order.size) - np.repeat(first, np.diff(np.r_[first, order.size])) + 1
        return visits

    @cached_property
    def batches(self) -> list[slice]:
        """The rows of each step, in order."""
        bounds = np.flatnonzero(np.r_[True, self.step[1:] != self.step[:-1], True])
        return [slice(int(begin), int(end)) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]

    @cached_property
    def batch(self) -> np.ndarray:
        """(G,) int64: place of a group's step among the logged ones, from 0."""
        return np.unique(self.step, return_inverse=True)[1]
