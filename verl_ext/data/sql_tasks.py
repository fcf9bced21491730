"""A stateful task for verl's ``tool_agent`` loop: operations on a number that only a database knows.

``python -m verl_ext.data.sql_tasks --out DIR`` writes ``train.parquet``, ``validation.parquet`` and ``tools.yaml``. The
prompt ``+40 *2 -3`` asks for one call of the tool ``sql`` per operation, ``UPDATE r SET a=a+40 RETURNING a`` the first,
and for the value that the last one returns. The value to start from is in the database and not in the prompt.

The reward is ``compute_score`` in this file: ``reward.custom_reward_function.path=pkg://verl_ext.data.sql_tasks`` and
``reward.custom_reward_function.name=compute_score``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from verl_ext.allocation.heuristics import proportional
from verl_ext.data.splits import write_splits

DATA_SOURCE = "sql/chain"
OBSERVED = "?"  # ground truth of a row whose value SQLite draws: what the database said last
RANDOM_OPERATION, RANDOM_OPERAND = "+?", "abs(random()%100)"
OBSERVATION, END_OF_OBSERVATION = "<tool_response>", "</tool_response>"
TOOLS = """\
tools:
  - class_name: verl_ext.driver.tools.sqlite.SqliteTool
    config:
      type: native
      max_characters: 24  # so that an error message does not use up the response
"""


@dataclass(frozen=True)
class Level:
    """One difficulty level.

    Args:
        length: how many operations, each of them one call; at most 16, or values would leave SQLite's integers.
        largest: the largest number that is added or subtracted, at most 99; factors are 2 to 9.
        weight: share of the rows that come from this level, relative to the other levels.
    """

    length: int
    largest: int = 9
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value, most in (("length", self.length, 16), ("largest", self.largest, 99)):
            if not 1 <= value <= most:
                raise ValueError(f"{name}={value} must be between 1 and {most}.")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight={self.weight} must be positive and finite, for length {self.length}.")


QUICKSTART: tuple[Level, ...] = tuple(
    Level(length, weight=weight) for length, weight in {2: 0.75, 3: 1.25, 4: 1.25, 5: 1.0, 6: 0.75}.items()
)


@dataclass(frozen=True)
class Task:
    """A number to start from, and operations as the prompt writes them."""

    start: int
    operations: tuple[str, ...]

    @property
    def question(self) -> str:
        """What the prompt says."""
        return " ".join(self.operations)

    @property
    def script(self) -> str:
        """SQL that makes the database to start from."""
        return f"CREATE TABLE r(a INTEGER); INSERT INTO r VALUES({self.start});"

    @property
    def statements(self) -> list[str]:
        """One per operation: what is to be executed, one call each."""
        operations = [operation.replace(OBSERVED, RANDOM_OPERAND) for operation in self.operations]
        return [f"UPDATE r SET a=a{operation} RETURNING a" for operation in operations]

    @property
    def random(self) -> bool:
        """Whether SQLite draws a part of the value."""
        return RANDOM_OPERATION in self.operations

    def execute(self) -> list[int]:
        """What each statement returns, from a database made for the purpose."""
        database = sqlite3.connect(":memory:")
        database.executescript(self.script)
        return [database.execute(statement).fetchall()[0][0] for statement in self.statements]


def parse_level(text: str) -> Level:
    """A level from ``LENGTH[:LARGEST][@weight]``, for instance ``3:9@0.5``.

    Raises:
        ValueError: it is not of that form, or a number is out of range.
    """
    body, _, weight = text.partition("@")
    length, _, largest = body.partition(":")
    try:
        return Level(int(length), int(largest or 9), float(weight or 1.0))
    except ValueError as error:
        raise ValueError(f"level={text!r} must be of the form LENGTH[:LARGEST][@weight] ({error}).") from error


def distinct_tasks(level: Level, seed: int, random_share: float = 0.0, exclude: Collection[str] = ()) -> Iterator[Task]:
    """The level's tasks in seeded order, each question once, none that is in ``exclude``.

    Ends when 20 000 draws in a row brought no new question: then the level has (almost) no other.
    """
    draw = Random(f"{seed}/{level.length}/{level.largest}")
    seen, fruitless = set(exclude), 0
    while fruitless <= 20_000:
        operations = [
            sign + str(draw.randint(2, 9) if sign == "*" else draw.randint(1, level.largest))
            for sign in draw.choices("+-*", k=level.length)
        ]
        if draw.random() < random_share:
            operations[draw.randrange(level.length)] = RANDOM_OPERATION
        task = Task(draw.randint(10, 99), tuple(operations))
        fruitless += 1
        if task.question not in seen:
            seen.add(task.question)
            fruitless = 0
            yield task


def splits(
    levels: Sequence[Level], sizes: Mapping[str, int], seed: int, random_share: float = 0.0
) -> dict[str, pd.DataFrame]:
    """Data sets in verl's schema that share no question.

    Args:
        levels: what to draw from.
        sizes: name of each split and how many rows it gets.
        seed: the same seed and arguments give the same rows. The global random state is neither read nor changed.
        random_share: probability that a row has one operation whose number SQLite draws, anew in every execution.

    Raises:
        ValueError: no levels, a share that is none, or a level with too few distinct questions.
    """
    if not levels:
        raise ValueError("levels: at least one is needed.")
    if not 0 <= random_share <= 1:
        raise ValueError(f"random_share={random_share} must be in [0, 1].")
    weights = [level.weight for level in levels]
    counts = {split: proportional(weights, size, lower=0, upper=size) for split, size in sizes.items()}
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in sizes}
    questions: set[str] = set()
    for place, level in enumerate(levels):
        tasks = distinct_tasks(level, seed, random_share, questions)
        for split in sizes:
            for _ in range(counts[split][place]):
                task = next(tasks, None)
                if task is None:
                    needed = sum(counts[name][place] for name in sizes)
                    raise ValueError(
                        f"level={level.length}:{level.largest} has fewer than {needed} distinct questions; "
                        "ask for fewer rows or a wider level."
                    )
                questions.add(task.question)
                rows[split].append(to_row(task, level, split))
    for split, members in rows.items():
        Random(f"{seed}/{split}").shuffle(members)
        for index, row in enumerate(members):
            row["extra_info"]["index"] = index
    return {split: pd.DataFrame(members) for split, members in rows.items()}


def to_row(task: Task, level: Level, split: str) -> dict[str, Any]:
    """One row in verl's schema, with what ``tool_agent`` needs. ``extra_info.index`` is to be set by the caller."""
    return {
        "data_source": DATA_SOURCE,
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": task.question}],
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": OBSERVED if task.random else str(task.execute()[-1])},
        "extra_info": {
            "split": split,
            "index": -1,
            "length": level.length,
            "largest": level.largest,
            "start": task.start,
            "need_tools_kwargs": True,
            "tools_kwargs": {"sql": {"create_kwargs": {"script": task.script}}},
        },
    }


def to_task(row: Mapping[str, Any]) -> Task:
    """The task that the row was made of."""
    return Task(row["extra_info"]["start"], tuple(row["prompt"][0]["content"].split(" ")))


def final_answer(solution: str) -> str | None:
    """What a response says after the last answer of a tool; None: no tool has answered.

    verl decodes all turns into one text, without special tokens: of Qwen's ``<|im_start|>assistant`` only the role is
    left, which is no part of the answer. A response that ends with an unanswered call has that call here, no number.
    """
    _, answered, rest = solution.rpartition(END_OF_OBSERVATION)
    return rest.strip().removeprefix("assistant").strip() if answered else None


def last_observation(solution: str, operations: int, num_turns: int | None = None) -> str | None:
    """What the tool answered last; None: less often than there are operations, or the model answered in its place.

    A tool's answer and the same text by the model look alike. But verl counts turns (the prompt, then the model's and
    the tool's), and with one call per turn each answer in the text needs one: a forged one is one too many.
    """
    answers = solution.count(END_OF_OBSERVATION)
    if answers < operations or (num_turns is not None and answers != (num_turns - 2) // 2):
        return None
    return solution.rpartition(END_OF_OBSERVATION)[0].rpartition(OBSERVATION)[2].strip()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """verl's reward function: 1.0 if the final answer is the right value, 0.0 for anything else.

    An answer without any call is a guess and gets 0.0. Where SQLite draws the value, the right one is what the tool
    answered last, provided that it answered at least as often as there are operations. Other keywords are ignored.

    Raises:
        ValueError: the data source is another one, or a row with a random value lacks its length.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(f"data_source={data_source!r} must be {DATA_SOURCE!r}.")
    answer, right = final_answer(solution_str), ground_truth
    if ground_truth == OBSERVED:
        if not extra_info or "length" not in extra_info:
            raise ValueError("extra_info: the row has no 'length'; write it with python -m verl_ext.data.sql_tasks.")
        right = last_observation(solution_str, extra_info["length"], extra_info.get("num_turns"))
    is_number = answer is not None and answer.removeprefix("-").isdecimal()  # an error message is not
    correct = float(is_number and answer == right)
    return {"score": correct, "acc": correct}


def levels_of(frames: Sequence[pd.DataFrame]) -> list[Level]:
    """The levels that the data sets were made of, shortest first, each with weight 1."""
    found = {(info["length"], info["largest"]) for frame in frames for info in frame["extra_info"]}
    return [Level(length, largest) for length, largest in sorted(found)]


def write(
    out: Annotated[Path, typer.Option(help="Folder for train.parquet, validation.parquet and tools.yaml.")],
    level: Annotated[
        list[str] | None, typer.Option(help="LENGTH[:LARGEST][@weight], once per level. Default: the quickstart's.")
    ] = None,
    train: Annotated[int, typer.Option(min=1, help="Training prompts.")] = 2048,
    validation: Annotated[int, typer.Option(min=1, help="Validation prompts.")] = 256,
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 0,
    random_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of rows with a number that SQLite draws.")
    ] = 0.0,
) -> None:
    """Write chains of SQL operations as verl data sets that share no question."""
    try:
        levels = [parse_level(text) for text in level] if level else QUICKSTART
        frames = splits(levels, {"train": train, "validation": validation}, seed, random_share)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    Console().print(write_splits(frames, out))
    (out / "tools.yaml").write_text(TOOLS)


if __name__ == "__main__":
    typer.run(write)
