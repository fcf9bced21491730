"""verl's reward functions, called as its ``naive`` reward manager calls them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE, FILE = "pkg://", "file://"
VERLS_OWN = (f"{PACKAGE}verl.utils.reward_score", "default_compute_score")
ANSWERS = ("marked", "text")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class RewardError(RuntimeError):
    """The reward function raised, or returned no score."""


@dataclass(frozen=True)
class Verdict:
    """What the reward function says about a response.

    Attributes:
        score: the reward.
        accuracy: its ``acc`` where it returns one, else the score, as in verl's validation.
        answer: its ``pred`` where it returns one, else :func:`answer_of`; what maj@k counts.
    """

    score: float
    accuracy: float
    answer: str | None


def choose(path: str | None, name: str | None) -> tuple[str, str]:
    """Path and name with verl's defaults: ``compute_score``, and without a path verl's own function.

    Raises:
        ValueError: a name without a path.
    """
    if path is not None:
        return path, "compute_score" if name is None else name
    if name is not None:
        raise ValueError(f"reward-name={name} needs the file or module that holds it, as reward.")
    return VERLS_OWN


def load(path: str, name: str) -> Callable[..., Any]:
    """The reward function that ``reward.custom_reward_function.path`` and ``.name`` would give verl.

    Args:
        path: a Python file, ``file://`` and a Python file, or ``pkg://`` and a module.
        name: of the function.

    Raises:
        ValueError: there is no such file, module or function, or it fails to load.
    """
    try:
        if path.startswith(PACKAGE):
            module = importlib.import_module(path.removeprefix(PACKAGE).replace("/", "."))
        else:
            module = _from_file(Path(path.removeprefix(FILE)))
    except Exception as error:
        raise ValueError(f"reward={path} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward-name={name}: {path} has no function of that name.")
    return function


def arguments(assignments: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as keywords; values are read as JSON, and as plain text where they are not JSON.

    Raises:
        ValueError: not of that form.
    """
    keywords: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"reward-argument={assignment!r} must be of the form key=value.")
        try:
            keywords[key] = json.loads(value)
        except json.JSONDecodeError:
            keywords[key] = value
    return keywords


async def judge(
    function: Callable[..., Any],
    data_source: str,
    response: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    keywords: Mapping[str, Any],
    answers: str,
) -> Verdict:
    """The verdict on one response; ``answers`` as for :func:`answer_of`. A plain function runs in a thread.

    Raises:
        RewardError: the function raised, or returned neither a finite number nor a dictionary with a finite ``score``.
    """
    call = partial(
        function,
        data_source=data_source,
        solution_str=response,
        ground_truth=ground_truth,
        extra_info=dict(extra_info),  # a function may write into it
        **keywords,
    )
    try:
        result = await (call() if inspect.iscoroutinefunction(function) else asyncio.to_thread(call))
    except Exception as error:
        raise RewardError(
            f"The reward function raised {type(error).__name__} on a response of data_source={data_source!r}: {error}"
        ) from error
    details = result if isinstance(result, Mapping) else {"score": result}
    try:
        score, accuracy = float(details["score"]), float(details.get("acc", details["score"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            f"The reward function returned {result!r}; it must be a number or a dictionary with a number as 'score'."
        ) from error
    if not math.isfinite(score) or not math.isfinite(accuracy):
        raise RewardError(f"The reward function returned {result!r}, which is not finite.")
    predicted = details.get("pred")
    return Verdict(score, accuracy, answer_of(response, answers) if predicted is None else str(predicted).strip())


def answer_of(response: str, answers: str = "marked") -> str | None:
    """What the response votes for in maj@k, None for no vote.

    ``marked``: what the last ``<answer>`` tags hold, else the last ``\\boxed{}``; ``text``: the whole response.
    """
    if answers == "text":
        return response.strip() or None
    tagged = _TAGGED.findall(response)
    found = tagged[-1].strip() if tagged else _boxed(response)
    return found or None


def _boxed(response: str) -> str:
    """What the last ``\\boxed{}`` holds, braces within it matched; empty where it does not end."""
    _, mark, rest = response.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:place].strip()
    return ""


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    specification = importlib.util.spec_from_file_location("custom_reward_function", path)
    if specification is None or specification.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
