"""reasoning-gym tasks as verl data sets, judged by reasoning-gym's own verifiers.

``verl-ext data reasoning_gym --out DIR`` writes ``train.parquet`` and ``validation.parquet``. The reward is
``compute_score`` in this file: ``reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym`` and
``reward.custom_reward_function.name=compute_score``.
"""

from __future__ import annotations

import cmath
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import reasoning_gym
import sympy
import typer

from verl_ext import checks
from verl_ext.data.levels import WEIGHTS, Seed, Train, Validation, distinct, draw_splits, parse_weights, write_splits
from verl_ext.data.limited import judge, tagged_answer
from verl_ext.data.schema import make_row
from verl_ext.errors import option_errors
from verl_ext.files import check_folder

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "reasoning_gym/"
EXTRACT = ("text", "number")
NONSENSE = "no answer to any task"
COIN_TOLERANCE = Fraction(1, 10_000)  # the verifier's own

# reasoning-gym 0.1.25 passes the answers of these tasks to eval, or to sympy's parse_expr, which calls eval.
LIST_TASKS = frozenset("binary_matrix n_queens spiral_matrix string_insertion".split())
SYMPY_TASKS = frozenset(
    "countdown intermediate_integration polynomial_multiplication puzzle24 simple_integration".split()
)
EVALUATED_TASKS = LIST_TASKS | SYMPY_TASKS
NUMBER_TASKS = frozenset(("countdown", "puzzle24"))  # an expression of given numbers
FUNCTIONS = frozenset("sqrt exp log ln sin cos tan asin acos atan sinh cosh tanh Abs".split())
CALL = re.compile(r"((?<!\w)[^\W\d]\w*|[\])}'\"])\s*\(")
ARITHMETIC = re.compile(r"(?:[\d\s()+-]|\*(?!\*)|/(?!/))*")
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")  # in 3-4, the second is 4
GSM_NUMBER = re.compile(r"((?<![\w)])[-−])?\b\d+(?:\.\d+)?\b")  # the verifier's first number, and its minus
# A keyword may follow a number, as in 0for. Python reads some other characters as letters: ︳ as an underscore.
OTHER_CODE = re.compile(r"__|[^\x00-\x7f]|[\\#`{}@:=]|\.\s*[^\W\d]|(for|lambda|await|yield|import)\b")


@dataclass(frozen=True)
class Level:
    """One difficulty level of a task.

    Args:
        task: name of a reasoning-gym task, for instance ``spell_backward``.
        difficulty: rank of the level within its task; larger is harder.
        parameters: settings of the task's configuration, except ``seed`` and ``size``.
        weight: share of the rows from this level, relative to the other levels.
        validation_weight: the same for the validation split, if it differs; 0 leaves the level out.
    """

    task: str
    difficulty: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    validation_weight: float | None = None

    def __post_init__(self) -> None:
        if self.task not in reasoning_gym.factory.DATASETS:
            raise ValueError(f"task: reasoning-gym has no task named {self.task!r}.")
        checks.positive_number("weight", self.weight)
        if self.validation_weight is not None:
            checks.number("validation_weight", self.validation_weight, 0)
        known = [entry.name for entry in fields(reasoning_gym.factory.DATASETS[self.task][1])]
        for name in self.parameters:
            checks.choice(f"parameter of {self.task}", name, [each for each in known if each not in ("seed", "size")])

    def __str__(self) -> str:
        return ":".join(filter(None, (self.task, ",".join(f"{key}={value}" for key, value in self.parameters.items()))))


DEFAULT_LEVELS: tuple[Level, ...] = tuple(
    Level("spell_backward", letters, {"min_word_len": letters, "max_word_len": letters}, weight)
    for letters, weight in {3: 1.25, 4: 1.25, 5: 1.25, 6: 0.25, 7: 0.25, 8: 2.5, 9: 3.25, 10: 2.0}.items()
)
"""Words of 3 to 10 letters, to be spelled backward. The weights suit the model of examples/quickstart/warm_start.py: it
solves a third of the prompts, is uncertain about half, and has no chance at a sixth."""


def parse_level(text: str, difficulty: int) -> Level:
    """A level from ``TASK[:key=value,...][@weights]``, for instance ``chain_sum:min_terms=2,max_terms=2@0.5``.

    :func:`~verl_ext.data.levels.parse_weights` reads the weights. Values are read as JSON, and as plain text where they
    are not JSON.

    Raises:
        ValueError: the text has another form, or reasoning-gym has no such task, parameter or value.
    """
    body, _, weights = text.partition("@")
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
        level = Level(task, difficulty, parameters, *parse_weights(weights))
        next(_entries(level, seed=0))
    except ValueError as error:
        raise ValueError(f"level {text!r}: {error}") from error
    return level


def distinct_entries(level: Level, seed: int, exclude: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The level's entries in seeded order, each question once, without the questions in ``exclude``."""
    own_seed = Random(f"{seed}/{level.task}/{json.dumps(level.parameters, sort_keys=True)}").getrandbits(48)
    return distinct(_entries(level, own_seed), itemgetter("question"), exclude)


def _entries(level: Level, seed: int) -> Iterator[dict[str, Any]]:
    try:
        dataset = reasoning_gym.create_dataset(level.task, seed=seed, size=1_000_000, **level.parameters)
        for index in range(len(dataset)):
            yield dataset[index]
    except Exception as error:  # each task refuses values in its own way, most by an assertion
        raise ValueError(f"reasoning-gym cannot make entries of {level} ({error or type(error).__name__}).") from error


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
        ValueError: the entry cannot be stored as JSON, or the verifier rejects the entry's own answer or accepts any
            text.
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
    for answer, right in ((entry["answer"], True), (NONSENSE, False)):
        try:
            found = is_correct(level.task, row["extra_info"]["parameters"], answer, text)
        except Exception:  # some verifiers raise for some wrong answers
            found = False
        if found != right:
            raise ValueError(f"{level.task}: its verifier {'accepts' if found else 'does not accept'} {answer!r}.")
    return row


def extract_answer(solution: str, extract: str = "text") -> str:
    """The text in the last ``<answer>`` tags; without tags the whole text, or with "number" its last number."""
    tagged = tagged_answer(solution)
    if tagged is not None:
        return tagged
    if extract == "text":
        return solution.strip()
    numbers = NUMBER.findall(solution)
    return numbers[-1].replace(",", "") if numbers else ""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    extract: str = "text",
    **kwargs: Any,
) -> dict[str, float]:
    """verl's reward function: 1.0 for full marks by the task's own verifier, 0.0 for anything else.

    The verifier runs under :func:`~verl_ext.data.limited.judge`, which describes the result.

    ``extract`` is for models answering in sentences, see :func:`extract_answer`; set it with
    ``+reward.custom_reward_function.reward_kwargs.extract=number``. Other keywords are ignored.

    Raises:
        ValueError: the data source is not a reasoning-gym task, the row lacks its entry, or ``extract`` is neither
            ``text`` nor ``number``.
    """
    checks.choice("extract", extract, EXTRACT)
    prefix, _, task = str(data_source).rpartition("/")
    if prefix + "/" != PREFIX or task not in reasoning_gym.factory.DATASETS:
        raise ValueError(f"data_source: {data_source!r} is not '{PREFIX}<task>' with a task that reasoning-gym has.")
    if not isinstance((extra_info or {}).get("entry"), str):
        raise ValueError(f"extra_info: the row of {data_source!r} has no 'entry'; write it with verl_ext.data.")
    parameters = extra_info.get("parameters", "{}")
    return judge(is_correct, task, parameters, solution_str, extra_info["entry"], extract)


def is_correct(task: str, parameters: str, solution: str, entry: str, extract: str = "text") -> bool:
    """Whether the task's verifier gives full marks, and not only because it leaves something unchecked.

    ``parameters`` and ``entry`` are JSON, as in the rows of the data. Some verifiers evaluate the answer as Python.
    Such a verifier gets an answer only if the answer is harmless (:func:`is_harmless`) or the entry's own.

    Raises:
        Exception: some verifiers raise for some wrong answers.
    """
    reference, answer = json.loads(entry), extract_answer(solution, extract)
    if task in EVALUATED_TASKS and answer != reference["answer"] and not is_harmless(answer, task in LIST_TASKS):
        return False
    verifier = _verifier(task, parameters)
    # Not ">=": partial marks, summed in floating point, can come out a little above 1.
    if float(verifier.score_answer(answer, entry=reference)) != 1.0:
        return False
    if task == "complex_arithmetic":
        return not cmath.isnan(verifier.parse_string_to_complex(answer))  # the verifier computes min(1, nan): 1
    if task == "coin_flip":  # the verifier accepts the first digits alone: 0 for 0.25
        return abs(_fraction(answer) - _fraction(reference["answer"])) <= COIN_TOLERANCE
    if task == "number_sorting":  # the verifier takes each number for all up to 1 away, and NaN for any
        return _floats(answer) == _floats(reference["answer"])
    if task == "gsm_symbolic":  # the verifier overlooks a minus
        return not GSM_NUMBER.search(answer)[1]
    # The verifiers of these tasks overlook numbers with a letter, and puzzle24's is not told the given numbers. They
    # round: puzzle24's takes 24.9 for 24, and countdown's lets a number vanish in 0.00001.
    metadata = reference["metadata"]
    return task not in NUMBER_TASKS or _makes(metadata.get("target", 24), answer, metadata["numbers"])


def is_harmless(answer: str, with_texts: bool = False) -> bool:
    """Whether evaluating the answer as Python can do nothing but take time and memory.

    Allowed are arithmetic, lists and calls of mathematical functions, in ASCII; no attributes and no other code. Text
    in quotes is for verifiers that do not use sympy, whose functions evaluate a text.
    """
    calls = all(match.group(1) in FUNCTIONS for match in CALL.finditer(answer))
    texts = with_texts or not ("'" in answer or '"' in answer)
    return calls and texts and not OTHER_CODE.search(answer)


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))


def _floats(numbers: str) -> list[float]:
    return [float(number) for number in json.loads(numbers.replace("'", '"'))]


def _makes(target: int, answer: str, numbers: Sequence[int]) -> bool:
    """Whether sums, products and quotients of exactly these numbers make exactly the target."""
    used = sorted(map(int, re.findall(r"\d+", answer)))
    return bool(ARITHMETIC.fullmatch(answer)) and used == sorted(numbers) and sympy.parse_expr(answer) == target


@lru_cache(maxsize=256)
def _verifier(task: str, parameters: str) -> reasoning_gym.dataset.ProceduralDataset:
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
        typer.Option(
            help="TASK[:key=value,...][@weights], once per level, easiest first. "
            + WEIGHTS
            + " Default: spell_backward."
        ),
    ] = None,
    train: Train = 2048,
    validation: Validation = 256,
    seed: Seed = 0,
    suffix: Annotated[str, typer.Option(help="Text added to every question.")] = "",
) -> None:
    """Write reasoning-gym tasks as training and validation data in verl's schema; no question occurs in both."""
    with option_errors():
        check_folder(out)
        levels = [parse_level(text, place) for place, text in enumerate(level, 1)] if level else DEFAULT_LEVELS
        write_splits(splits(levels, {"train": train, "validation": validation}, seed, suffix), out)
