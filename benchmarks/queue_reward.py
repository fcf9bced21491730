"""The reward function of benchmarks/queue_trainer.py; verl loads this file by its path."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """The reward is the ground truth, 0 or 1, for any response."""
    return {"score": float(ground_truth), "acc": float(ground_truth)}
