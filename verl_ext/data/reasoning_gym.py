"""reasoning-gym tasks as verl data sets, judged by reasoning-gym's own verifiers.

``verl-ext data reasoning_gym --out DIR`` writes ``train.parquet`` and ``validation.parquet``. The reward is
``compute_score`` in this file: ``reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym`` and
``reward.custom_reward_function.name=compute_score``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import reasoning_gym
import typer
from rich.console import Console

from verl_ext import checks
from verl_ext.data.levels import distinct, draw_splits, write_splits
from verl_ext.data.limited import TooExpensive, call_limited
from verl_ext.data.schema import make_row

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "reasoning_gym/"
TIMEOUT = 15.0  # seconds to evaluate an answer

# reasoning-gym 0.1.25 passes the answers of these tasks to eval, or to sympy's parse_expr, which calls eval.
EVALUATED_TASKS = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
FUNCTIONS = frozenset("sqrt exp log sin cos tan asin acos atan sinh cosh tanh Abs".split())
CALL = re.compile(r"([^\W\d]\w*|[\])}'\"])\s*\(")
OTHER_CODE = re.compile(r"__|[\\#`{}@:=]|\.\s*[^\W\d]|\b(for|lambda|await|yield|import)\b")


@dataclass(frozen=True)
class Level:
    """One difficulty level of a task.

    Args:
        task: name of a reasoning-gym task, for instance ``spell_backward``.
        difficulty: rank of the level within its task; larger is harder.
        parameters: settings of the task's configuration, except ``seed`` and ``size``.
        weight: share of the rows from this level, relative to the other levels.
    """

    task: str
    difficulty: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.task not in reasoning_gym.factory.DATASETS:
            raise ValueError(f"task: reasoning-gym has no task named {self.task!r}.")
        checks.positive_number("weight", self.weight)

    def __str__(self) -> str:
        return ":".join(filter(None, (self.task, ",".join(f"{key}={value}" for key, value in self.parameters.items()))))


QUICKSTART: tuple[Level, ...] = tuple(
    Level("spell_backward", letters, {"min_word_len": letters, "max_word_len": letters}, weight)
    for letters, weight in {3: 1.25, 4: 1.25, 5: 1.25, 6: 0.25, 7: 0.25, 8: 2.5, 9: 3.25, 10: 2.0}.items()
)
"""Words of 3 to 10 letters, to be spelled backward. The weights suit the model of examples/quickstart/warm_start.py: it
solves a third of the prompts, is uncertain about half, and has no chance at a sixth."""


def parse_level(text: str, difficulty: int) -> Level:
    """A level from ``TASK[:key=value,...][@weight]``, for instance ``chain_sum:min_terms=2,max_terms=2@0.5``.

    Values are read as JSON, and as plain text where they are not JSON.
    """
    body, _, weight = text.partition("@")
    task, _, assignments = body.partition(":")
    parameters: dict[str, Any] = {}
    for assignment in filter(None, assignments.split(",")):
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(f"level: {assignment!r} in {text!r} is not of the form key=value.")
        try:
            parameters[key] = json.loads(value)
        except json.JSONDecodeError:
            parameters[key] = value
    try:
        return Level(task, difficulty, parameters, float(weight) if weight else 1.0)
    except ValueError as error:
        raise ValueError(f"level {text!r}: {error}") from error


def distinct_entries(level: Level, seed: int, exclude: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The level's entries in seeded order, each question once, without the questions in ``exclude``."""
    own_seed = Random(f"{seed}/{level.task}/{json.dumps(level.parameters, sort_keys=True)}").getrandbits(48)
    dataset = reasoning_gym.create_dataset(level.task, seed=own_seed, size=1_000_000, **level.parameters)
    return distinct((dataset[index] for index in range(len(dataset))), itemgetter("question"), exclude)


def splits(
    levels: Sequence[Level], sizes: Mapping[str, int], seed: int, suffix: str = ""
) -> dict[str, list[dict[str, Any]]]:
    """Rows by split, see :func:`~verl_ext.data.levels.draw_splits`.

    Args:
        suffix: text added to every question, for models in need of instructions on how to answer.

    Raises:
        ValueError: also if a verifier rejects an entry's own answer.
    """

    def draw(level: Level, exclude: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for entry in distinct_entries(level, seed, exclude):
            yield entry["question"], to_row(entry, level, suffix)

    return draw_splits(levels, sizes, seed, draw)


def to_row(entry: Mapping[str, Any], level: Level, suffix: str = "") -> dict[str, Any]:
    """One row in verl's schema.

    Raises:
        ValueError: the entry cannot be stored as JSON, or the verifier rejects the entry's own answer.
    """
    try:
        text = json.dumps(entry)
    except TypeError as error:
        raise ValueError(f"{level.task}: its entries cannot be stored as JSON ({error}).") from error
    row = make_row(
        PREFIX + level.task,
        entry["question"] + suffix,
        entry["answer"],
        ability=reasoning_gym.factory.DATASETS[level.task][0].__module__.split(".")[1],
        task=level.task,
        difficulty=level.difficulty,
        parameters=json.dumps(dict(level.parameters), sort_keys=True),
        entry=text,
    )
    if compute_score(row["data_source"], entry["answer"], entry["answer"], row["extra_info"])["score"] != 1.0:
        raise ValueError(f"{level.task}: its verifier does not accept the reference answer {entry['answer']!r}.")
    return row


def extract_answer(solution: str, extract: str = "text") -> str:
    """The text in the last ``<answer>`` tags; without tags the whole text, or its last number (``extract="number"``).

    Raises:
        ValueError: ``extract`` is neither ``text`` nor ``number``.
    """
    checks.choice("extract", extract, ("text", "number"))
    tagged = reasoning_gym.utils.extract_answer(solution)
    if tagged is not None:
        return tagged.strip()
    if extract == "text":
        return solution.strip()
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution)
    return numbers[-1] if numbers else ""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    extract: str = "text",
    **kwargs: Any,
) -> dict[str, float]:
    """verl's reward function: 1.0 for full marks by the task's own verifier, 0.0 for anything else.

    Some verifiers evaluate the answer as Python. They get an answer only if :func:`is_harmless` or the entry's own, in
    a process with limited memory, and an answer taking longer than 15 s scores 0.0.

    ``extract`` is for models answering in sentences, see :func:`extract_answer`; set it with
    ``+reward.custom_reward_function.reward_kwargs.extract=number``. Other keywords are ignored.

    Raises:
        ValueError: the data source is not a reasoning-gym task, or the row lacks its entry.
    """
    task = data_source.removeprefix(PREFIX)
    if task == data_source or task not in reasoning_gym.factory.DATASETS:
        raise ValueError(f"data_source: {data_source!r} is not '{PREFIX}<task>' with a task that reasoning-gym has.")
    if not extra_info or "entry" not in extra_info:
        raise ValueError(f"extra_info: the row of {data_source!r} has no 'entry'; write it with verl_ext.data.")
    answer = extract_answer(solution_str, extract)
    # Not ">=": partial marks, summed in floating point, can come out a little above 1.
    correct = float(_marks(task, extra_info.get("parameters", "{}"), answer, extra_info["entry"]) == 1.0)
    return {"score": correct, "acc": correct}


def _marks(task: str, parameters: str, answer: str, entry: str) -> float:
    if task not in EVALUATED_TASKS:
        return marks(task, parameters, answer, entry)
    if answer != json.loads(entry)["answer"] and not is_harmless(answer):
        return 0.0
    try:
        return call_limited(marks, task, parameters, answer, entry, timeout=TIMEOUT)
    except TooExpensive:
        return 0.0


def is_harmless(answer: str) -> bool:
    """Whether evaluating the answer as Python can do nothing but take time and memory.

    Allowed are arithmetic, lists and calls of mathematical functions; no attributes and no other code.
    """
    calls = all(match.group(1) in FUNCTIONS for match in CALL.finditer(answer))
    return calls and not OTHER_CODE.search(answer)


def marks(task: str, parameters: str, answer: str, entry: str) -> float:
    """The verifier's marks for an answer; ``parameters`` and ``entry`` are JSON, as in the rows of the data."""
    return float(verifier(task, parameters).score_answer(answer, entry=json.loads(entry)))


@lru_cache(maxsize=256)
def verifier(task: str, parameters: str) -> reasoning_gym.dataset.ProceduralDataset:
    """The task's data set object, kept because some take a tenth of a second to make."""
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(parameters))


def levels_of(frames: Sequence[pd.DataFrame]) -> list[Level]:
    """The levels in data sets, easiest first, each with weight 1."""
    found = {(info["task"], info["difficulty"], info["parameters"]) for frame in frames for info in frame["extra_info"]}
    return [Level(task, difficulty, json.loads(parameters)) for task, difficulty, parameters in sorted(found)]


def main(
    out: Annotated[Path, typer.Option(help="Folder for train.parquet and validation.parquet.")],
    level: Annotated[
        list[str] | None,
        typer.Option(help="TASK[:key=value,...][@weight], once per level, easiest first. Default: the quickstart's."),
    ] = None,
    train: Annotated[int, typer.Option(min=1, help="Training prompts.")] = 2048,
    validation: Annotated[int, typer.Option(min=1, help="Validation prompts.")] = 256,
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 0,
    suffix: Annotated[str, typer.Option(help="Text added to every question.")] = "",
) -> None:
    """Write reasoning-gym tasks as training and validation data in verl's schema; no question occurs in both."""
    try:
        levels = [parse_level(text, place) for place, text in enumerate(level, 1)] if level else QUICKSTART
        rows = splits(levels, {"train": train, "validation": validation}, seed, suffix)
        Console().print(write_splits(rows, out))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
