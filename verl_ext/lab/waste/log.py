"""The logged rollouts of a run, as groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class RolloutLog:
    """One row per group, in the order of steps: the run trained on G groups of P prompts.

    Attributes:
        step: (G,) training step as verl counts it.
        prompt: (G,) index into ``prompt_ids``.
        rollouts: (G,) number of rollouts, at least 1.
        correct: (G,) number of correct rollouts.
        has_spread: (G,) bool, whether the scores differ, so the group has a gradient.
        characters: (G,) total length of the responses as text.
        prompt_ids: P ids: ``Prompt.id`` in logs of this driver, else a hash of input and ground truth.
        texts: P inputs; None unless asked for.
        threshold: score above which a rollout is correct; None if every line has its own verdict (``acc``).
        skipped: number of unusable lines, by reason.
        examples: file and line of the first unusable line, by reason.
        merged: number of further outputs of rollouts already counted.
        repeated_steps: steps in more than one file.
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
        """(G,) share of correct rollouts, in [0, 1]."""
        return self.correct / self.rollouts

    @cached_property
    def by_prompt(self) -> np.ndarray:
        """(G,) rows of the groups, prompt by prompt; the groups of a prompt in their order."""
        return np.argsort(self.prompt, kind="stable")

    @cached_property
    def visit(self) -> np.ndarray:
        """(G,) int64: 1 for a prompt's first group, 2 for its second, and so on.

        With one pass over the data per epoch, this is the epoch, which the log does not hold.
        """
        order = self.by_prompt
        _, first, groups = np.unique(self.prompt[order], return_index=True, return_counts=True)
        visits = np.empty(order.size, dtype=np.int64)
        visits[order] = np.arange(order.size) - np.repeat(first, groups) + 1
        return visits

    @cached_property
    def batches(self) -> list[slice]:
        """Rows of each of the T logged steps, in order."""
        bounds = np.flatnonzero(np.r_[True, self.step[1:] != self.step[:-1], True])
        return [slice(int(begin), int(end)) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]

    @cached_property
    def batch(self) -> np.ndarray:
        """(G,) int64: place of a group's step among the logged steps, from 0."""
        return np.unique(self.step, return_inverse=True)[1]

    def mean_by_batch(self, values: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        """(T,) mean of ``values`` (G,) over each step's groups, or over those of ``rows`` (G,); NaN without any."""
        weights = np.ones(len(self.step)) if rows is None else rows.astype(np.float64)
        with np.errstate(invalid="ignore"):
            return np.bincount(self.batch, weights=values * weights) / np.bincount(self.batch, weights=weights)


def write_histories(log: RolloutLog, path: Path) -> None:
    """Write a Parquet file with one row per prompt: its id, and the counts of its groups in their order.

    Columns: ``prompt`` (string); ``step``, ``rollouts``, ``correct`` (lists of equal length, an entry per group).
    """
    ends = np.cumsum(np.bincount(log.prompt, minlength=len(log.prompt_ids)))
    offsets = pa.array(np.r_[0, ends], type=pa.int32())
    lists = {
        name: pa.ListArray.from_arrays(offsets, pa.array(getattr(log, name)[log.by_prompt], type=pa.int64()))
        for name in ("step", "rollouts", "correct")
    }
    pq.write_table(pa.table({"prompt": log.prompt_ids, **lists}), path)
