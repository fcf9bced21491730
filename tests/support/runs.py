"""Fabricated logs of verl's file logger."""

from __future__ import annotations

import json
from pathlib import Path


def write_log(path: Path, steps: dict[int, dict], tail: str = "") -> Path:
    """The metrics of each step, a line each."""
    lines = [json.dumps({"step": step, "data": data}) for step, data in steps.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n" + tail)
    return path


def training_steps(
    accuracies: list[float | None], rollouts: int, first: int = 0, seconds: float = 2.0
) -> dict[int, dict]:
    """A step per accuracy, with ten tokens a rollout; None: a step without validation. Step 0 only validates."""
    steps = {}
    for step, accuracy in enumerate(accuracies, first):
        data = {"actor/loss": 0.1}
        if step:
            data |= {
                "timing_s/step": seconds,
                "rollouts/sampled_total": float(rollouts * step),
                "tokens/sampled_total": float(10 * rollouts * step),
            }
        if accuracy is not None:
            data["val-core/reasoning_gym/spell_backward/acc/mean@4"] = accuracy
            data["val-aux/reasoning_gym/spell_backward/acc/std@4"] = 9.0
        steps[step] = data
    return steps


def write_run(path: Path, accuracies: list[float | None], rollouts: int, first: int = 0, tail: str = "") -> Path:
    """The log of ``training_steps``."""
    return write_log(path, training_steps(accuracies, rollouts, first), tail)
