"""reasoning-gym tasks as verl data sets, judged by reasoning-gym's own verifiers.

``python -m verl_ext.data.reasoning_gym --out DIR`` writes ``train.parquet`` and ``validation.parquet``. The reward is
``compute_score`` in this file: ``reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym`` and
``reward.custom_reward_function.name=compute_score``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import pandas as pd
import reasoning_gym
import typer
from rich.console import Console

from verl_ext.data.evaluated_answers import EVALUATED_TASKS, is_harmless, marks
from verl_ext.data.limited import TooExpensive, call_limited
from verl_ext.data.splits import write_splits

PREFIX = "reasoning_gym/"
TIMEOUT = 15.0  # seconds for an answer that is evaluated


@dataclass(frozen=True)
class Level:
    """One difficulty level of a task.

    Args:
        task: name of a reasoning-gym task, for instance ``spell_backward``.
        difficulty: rank of the level within its task; larger is harder.
        parameters: what the task's configuration needs to be set to, except ``seed`` and ``size``.
        weight: share of the examples that come from this level, relative to the other levels.
    """

    task: str
    difficulty: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.task not in reasoning_gym.factory.DATASETS:
            raise ValueError(f"task: reasoning-gym has no task named {self.task!r}.")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight: must be positive and finite, got {self.weight} for task {self.task!r}.")


QUICKSTART: tuple[Level, ...] = tuple(
    Level("spell_backward", letters, {"min_word_len": letters, "max_word_len": letters}, weight)
    for letters, weight in {3: 1.25, 4: 1.25, 5: 1.25, 6: 0.25, 7: 0.25, 8: 2.5, 9: 3.25, 10: 2.0}.items()
)
"""Words of 3 to 10 letters, to be spelled backward. The weights suit the model of examples/quickstart/warm_start.py:
a third of the prompts it solves, a sixth are out of its reach, and in between it is uncertain."""


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
    """The level's entries in seeded order, each question once, none whose question is in ``exclude``.

    Ends when 20 000 draws in a row brought no new question: then the level has (almost) no other.
    """
    own_seed = Random(f"{seed}/{level.task}/{json.dumps(level.parameters, sort_keys=True)}").getrandbits(48)
    dataset = reasoning_gym.create_dataset(level.task, seed=own_seed, size=1_000_000, **level.parameters)
    seen, index, last_new = set(exclude), 0, 0
    while index - last_new <= 20_000:
        entry = dataset[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            last_new = index
            yield entry
        index += 1


def shares(levels: Sequence[Level], total: int) -> list[int]:
    """How many of ``total`` examples each level gets: proportional to weight, rounded by largest remainder."""
    if not levels:
        raise ValueError("levels: at least one is needed.")
    if total < 0:
        raise ValueError(f"total: must not be negative, got {total}.")
    exact = [total * level.weight / sum(other.weight for other in levels) for level in levels]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(levels)), key=lambda place: (counts[place] - exact[place], place))
    for place in by_remainder[: total - sum(counts)]:
        counts[place] += 1
    return counts


def splits(levels: Sequence[Level], sizes: Mapping[str, int], seed: int, suffix: str = "") -> dict[str, pd.DataFrame]:
    """Data sets in verl's schema that share no question.

    Args:
        levels: what to draw from.
        sizes: name of each split and how many rows it gets.
        seed: the same seed and arguments give the same rows. The global random state is neither read nor changed.
        suffix: text added to every question, for models that need to be told how to answer.

    Raises:
        ValueError: a level has too few distinct questions, or an entry that its own verifier does not accept.
    """
    counts = {split: shares(levels, size) for split, size in sizes.items()}
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in sizes}
    questions: set[str] = set()
    for place, level in enumerate(levels):
        entries = distinct_entries(level, seed, questions)
        for split in sizes:
            for _ in range(counts[split][place]):
                entry = next(entries, None)
                if entry is None:
                    needed = sum(counts[name][place] for name in sizes)
                    raise ValueError(
                        f"{level.task} {dict(level.parameters)}: fewer than {needed} distinct questions; "
                        "ask for fewer rows or a wider level."
                    )
                questions.add(entry["question"])
                rows[split].append(to_row(entry, level, split, suffix))
    for split, members in rows.items():
        Random(f"{seed}/{split}").shuffle(members)
        for index, row in enumerate(members):
            row["extra_info"]["index"] = index
    return {split: pd.DataFrame(members) for split, members in rows.items()}


def to_row(entry: Mapping[str, Any], level: Level, split: str, suffix: str = "") -> dict[str, Any]:
    """One row in verl's schema. ``extra_info.index`` is to be set by the caller."""
    try:
        text = json.dumps(entry)
    except TypeError as error:
        raise ValueError(f"{level.task}: its entries cannot be stored as JSON ({error}).") from error
    row = {
        "data_source": PREFIX + level.task,
        "prompt": [{"role": "user", "content": entry["question"] + suffix}],
        "ability": reasoning_gym.factory.DATASETS[level.task][0].__module__.split(".")[1],
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "split": split,
            "index": -1,
            "task": level.task,
            "difficulty": level.difficulty,
            "parameters": json.dumps(dict(level.parameters), sort_keys=True),
            "entry": text,
        },
    }
    if compute_score(row["data_source"], entry["answer"], entry["answer"], row["extra_info"])["score"] != 1.0:
        raise ValueError(f"{level.task}: its verifier does not accept the reference answer {entry['answer']!r}.")
    return row


def extract_answer(solution: str, extract: str = "text") -> str:
    """The last ``<answer>`` tags; without them the whole text, or the last number (``extract="number"``).

    Raises:
        ValueError: ``extract`` is neither ``text`` nor ``number``.
    """
    if extract not in ("text", "number"):
        raise ValueError(f"extract: must be 'text' or 'number', got {extract!r}.")
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
    """verl's reward function: 1.0 for full marks by the task's real verifier, 0.0 for anything else.

    Verifiers that evaluate the answer as Python see only what is arithmetic or a list, and give 0.0 after 15 s.

    ``extract`` is for models that answer in sentences, see ``extract_answer``; set it with
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
    # Not ">=": partial marks that are summed in floating point can come out a little above 1.
    correct = float(_marks(task, extra_info.get("parameters", "{}"), answer, extra_info["entry"]) == 1.0)
    return {"score": correct, "acc": correct}


def _marks(task: str, parameters: str, answer: str, entry: str) -> float:
    """Some verifiers evaluate the answer: then only where it can do no harm, with limited time and memory."""
    if task not in EVALUATED_TASKS:
        return marks(task, parameters, answer, entry)
    if answer != json.loads(entry)["answer"] and not is_harmless(answer):
        return 0.0
    try:
        return call_limited(marks, task, parameters, answer, entry, timeout=TIMEOUT)
    except TooExpensive:
        return 0.0


def levels_of(frames: Sequence[pd.DataFrame]) -> list[Level]:
    """The levels that the data sets were made of, easiest first, each with weight 1."""
    found = {(info["task"], info["difficulty"], info["parameters"]) for frame in frames for info in frame["extra_info"]}
    return [Level(task, difficulty, json.loads(parameters)) for task, difficulty, parameters in sorted(found)]


def write(
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
    """Write reasoning-gym tasks as verl data sets that share no question."""
    try:
        levels = [parse_level(text, place) for place, text in enumerate(level, 1)] if level else QUICKSTART
        frames = splits(levels, {"train": train, "validation": validation}, seed, suffix)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    Console().print(write_splits(frames, out))


if __name__ == "__main__":
    typer.run(write)
