"""Answers that a verifier of reasoning-gym evaluates as Python, and which of them may be."""

from __future__ import annotations

import json
import re
from functools import lru_cache

import reasoning_gym

# reasoning-gym 0.1.25 gives the answer of these tasks to eval, or to sympy's parse_expr, which is eval too.
EVALUATED_TASKS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
FUNCTIONS = frozenset(
    {"sqrt", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"}
)
CALL = re.compile(r"([^\W\d]\w*|[\])}'\"])\s*\(")
OTHER_CODE = re.compile(r"__|[\\#`{}@:=]|\.\s*[^\W\d]|\b(for|lambda|await|yield|import)\b")


def is_harmless(answer: str) -> bool:
    """Whether evaluating it can do no more than take time: no attributes, no code but arithmetic and lists, and no
    calls but of mathematical functions."""
    calls = all(match.group(1) in FUNCTIONS for match in CALL.finditer(answer))
    return calls and not OTHER_CODE.search(answer)


def marks(task: str, parameters: str, answer: str, entry: str) -> float:
    """What the task's verifier gives ``answer``; ``parameters`` and ``entry`` are JSON, as in the rows of the data."""
    return float(verifier(task, parameters).score_answer(answer, entry=json.loads(entry)))


@lru_cache(maxsize=256)
def verifier(task: str, parameters: str) -> reasoning_gym.dataset.ProceduralDataset:
    """The task's data set object, kept because some take a tenth of a second to make."""
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(parameters))
