"""A task with state for verl's ``tool_agent`` loop: operations on a number in a database.

``verl-ext data sql_tasks --out DIR`` writes ``train.parquet``, ``validation.parquet`` and ``tools.yaml``. The
prompt ``+40 *2 -3`` asks for one call of the tool ``sql`` per operation, first ``UPDATE r SET a=a+40 RETURNING a``,
and then for the value returned by the last call. The database holds the first value; the prompt does not.

The reward is ``compute_score`` in this file: ``reward.custom_reward_function.path=pkg://verl_ext.data.sql_tasks`` and
``reward.custom_reward_function.name=compute_score``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_ext import checks
from verl_ext.data.levels import WEIGHTS, Seed, Train, Validation, distinct, draw_splits, parse_weights, write_splits
from verl_ext.data.schema import make_row
from verl_ext.errors import option_errors
from verl_ext.files import check_folder

if TYPE_CHECKING:
    import pandas as pd

DATA_SOURCE = "sql/chain"
OBSERVED = "?"  # ground truth of a row where SQLite draws a number: the tool's answer to the last operation is right
RANDOM_OPERATION, RANDOM_OPERAND = "+?", "abs(random()%100)"
OBSERVATION, END_OF_OBSERVATION = "<tool_response>", "</tool_response>"
TOOLS = """\
tools:
  - class_name: verl_ext.driver.tools.sqlite.SqliteTool
    config:
      type: native
      max_characters: 24  # an error message must not use up the response
"""


@dataclass(frozen=True)
class Level:
    """One difficulty level.

    Args:
        length: number of operations, one call each; at most 16, which keeps values within SQLite's integers.
        largest: largest number to add or subtract, at most 99; factors are 2 to 9.
        weight: share of the rows from this level, relative to the other levels.
        validation_weight: the same for the validation split, if it differs; 0 leaves the level out.
    """

    length: int
    largest: int = 9
    weight: float = 1.0
    validation_weight: float | None = None

    def __post_init__(self) -> None:
        checks.number("length", self.length, 1, 16)
        checks.number("largest", self.largest, 1, 99)
        checks.positive_number("weight", self.weight)
        if self.validation_weight is not None:
            checks.number("validation_weight", self.validation_weight, 0)

    def __str__(self) -> str:
        return f"{self.length}:{self.largest}"


DEFAULT_LEVELS: tuple[Level, ...] = tuple(
    Level(length, weight=weight) for length, weight in {2: 0.75, 3: 1.25, 4: 1.25, 5: 1.0, 6: 0.75}.items()
)


@dataclass(frozen=True)
class Task:
    """A number to start from, and operations as the prompt writes them."""

    start: int
    operations: tuple[str, ...]

    @property
    def question(self) -> str:
        """Content of the prompt."""
        return " ".join(self.operations)

    @property
    def script(self) -> str:
        """SQL that makes the database with the first value."""
        return f"CREATE TABLE r(a INTEGER); INSERT INTO r VALUES({self.start});"

    @property
    def statements(self) -> list[str]:
        """One SQL statement for each operation; the agent runs each with a call of its own."""
        operations = [operation.replace(OBSERVED, RANDOM_OPERAND) for operation in self.operations]
        return [f"UPDATE r SET a=a{operation} RETURNING a" for operation in operations]

    @property
    def random(self) -> bool:
        """Whether SQLite draws one of the numbers."""
        return RANDOM_OPERATION in self.operations

    def execute(self) -> list[int]:
        """The value after each operation, computed by a new database."""
        database = sqlite3.connect(":memory:")
        database.executescript(self.script)
        return [database.execute(statement).fetchall()[0][0] for statement in self.statements]


def parse_level(text: str) -> Level:
    """A level from ``LENGTH[:LARGEST][@weights]``, for instance ``3:9@0.5``.

    Raises:
        ValueError: the text has another form, or a number is out of range.
    """
    body, _, weights = text.partition("@")
    length, _, largest = body.partition(":")
    try:
        return Level(int(length), int(largest or 9), *parse_weights(weights))
    except ValueError as error:
        raise ValueError(f"level={text!r} must be of the form LENGTH[:LARGEST][@weights] ({error}).") from error


def distinct_tasks(level: Level, seed: int, random_share: float = 0.0, exclude: Collection[str] = ()) -> Iterator[Task]:
    """The level's tasks in seeded order, each question once, without the questions in ``exclude``."""
    return distinct(_tasks(level, seed, random_share), attrgetter("question"), exclude)


def _tasks(level: Level, seed: int, random_share: float) -> Iterator[Task]:
    draw = Random(f"{seed}/{level.length}/{level.largest}")
    while True:
        operations = [
            sign + str(draw.randint(2, 9) if sign == "*" else draw.randint(1, level.largest))
            for sign in draw.choices("+-*", k=level.length)
        ]
        if draw.random() < random_share:
            operations[draw.randrange(level.length)] = RANDOM_OPERATION
        yield Task(draw.randint(10, 99), tuple(operations))


def splits(
    levels: Sequence[Level], sizes: Mapping[str, int], seed: int, random_share: float = 0.0
) -> dict[str, list[dict[str, Any]]]:
    """Rows by split, see :func:`~verl_ext.data.levels.draw_splits`.

    Args:
        random_share: probability that SQLite draws the number of one of a row's operations, anew in every execution.

    Raises:
        ValueError: also if ``random_share`` is not in [0, 1].
    """
    checks.number("random_share", random_share, 0, 1)

    def draw(level: Level, exclude: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for task in distinct_tasks(level, seed, random_share, exclude):
            yield task.question, to_row(task, level)

    return draw_splits(levels, sizes, seed, draw)


def to_row(task: Task, level: Level) -> dict[str, Any]:
    """One row in verl's schema, for the ``tool_agent`` loop."""
    return make_row(
        DATA_SOURCE,
        task.question,
        OBSERVED if task.random else str(task.execute()[-1]),
        ability="tools",
        tools={"sql": {"script": task.script}},
        length=level.length,
        largest=level.largest,
        start=task.start,
        operations=task.question,
    )


def to_task(row: Mapping[str, Any]) -> Task:
    """The task in a row made by :func:`to_row`."""
    return Task(row["extra_info"]["start"], tuple(row["prompt"][0]["content"].split(" ")))


def final_answer(solution: str) -> str | None:
    """The text after the last answer of a tool; None if no tool has answered.

    verl decodes all turns into one text, without special tokens. Of Qwen's ``<|im_start|>assistant`` only the role
    remains, which is removed here. If a response ends with an unanswered call, the text is the call.
    """
    _, answered, rest = solution.rpartition(END_OF_OBSERVATION)
    return rest.strip().removeprefix("assistant").strip() if answered else None


def observed_values(solution: str, task: Task, num_turns: int | None = None) -> set[str]:
    """The tool's answers to the last operation; empty if an operation has no answer, or if the model forged one.

    The answer to an operation is a value that can follow from an answer to the operation before. Other answers, such as
    error messages, are skipped. An answer may be of several operations: SELECT after ``-6`` looks like ``+?`` with 0.

    In the text, an answer forged by the model looks like an answer of the tool. But verl counts turns: the prompt, then
    the turns of the model and of the tool. With one call per turn, the tool answered (num_turns - 2) // 2 times. If the
    text holds another number of answers, the model forged an answer.
    """
    answers = solution.split(END_OF_OBSERVATION)[:-1]
    if num_turns is not None and len(answers) != (num_turns - 2) // 2:
        return set()
    first, *later = task.operations
    possible = [_results(task.start, first), *(set() for _ in later)]  # the answers that each operation can have
    of_the_last = set()
    for answer in answers:
        observed = answer.rpartition(OBSERVATION)[2].strip()
        if observed in possible[-1]:
            of_the_last.add(observed)
        for place in reversed(range(len(later))):  # the last first: one answer is not of two operations in a row
            if observed in possible[place]:
                possible[place + 1] |= _results(int(observed), later[place])
    return of_the_last


def _results(value: int, operation: str) -> set[str]:
    low, high = (Task(value, (operation.replace(OBSERVED, number),)).execute()[0] for number in ("0", "99"))
    return {str(result) for result in range(low, high + 1)}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """verl's reward function: 1.0 if the final answer is the right value, 0.0 for anything else.

    An answer without any call is a guess and scores 0.0. Text that imitates the answer of a tool is no call: verl
    counts 2 turns of a response without a call, and at least 4 of an answer after a call. Where SQLite draws a number,
    a right value is one of :func:`observed_values`. Other keywords are ignored.

    Raises:
        ValueError: the data source is not ``sql/chain``, the ground truth is no text, or a row with a random value
            lacks its operations.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(f"data_source={data_source!r} must be {DATA_SOURCE!r}.")
    checks.TEXT.check("ground_truth", ground_truth)
    num_turns = (extra_info or {}).get("num_turns")
    called = num_turns is None or num_turns >= 4
    answer, right = final_answer(solution_str) if called else None, {ground_truth}
    if ground_truth == OBSERVED:
        if not extra_info or "operations" not in extra_info:
            raise ValueError("extra_info: the row has no 'operations'; write it with verl-ext data sql_tasks.")
        task = Task(extra_info["start"], tuple(extra_info["operations"].split(" ")))
        right = observed_values(solution_str, task, num_turns)
    is_number = answer is not None and answer.removeprefix("-").isdecimal()  # an error message is no number
    correct = float(is_number and answer in right)
    return {"score": correct, "acc": correct}


def levels_of(frames: Sequence[pd.DataFrame]) -> list[Level]:
    """The levels in data sets, shortest first, each with weight 1."""
    found = {(info["length"], info["largest"]) for frame in frames for info in frame["extra_info"]}
    return [Level(length, largest) for length, largest in sorted(found)]


def main(
    out: Annotated[Path, typer.Option(help="Folder for train.parquet, validation.parquet and tools.yaml.")],
    level: Annotated[
        list[str] | None,
        typer.Option(help=f"LENGTH[:LARGEST][@weights], once per level. {WEIGHTS} Default: the quickstart's."),
    ] = None,
    train: Train = 2048,
    validation: Validation = 256,
    seed: Seed = 0,
    random_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of rows with a number drawn by SQLite.")
    ] = 0.0,
) -> None:
    """Write chains of SQL operations as training and validation data in verl's schema; no question occurs in both."""
    with option_errors():
        check_folder(out)
        levels = [parse_level(text) for text in level] if level else DEFAULT_LEVELS
        write_splits(splits(levels, {"train": train, "validation": validation}, seed, random_share), out)
    (out / "tools.yaml").write_text(TOOLS)
