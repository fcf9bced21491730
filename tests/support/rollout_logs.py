"""Logs of rollouts as verl's v1 trainer writes them, without verl."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_ext.lab.waste.log import RolloutLog


def line(prompt: str = "a", score: float = 1.0, step: int = 1, uid: str | None = None, **further) -> dict:
    """One line of a rollout log; without a uid, in the format of verl's older trainer."""
    row = {"input": f"user\n{prompt}\nassistant\n", "output": "four", "gts": f"truth of {prompt}", "score": score}
    return row | {"step": step} | ({} if uid is None else {"uid": uid}) | further


def write_lines(path: Path, rows: list[dict | str]) -> Path:
    """A line per row; strings as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def log_of(groups: list[tuple[int, int, int, int]]) -> RolloutLog:
    """Groups (step, prompt, correct, rollouts) in the order of their steps; each rollout is ten characters long."""
    step, prompt, correct, rollouts = np.array(groups, dtype=np.int64).T
    spread = (correct > 0) & (correct < rollouts)
    return RolloutLog(step, prompt, rollouts, correct, spread, 10 * rollouts, [f"p{i}" for i in range(max(prompt) + 1)])
