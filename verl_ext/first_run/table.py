"""The table of a first run: on the terminal, as markdown, and as JSON from which the next start continues."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_ext.checks import InvalidValue
from verl_ext.files import write_text
from verl_ext.lab.table import Table, number

PASSED, FAILED, NOT_TRIED = "passed", "failed", "not tried"
HEADER = ("what", "result", "seconds", "rollouts/s", "peak GB per GPU", "predicted GB")
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """A check or a training of a first run.

    Attributes:
        what: name of the check or training.
        result: ``PASSED``, ``FAILED`` or ``NOT_TRIED``.
        why: the finding of a check that passed; otherwise the reason of the result, in one sentence.
        seconds: duration of the check or training.
        rollouts_per_second: of the steps of a training, starts not included.
        peak_bytes: the training's peak of reserved memory, on the GPU with the highest peak; None on the CPU.
        predicted_bytes: this peak as computed by ``verl-ext hardware``; None on the CPU.
    """

    what: str
    result: str
    why: str = ""
    seconds: float | None = None
    rollouts_per_second: float | None = None
    peak_bytes: float | None = None
    predicted_bytes: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's texts, in the order of ``HEADER``."""
        trained = self.rollouts_per_second is not None
        peak = NOT_MEASURED if trained and self.peak_bytes is None else _gb(self.peak_bytes)
        return (
            self.what,
            f"{self.result}: {self.why}" if self.why else self.result,
            number(self.seconds, ".0f"),
            number(self.rollouts_per_second, ".1f"),
            peak,
            _gb(self.predicted_bytes),
        )


def to_table(rows: Iterable[Row], title: str) -> Table:
    """The table for the terminal."""
    return Table(title, HEADER, [row.cells for row in rows], expendable=HEADER[4:])


def to_markdown(rows: Iterable[Row], title: str) -> str:
    """The table in markdown, below its title."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(row.cells for row in rows)]
    escaped = ("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    return f"{title}\n\n" + "\n".join(escaped) + "\n"


class Results:
    """The rows of a first run, written to ``out/rows.json`` and ``out/table.md`` after each of them.

    Args:
        out: folder, which exists.
        setting: JSON of everything that determines the rows. Trainings of an earlier start with the same setting are
            kept.

    Raises:
        InvalidValue: ``out`` holds rows of another setting.
    """

    def __init__(self, out: Path, setting: dict[str, Any]) -> None:
        self._file, self._markdown, self._setting = out / "rows.json", out / "table.md", setting
        self._checks: list[Row] = []
        self._trainings: dict[str, Row] = {}
        if not self._file.exists():
            return
        earlier = json.loads(self._file.read_text())
        for key, value in setting.items():
            if (before := earlier["setting"].get(key)) != value:
                raise InvalidValue(key, value, f"{out} holds a first run with {before}, use another --out")
        self._trainings = {row["what"]: Row(**row) for row in earlier["trainings"]}

    def passed(self, training: str) -> bool:
        """Whether a training of this name has passed."""
        return training in self._trainings and self._trainings[training].result == PASSED

    @property
    def trainings_passed(self) -> int:
        """Number of trainings that have passed, in this start or an earlier one."""
        return sum(map(self.passed, self._trainings))

    def set_checks(self, rows: Iterable[Row]) -> None:
        """The checks of this start, in place of all earlier checks."""
        self._checks = list(rows)
        self._write()

    def add_training(self, row: Row) -> None:
        """Add a training, in place of an earlier one of the same name."""
        self._trainings[row.what] = row
        self._write()

    @property
    def rows(self) -> list[Row]:
        """The checks, and the trainings in the order in which they were first added."""
        return [*self._checks, *self._trainings.values()]

    def _write(self) -> None:
        parts = {"checks": self._checks, "trainings": self._trainings.values()}
        content = {"setting": self._setting} | {name: [asdict(row) for row in rows] for name, rows in parts.items()}
        write_text(self._file, json.dumps(content, indent=2) + "\n")
        write_text(self._markdown, to_markdown(self.rows, ", ".join(f"{k}={v}" for k, v in self._setting.items())))


def _gb(size: float | None) -> str:
    return number(None if size is None else size / 1e9, ".1f")
