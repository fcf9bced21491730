"""Reading what verl's ``file`` logger wrote: a JSON object ``{"step", "data"}`` per line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    """

    name: str
    steps: tuple[int, ...]
    records: tuple[dict[str, float], ...]
    skipped_lines: int = 0
    skipped_values: int = 0

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
    """The files of each run: of a file, of each ``*.jsonl`` in a folder, or of a resumed run, ``a.jsonl+b.jsonl``.

    Raises:
        ValueError: there is no such file, the folder holds none, or a file is named twice.
    """
    runs: list[tuple[Path, ...]] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise ValueError(f"{path}: the folder holds no .jsonl file.")
            runs += [(file,) for file in found]
        else:
            runs.append((path,) if path.exists() else tuple(Path(part) for part in argument.split("+")))
    seen: set[Path] = set()
    for path in (path for files in runs for path in files):
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file.")
        if path.resolve() in seen:
            raise ValueError(f"{path}: named twice.")
        seen.add(path.resolve())
    return runs


def read_run(files: Sequence[Path], name: str | None = None) -> Run:
    """The run that the files record, in the order in which they were written; its name is the first one's unless given.

    A resumed run goes back to its checkpoint. So a line of a step drops what was logged beyond that step, and in the
    step itself the later value of a metric wins: a validation before training goes on adds to what is there.

    Raises:
        ValueError: a file cannot be read, or holds no step at all.
    """
    merged: dict[int, dict[str, float]] = {}
    skipped_lines = skipped_values = 0
    for path in files:
        lines = _lines(path)
        records = [record for record in map(_parse, lines) if record is not None]
        if not records:
            raise ValueError(f"{path}: holds no step of verl's file logger.")
        skipped_lines += len(lines) - len(records)
        for step, data in records:
            while merged and next(reversed(merged)) > step:
                merged.popitem()
            numbers = {key: value for key, value in map(_number, data.items()) if value is not None}
            finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
            skipped_values += len(numbers) - len(finite)
            merged.setdefault(step, {}).update(finite)
    return Run(name or files[0].stem, tuple(merged), tuple(merged.values()), skipped_lines, skipped_values)


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
