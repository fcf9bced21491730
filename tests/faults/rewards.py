"""Faulty reward functions."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

from verl_ext.data.reasoning_gym import compute_score

_calls = itertools.count()  # in the only reward worker


def broken_at_times(**row: Any) -> dict[str, float]:
    """Every tenth call raises, every tenth is NaN, every tenth is infinite."""
    score = compute_score(**row)
    match next(_calls) % 10:
        case 3:
            raise RuntimeError("the verifier has a fault")
        case 5:
            return {**score, "score": math.nan}
        case 7:
            return {**score, "score": math.inf}
    return score


def blocks_twice(**row: Any) -> dict[str, float]:
    """The third and the ninth call never return."""
    if next(_calls) in (3, 9):
        threading.Event().wait()
    return compute_score(**row)


def blocks(**row: Any) -> dict[str, float]:
    """No call ever returns."""
    threading.Event().wait()


def blocks_in_validation(**row: Any) -> dict[str, float]:
    """No call for a prompt of the validation data ever returns."""
    return blocks() if row["extra_info"]["split"] == "validation" else compute_score(**row)


def every_other(**row: Any) -> dict[str, float]:
    """Correct and wrong by turns, for any answer."""
    verdict = float(next(_calls) % 2)
    return {"score": verdict, "acc": verdict}


def without_accuracy(**row: Any) -> dict[str, float]:
    """A score without ``acc``. If this function returned a plain number, verl would use it as ``acc``, too."""
    return {"score": compute_score(**row)["score"]}


def without_a_verdict(**row: Any) -> dict[str, float]:
    """A score of -1 or 2, which is neither a verdict nor a success rate."""
    return {"score": 3 * compute_score(**row)["score"] - 1}
