"""Samples of problems, read from verl's JSON lines under ``trainer.validation_data_dir``.

A line holds ``input`` (the prompt as text), ``output``, ``gts`` (the ground truth), ``score``, ``step``, ``uid``, the
values returned by the reward function, such as ``acc`` and ``pred``, and from our driver ``prompt_id`` and
``data_source``. Lines of another origin need the first four; without ``step`` they are of step 0, whatever
the name of their file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from verl_ext import checks
from verl_ext.data.limited import tagged_answer
from verl_ext.data.math_reward import marked_answer
from verl_ext.data.schema import row_id
from verl_ext.data.sources import rows
from verl_ext.files import write_text
from verl_ext.lab.waste.reader import find_files
from verl_ext.prompts import RowKey

ANSWERS = ("marked", "text")
KEYS = ("input", "output", "gts", "score")
TYPES = {"input": str, "output": str, "step": int, "uid": str, "prompt_id": str, "data_source": str}
COLUMNS = ("data_source", "prompt", "reward_model")
ROWS = "rows.json"  # in a folder of ``verl-ext evaluate run``: [id, data source, number of rows] of each problem
UNNAMED = "all problems"
"""The data source of lines without the key ``data_source``."""


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        accuracy: ``acc`` of the reward function, else its score, as in verl's validation.
        answer: its answer, for maj@k; None: no answer.
    """

    accuracy: float
    answer: str | None


OF_A_RUN = re.compile(r"\d{6}_(\d+)")  # name of a file of `verl-ext evaluate run`, with the samples of each problem
NO_ANSWER = ("", "[INVALID]")  # ``pred`` of an output without an answer; the second is verl's, for math_dapo

FAILED = Sample(0.0, None)
"""A rollout without a response. It counts as not correct, as in verl's validation."""


@dataclass
class Problem:
    """A prompt with its ground truth. Equal rows of the data are one problem.

    Attributes:
        id: ``Prompt.id``; without our driver, the text of the prompt and the ground truth.
        data_source: column of verl's schema.
        samples: of all its rows, in the order of the files.
        paths: the arguments of :func:`read` that hold a sample of the problem.
    """

    id: str
    data_source: str
    samples: list[Sample] = field(default_factory=list)
    paths: set[Path] = field(default_factory=set)

    @property
    def failed(self) -> int:
        """Number of ``FAILED`` samples."""
        return sum(sample is FAILED for sample in self.samples)


Rollouts: TypeAlias = dict[tuple, tuple[tuple[str, str], Sample]]
"""By file, row and session: id and data source of the problem, and the sample."""


def read(paths: Sequence[Path], step: int | None = None, answers: str = "marked") -> tuple[int, list[Problem]]:
    """The problems of one training step, in the order of their first lines.

    Of verl's files ``<step>.jsonl``, only those of this step are read.

    verl writes no line for a failed rollout. If a file holds a session of some row (``uid``) but not of another row,
    the other row gets a ``FAILED`` sample. A file of ``verl-ext evaluate run`` says in its name how often each row of
    the data was sampled, so a row without a line in the file gets this number of ``FAILED`` samples.

    Args:
        paths: files, or folders of ``*.jsonl``.
        step: training step after which the policy was sampled; None: the last step, the same for all paths.
        answers: how to find the answer in an output, see :func:`answer_of`.

    Returns:
        The step, and its problems.

    Raises:
        ValueError: a file or folder is missing, a line that is read is not a sample, no line has this step, or
            without ``step`` the paths end at different steps.
    """
    checks.choice("answers", answers, ANSWERS)
    find_files(paths)  # refuses a file in two of the paths
    named: dict[Path, int | None] = {}
    steps: dict[int, Rollouts] = {}
    argument_of: dict[Path, Path] = {}
    ends: dict[Path, int] = {}  # the last step of each path
    for path in paths:
        of_path: dict[int, Rollouts] = {}
        for file in find_files([path]):
            argument_of[file] = path
            named[file] = number = _named_step(file)
            if number is None:
                _add(file, answers, of_path)
            else:
                of_path.setdefault(number, {})
        ends[path] = max(of_path)
        for number, rollouts in of_path.items():
            steps.setdefault(number, {}).update(rollouts)
    last, first = max(ends, key=ends.__getitem__), min(ends, key=ends.__getitem__)
    if step is None and ends[first] < ends[last]:
        raise ValueError(
            f"the paths end at different steps ({last}: {ends[last]}, {first}: {ends[first]}); give --step, or score "
            "them one by one."
        )
    chosen = ends[last] if step is None else step
    found = sorted(steps)
    checks.require(chosen in found, "step", step, f"there are samples of step {', '.join(map(str, found))}")
    for file, number in named.items():
        if number == chosen:
            _add(file, answers, only := {chosen: steps[chosen]})
            for other in set(only) - {chosen}:
                raise ValueError(f"{file} is named after step {chosen}, but has samples of step {other}; rename it.")
    return chosen, _grouped(steps[chosen], argument_of)


def _named_step(file: Path) -> int | None:
    """The step of a file ``<step>.jsonl`` of verl; None for a file whose name or first line says otherwise.

    verl writes the file in a thread, so a killed run can leave it empty or cut off: no reason to refuse other steps.
    """
    if not file.stem.isdecimal():
        return None
    with open(file, encoding="utf-8", errors="replace") as stream:
        first = next((text for text in stream if text.strip()), "")
    try:
        line = json.loads(first)
    except (ValueError, RecursionError):
        return int(file.stem)
    return int(file.stem) if isinstance(line, dict) and line.get("step") == int(file.stem) else None


def _add(file: Path, answers: str, steps: dict[int, Rollouts]) -> None:
    """Add the rollouts of a file to those of their steps."""
    problems: dict[tuple[str, str], tuple[str, str]] = {}  # equal ones share memory
    for number, line in enumerate(_lines(file)):
        row, session, _ = RowKey.parse(line.get("uid", ""))
        row, session = (None, number) if session < 0 else (row, session)
        rollouts = steps.setdefault(line.get("step", 0), {})
        # A rollout of an agent has a line for each output: the first holds the prompt, the last the answer.
        problem, _ = rollouts.get((file, row, session), (_problem(line), None))
        problem = problems.setdefault(problem, problem)
        rollouts[file, row, session] = problem, _sample(line, answers)


def without_samples(problems: Sequence[Problem]) -> str | None:
    """A note on the problems whose samples have all failed, and on a reason; None if there are none."""
    if not (lost := sum(problem.failed == len(problem.samples) for problem in problems)):
        return None
    return (
        f"{lost} of {len(problems)} problems have no sample at all: every rollout failed, or verl left the row out "
        "(data.filter_overlong_prompts drops long prompts). They count as not correct."
    )


def _grouped(rollouts: Rollouts, argument_of: Mapping[Path, Path]) -> list[Problem]:
    problems: dict[tuple[str, str], Problem] = {}
    key_of: dict[tuple, tuple[str, str]] = {}  # of a row in a file
    files: dict[Path, dict[Any, dict[int, Sample]]] = {}  # by row and session
    for (file, row, session), (key, sample) in rollouts.items():
        problems.setdefault(key, Problem(*key)).paths.add(argument_of[file])
        if row is None:  # a line without a uid
            problems[key].samples.append(sample)
            continue
        key_of.setdefault((file, row), key)
        files.setdefault(file, {}).setdefault(row, {})[session] = sample
    copies = {file: Counter(key_of[file, row] for row in of_row) for file, of_row in files.items()}
    most: dict[Path, Counter[tuple[str, str]]] = {}  # by folder, rows of each problem: as noted, or in its fullest file
    for file, counts in copies.items():
        most[file.parent] = most.get(file.parent, noted_rows(file.parent)) | counts
    for file, of_row in files.items():
        run = OF_A_RUN.fullmatch(file.stem)
        sessions = {session for found in of_row.values() for session in found}
        if run:
            sessions.update(range(int(run[1])))
            for key, rows_lost in (most[file.parent] - copies[file]).items():
                problems.setdefault(key, Problem(*key)).samples += [FAILED] * rows_lost * len(sessions)
        for row, found in of_row.items():
            problems[key_of[file, row]].samples += [found.get(session, FAILED) for session in sorted(sessions)]
    return list(problems.values())


def note_rows(folder: Path, rows: Mapping[tuple[str, str], int]) -> None:
    """Note how many rows of each problem (id, data source) the data has, before the folder's samples are made."""
    write_text(folder / ROWS, json.dumps([[*problem, count] for problem, count in rows.items()]) + "\n")


def noted_rows(folder: Path) -> Counter[tuple[str, str]]:
    """Rows of each problem (id, data source), as :func:`note_rows` has noted them; empty without a note."""
    path = folder / ROWS
    noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return Counter({(identity, source): count for identity, source, count in noted})


def row_problems(path: Path) -> list[tuple[str, str]]:
    """``Prompt.id`` and data source of each row of a file, usually a parquet file.

    Raises:
        ValueError: the file has no rows in verl's schema; names the missing column, or the first bad row.
    """
    found = []
    for place, row in enumerate(rows(path, COLUMNS)):
        try:
            found.append((row_id(row), str(row["data_source"])))
        except ValueError as error:
            raise ValueError(f"data={path}, row {place}: {error}.") from error
    checks.require(bool(found), "data", str(path), "it holds no row; at least one problem is needed")
    return found


def count_rows(paths: Sequence[Path]) -> Counter[tuple[str, str]]:
    """Rows of each problem (id, data source) in files; raises ValueError as :func:`row_problems`."""
    return Counter(problem for path in paths for problem in row_problems(path))


def check_problems(file: Path, rows: Container[tuple[str, str]]) -> None:
    """Refuse samples of a problem (id, data source) that no row of the data is.

    ``Prompt.id`` is a hash of the messages. A run has other messages than the data's file if verl puts images into
    them, or if a data set of ``data.custom_cls`` changes them. Each row would then get failed samples instead.

    Raises:
        InvalidValue: the file holds such a sample.
    """
    valid = (
        "no row of the data has it; where images or data.custom_cls change prompts, score the samples of a "
        "validation (trainer.validation_data_dir) with verl-ext evaluate score"
    )
    for line in _lines(file):
        problem = _problem(line)
        checks.require(problem in rows, "prompt_id", problem[0], valid)


def answer_of(output: str, answers: str = "marked") -> str | None:
    """The vote of an output in maj@k; None: no vote.

    ``marked``: the content of the last ``<answer>`` tags, else of the last boxes, else the last line ``Answer: ...``;
    ``text``: the whole output.
    """
    if answers == "text":
        return output.strip() or None
    tagged = tagged_answer(output)
    return (marked_answer(output) if tagged is None else tagged) or None


def _problem(line: Mapping[str, Any]) -> tuple[str, str]:
    """Id and data source."""
    content = json.dumps([line["input"], line["gts"]], sort_keys=True)
    return line.get("prompt_id", content), line.get("data_source", UNNAMED)


def _sample(line: Mapping[str, Any], answers: str) -> Sample:
    accuracy = line["score"] if line.get("acc") is None else line["acc"]
    predicted = line.get("pred")
    answer = answer_of(line["output"], answers) if predicted is None else str(predicted).strip()
    answer = None if answer in NO_ANSWER else answer
    return _shared_sample(float(accuracy), answer)


_shared_sample = lru_cache(maxsize=4096)(Sample)  # most samples of a problem are equal


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, each checked."""
    empty = True
    with open(file, encoding="utf-8", errors="replace") as stream:
        for number, text in enumerate(stream, 1):
            if not text.strip():
                continue
            empty = False
            try:
                yield _checked(text)
            except ValueError as error:
                raise ValueError(f"{file}, line {number} is not a sample: {error}.") from error
    if empty:
        raise ValueError(f"{file} holds no samples.")


def _checked(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(line, dict) or not all(key in line for key in KEYS):
        raise ValueError(f"it must have the keys {', '.join(KEYS)}")
    for key, kind in TYPES.items():
        if key in line and not isinstance(line[key], kind):
            raise ValueError(f"{key}={_short(line[key])} must be of type {kind.__name__}")
    for key in ("score", "acc"):
        value = line.get(key)
        unknown = key == "acc" and value is None
        if not unknown and not (isinstance(value, int | float) and abs(value) <= sys.float_info.max):
            raise ValueError(f"{key}={_short(value)} must be a finite number")
    return line


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
