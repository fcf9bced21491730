"""A reward function that costs nothing; verl loads it by its path."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """Every other prompt is right."""
    return {"score": float(ground_truth), "acc": float(ground_truth)}
