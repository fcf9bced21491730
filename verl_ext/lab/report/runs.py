"""Reading what verl's loggers wrote: ``file``, a JSON object ``{"step", "data"}`` per line, or ``tensorboard``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.lab.report.events import PATTERN, event_files, read_events

Series = tuple[np.ndarray, np.ndarray]
"""Where and what: x and y, of the same length."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: unique among the runs that are compared.
        steps: those that were logged, increasing; at least one.
        records: metrics of each of them; finite numbers only.
        skipped_lines: lines that were not the logger's, such as the one that a killed run cuts off.
        skipped_values: values that were not finite.
        unread_bytes: of event files, from where a record is cut off or damaged.
    """

    name: str
    steps: tuple[int, ...]
    records: tuple[dict[str, float], ...]
    skipped_lines: int = 0
    skipped_values: int = 0
    unread_bytes: int = 0

    def metrics(self) -> set[str]:
        """Names that occur in any step."""
        return {name for record in self.records for name in record}

    def series(self, name: str) -> Series:
        """Steps that have the metric, and its values there."""
        found = [(step, record[name]) for step, record in zip(self.steps, self.records, strict=True) if name in record]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def level(self, name: str) -> np.ndarray:
        """The metric at every step: where it is not logged its last value, and 0 before it first is."""
        values, last = [], 0.0
        for record in self.records:
            last = record.get(name, last)
            values.append(last)
        return np.array(values)

    def last(self, name: str) -> float | None:
        """Last value that was logged."""
        return next((record[name] for record in reversed(self.records) if name in record), None)


def find_runs(arguments: Iterable[str]) -> list[tuple[Path, ...]]:
    """The parts of each run, each a file or a folder of event files.

    A folder stands for each ``*.jsonl`` in it, and for each folder with event files: itself, or at any depth below it.
    A file stands for itself, and ``a+b`` for a run that was resumed.

    Raises:
        ValueError: there is no such file, the folder holds none, or a file is named twice.
    """
    runs: list[tuple[Path, ...]] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            found += sorted({file.parent for file in path.rglob(PATTERN) if file.is_file()})
            if not found:
                raise ValueError(f"{path}: the folder holds no .jsonl file and no event file ({PATTERN}).")
            runs += [(part,) for part in found]
        elif path.exists():
            runs.append((path,))
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


def home(part: Path) -> Path:
    """What names a run: the folder of its event files, or its file without the ending; absolute."""
    path = Path(os.path.abspath(part))
    if path.is_dir():
        return path
    return path.parent if path.match(PATTERN) else path.with_suffix("")


def read_run(parts: Sequence[Path], name: str | None = None) -> Run:
    """The run that the parts record, in the order in which they were written; its name is the first one's unless given.

    A resumed run goes back to its checkpoint. So a record of a step drops what was logged beyond that step, and in the
    step itself the later value of a metric wins: a validation before training goes on adds to what is there.

    Raises:
        ValueError: a file cannot be read, or a part holds no step at all.
    """
    merged: dict[int, dict[str, float]] = {}
    skipped_lines = skipped_values = unread_bytes = 0
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
            raise ValueError(f"{part}: holds no step of verl's {logger} logger.")
        for step, data in records:
            while merged and next(reversed(merged)) > step:
                merged.popitem()
            numbers = {key: value for key, value in map(_number, data.items()) if value is not None}
            finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
            skipped_values += len(numbers) - len(finite)
            merged.setdefault(step, {}).update(finite)
    return Run(
        name or home(parts[0]).name, tuple(merged), tuple(merged.values()), skipped_lines, skipped_values, unread_bytes
    )


def _read_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Steps and what was logged, and how many lines were not the logger's."""
    lines = _lines(path)
    records = [record for record in map(_parse, lines) if record is not None]
    return records, len(lines) - len(records)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    return [line for line in text.split("\n") if line.strip()]


def _parse(line: str) -> tuple[int, dict[str, Any]] | None:
    try:
        record = json.loads(line)
        return int(record["step"]), dict(record["data"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _number(item: tuple[str, Any]) -> tuple[str, float | None]:
    """A metric as a float; None for what is no number, as verl logs a few of them."""
    key, value = item
    if isinstance(value, bool) or not isinstance(value, int | float):
        return key, None
    try:
        return key, float(value)
    except OverflowError:
        return key, math.inf
