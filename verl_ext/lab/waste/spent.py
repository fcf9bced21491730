"""What the logged rollouts bought: groups with a gradient, and groups without."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.rates import BAND_NAMES, band

WITH, CORRECT, WRONG, EQUAL = "with gradient", "all correct", "all wrong", "equal scores"
OUTCOMES = (WITH, CORRECT, WRONG, EQUAL)
"""Equal scores: without a gradient although some rollouts are correct and some are not."""
VISIT_RANGES = 12  # rows of the table at most


def outcomes(log: RolloutLog) -> np.ndarray:
    """(G,) index into :data:`OUTCOMES`. A group has a gradient if its scores differ, whatever the verdicts."""
    without = np.where(log.correct == log.rollouts, 1, np.where(log.correct == 0, 2, 3))
    return np.where(log.has_spread, 0, without)


def spent(log: RolloutLog, prior: tuple[float, float]) -> dict[str, Any]:
    """Groups, rollouts and characters by outcome, as a whole, by visit and by difficulty.

    Difficulty is a prompt's success rate over the whole log, as the posterior mean under ``prior``.
    """
    outcome = outcomes(log)
    prompts = len(log.prompt_ids)
    correct = np.bincount(log.prompt, weights=log.correct, minlength=prompts)
    rollouts = np.bincount(log.prompt, weights=log.rollouts, minlength=prompts)
    difficulty = band((prior[0] + correct) / (sum(prior) + rollouts))
    last = int(log.visit.max())
    edges = np.unique(np.linspace(0, last, min(last, VISIT_RANGES) + 1).round().astype(int))
    part = np.searchsorted(edges, log.visit) - 1
    ranges = zip(edges[:-1] + 1, edges[1:], strict=True)
    visits = [str(first) if first == final else f"{first} to {final}" for first, final in ranges]
    return {
        "total": _count(log, outcome, np.ones(len(outcome), dtype=bool)),
        "by_visit": {name: _count(log, outcome, part == place) for place, name in enumerate(visits)},
        "by_difficulty": {
            name: {"prompts": int((difficulty == place).sum())}
            | _count(log, outcome, difficulty[log.prompt] == place)
            for place, name in enumerate(BAND_NAMES)
        },
    }  # fmt: skip


def by_batch(log: RolloutLog) -> dict[str, np.ndarray]:
    """(T,) share of each step's groups, for every outcome that occurs."""
    outcome = outcomes(log)
    groups = np.bincount(log.batch)
    return {
        name: np.bincount(log.batch, weights=outcome == place) / groups
        for place, name in enumerate(OUTCOMES)
        if (outcome == place).any()
    }


def _count(log: RolloutLog, outcome: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    def by_outcome(weights: np.ndarray) -> dict[str, int]:
        sums = np.bincount(outcome[rows], weights=weights[rows], minlength=len(OUTCOMES))
        return dict(zip(OUTCOMES, map(int, sums), strict=True))

    rollouts = int(log.rollouts[rows].sum())
    return {
        "groups": by_outcome(np.ones(len(outcome))),
        "rollouts": by_outcome(log.rollouts),
        "characters": by_outcome(log.characters),
        "success_rate": float(log.correct[rows].sum() / rollouts) if rollouts else None,
    }
