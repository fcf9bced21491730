"""Runs, read from verl's loggers: ``file`` (a JSON object ``{"step", "data"}`` per line) and ``tensorboard``."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.lab.plot import Series
from verl_ext.lab.report.events import PATTERN, event_files, read_events

SEED = re.compile(r"(?P<method>.+?)(_|[_-]seed_?|[_-]s)(?P<seed>\d+)", re.IGNORECASE)
SEED_FOLDER = re.compile(r"seed_?\d+", re.IGNORECASE)
RESTART = re.compile(r"(?P<run>.+)-restart-\d+")  # name of the file of a run's restart, without .jsonl
OF_TRAINING = ("timing_s/step", "rollouts/sampled")  # verl's metric and this project's, in the record of a trained step


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: unique among the compared runs.
        records: metrics of each logged step, finite numbers only; steps increase, and there is at least one.
        skipped_lines: number of lines in another format, such as the unfinished last line of a killed run.
        skipped_values: number of values not finite.
        unread_bytes: bytes of event files from the first damaged or unfinished record on.
        empty_parts: names of files and folders of the run without a step, such as of a start that died before its
            first step.
        replaced_records: number of records dropped because a later record has the same step or an earlier one.
    """

    name: str
    records: Mapping[int, dict[str, float]]
    skipped_lines: int = 0
    skipped_values: int = 0
    unread_bytes: int = 0
    empty_parts: tuple[str, ...] = ()
    replaced_records: int = 0

    @property
    def steps(self) -> tuple[int, ...]:
        """The logged steps."""
        return tuple(self.records)

    def metrics(self) -> set[str]:
        """Names of all metrics of any step."""
        return {name for record in self.records.values() for name in record}

    def series(self, name: str) -> Series:
        """Values of the metric ``name``, with the steps at which it was logged."""
        return as_series((step, record[name]) for step, record in self.records.items() if name in record)

    def level(self, name: str) -> np.ndarray:
        """(steps,) the metric at every step: its last logged value, and 0 before the first."""
        values, last = [], 0.0
        for record in self.records.values():
            last = record.get(name, last)
            values.append(last)
        return np.array(values)

    def last(self, name: str) -> float | None:
        """Last logged value; None if there is none."""
        return next((record[name] for record in reversed(self.records.values()) if name in record), None)


def as_series(points: Iterable[tuple[float, float]]) -> Series:
    """The points (x, y) as two arrays."""
    x, y = np.array(list(points), dtype=np.float64).reshape(-1, 2).T
    return x, y


@dataclass(frozen=True)
class RunGroup:
    """The runs of one method, one for each seed. A plot has one line for each group."""

    name: str
    runs: tuple[Run, ...]


def without_seed(name: str) -> str:
    """The name without its seed at the end: a number behind ``_``, ``_s``, ``_seed`` or ``_seed_``.

    Before ``s`` and ``seed``, ``-`` may replace ``_``. Capital letters do not matter.
    """
    match = SEED.fullmatch(name)
    return match["method"] if match else name


def seed_of(name: str) -> int | None:
    """The seed at the end of a run's name."""
    match = SEED.fullmatch(name)
    return int(match["seed"]) if match else None


def by_method(runs: Sequence[Run]) -> list[RunGroup]:
    """Runs grouped by method, in the order of each method's first run.

    A run without a second seed keeps its full name, since its number may not be a seed.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(without_seed(run.name), []).append(run)
    return [RunGroup(name if len(group) > 1 else group[0].name, tuple(group)) for name, group in groups.items()]


def find_runs(arguments: Iterable[str], skipped: Callable[[Path], None] = lambda _: None) -> list[tuple[Path, ...]]:
    """The parts of each run; a part is a file, or a folder of event files.

    A folder stands for several runs: one for each of its ``*.jsonl`` files that holds a step, and one for each folder
    with event files, which may be the folder itself or lie at any depth below it. A file stands for one run, with the
    files of the run's restarts, ``<name>-restart-<k>.jsonl``, whether or not ``arguments`` name them. ``a+b`` stands
    for a run that was resumed into a file of any name.

    Args:
        arguments: files, folders, and files joined by ``+``.
        skipped: called with each file of a folder that is left out because neither it nor its restarts hold a step,
            such as a record of ``rollout_driver.record``.

    Raises:
        ValueError: a file does not exist or is named twice, or a folder holds no log.
    """
    runs: list[tuple[Path, ...]] = []
    arguments = list(arguments)
    named = {Path(argument).resolve() for argument in arguments}
    for argument in arguments:
        path = Path(argument)
        if (first := _run_of(path)) is not None and first.resolve() in named:
            continue
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            found += sorted({file.parent for file in path.rglob(PATTERN) if file.is_file()})
            if not found:
                raise ValueError(f"{path}: the folder holds no .jsonl file and no event file ({PATTERN}).")
            begun = [(part, *_restarts(part)) for part in found if _run_of(part) not in found]
            kept = [parts for parts in begun if any(map(_holds_step, parts))]
            if not kept:
                raise ValueError(f"{path}: no .jsonl file of the folder holds a step of verl's file logger.")
            for parts in begun:
                if parts not in kept:
                    skipped(parts[0])
            runs += kept
        elif path.exists():
            runs.append((path, *_restarts(path)))
        elif all(names := argument.split("+")):
            runs.append(tuple(Path(name) for name in names))
        else:
            raise ValueError(f"{argument}: there is no such file, and a + stands between two of them.")
    seen: set[Path] = set()
    for path in (path for parts in runs for path in parts):
        for file in event_files(path) or [path]:
            if file.is_dir():
                raise ValueError(f"{file}: the folder holds no event file ({PATTERN}).")
            if not file.is_file():
                raise ValueError(f"{file}: there is no such file.")
            if file.resolve() in seen:
                raise ValueError(f"{file}: named twice.")
            seen.add(file.resolve())
    return runs


def _restarts(file: Path) -> list[Path]:
    """The files of the restarts of the run that ``file`` begins, in the order of the restarts."""
    found = [part for part in file.parent.glob("*.jsonl") if _run_of(part) == file]
    return sorted(found, key=lambda part: int(part.stem.rpartition("-")[2]))


def _run_of(file: Path) -> Path | None:
    """The file of the run that a restart's file continues; None for every other path."""
    match = RESTART.fullmatch(file.stem) if file.suffix == ".jsonl" else None
    return file.with_name(f"{match['run']}.jsonl") if match else None


def _holds_step(part: Path) -> bool:
    """Whether a part of a run in a folder holds a step; event files are believed to."""
    if part.is_dir():
        return True
    try:
        with part.open(encoding="utf-8", errors="replace") as lines:
            return any(_parse(line) is not None for line in lines)
    except OSError:
        return True  # read_run says why the file cannot be read


def home(part: Path) -> Path:
    """Path whose last part names the run: the folder of the event files, or the file without its ending; absolute."""
    path = Path(os.path.abspath(part))
    if path.is_dir():
        return path
    return path.parent if path.match(PATTERN) else path.with_suffix("")


def names(paths: Sequence[Path]) -> list[str]:
    """Different names for runs: the file name without ending, or the name of the folder of event files.

    A run without a seed gets the seed of its folder: ``seed3/grpo.jsonl`` becomes ``grpo_seed3``.

    If two runs of a method have the same name, all runs of that method get their folder's name in front, so seeds of
    one folder stay together. Names still equal become whole paths, with the ending where even these are equal.
    """
    homes = [home(path) for path in paths]
    stems = [_with_seed(path) for path in homes]
    clashing = {without_seed(stem) for stem in stems if stems.count(stem) > 1}
    chosen = [
        f"{path.parent.name}/{stem}" if without_seed(stem) in clashing else stem
        for path, stem in zip(homes, stems, strict=True)
    ]
    return [
        name if chosen.count(name) == 1 else str(whole) if homes.count(whole) == 1 else str(path.absolute())
        for name, whole, path in zip(chosen, homes, paths, strict=True)
    ]


def _with_seed(path: Path) -> str:
    """The last part of the path, with the seed of the folder if it has none of its own."""
    folder = path.parent.name
    return f"{path.name}_{folder}" if seed_of(path.name) is None and SEED_FOLDER.fullmatch(folder) else path.name


def read_run(parts: Sequence[Path], name: str | None = None) -> Run:
    """Read the parts of one run in the order in which they were written.

    A resumed run goes back to its checkpoint, so a record of a step drops all earlier records of later steps. The
    record of a step that is trained again replaces the earlier record whole, and no earlier metric stays. Other
    records of one step are merged, and the later value of a metric wins: a validation at the start of a resumed run
    adds to the record of the step.

    Args:
        parts: as :func:`find_runs` gives them.
        name: name of the run; None: the name of its first part.

    Raises:
        ValueError: a file cannot be read, or no part holds a step.
    """
    empty: list[Path] = []
    merged: dict[int, dict[str, float]] = {}
    skipped_lines = skipped_values = unread_bytes = replaced = 0
    for part in parts:
        records: Sequence[tuple[int, dict[str, Any]]]
        if files := event_files(part):
            logger = "tensorboard"
            records, unread = read_events(files)
            unread_bytes += unread
        else:
            logger = "file"
            records, skipped = _read_lines(part)
            skipped_lines += skipped
        if not records:
            empty.append(part)
        for step, data in records:
            while merged and next(reversed(merged)) > step:
                merged.popitem()
                replaced += 1
            numbers = {key: value for key, value in map(_number, data.items()) if value is not None}
            finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
            skipped_values += len(numbers) - len(finite)
            if any(name in merged.get(step, ()) and name in finite for name in OF_TRAINING):
                del merged[step]
                replaced += 1
            merged.setdefault(step, {}).update(finite)
    if not merged:
        raise ValueError(f"{' and '.join(map(str, empty))}: holds no step of verl's {logger} logger.")
    names_of_empty = tuple(part.name for part in empty)
    return Run(
        name or home(parts[0]).name, merged, skipped_lines, skipped_values, unread_bytes, names_of_empty, replaced
    )


def first_data(path: Path) -> dict[str, Any]:
    """Metrics in the first line of a log of verl's ``file`` logger; empty if the line is another, or damaged."""
    with path.open(encoding="utf-8", errors="replace") as file:
        record = _parse(file.readline())
    return {} if record is None else record[1]


def _read_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Steps with their metrics, and the number of lines in another format."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    lines = [line for line in text.split("\n") if line.strip()]
    records = [record for record in map(_parse, lines) if record is not None]
    return records, len(lines) - len(records)


def _parse(line: str) -> tuple[int, dict[str, Any]] | None:
    try:
        record = json.loads(line)
        # Each line repeats the names of all metrics. Shared names save a third of the memory for a long log.
        return int(record["step"]), {sys.intern(name): value for name, value in dict(record["data"]).items()}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _number(item: tuple[str, Any]) -> tuple[str, float | None]:
    """A metric as a float; None for text and other values, of which verl logs a few."""
    key, value = item
    if isinstance(value, bool) or not isinstance(value, int | float):
        return key, None
    try:
        return key, float(value)
    except OverflowError:
        return key, math.inf
