"""The tables as rows of text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Cells of a table; the first column names its row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def of_runs(summary: dict[str, Any]) -> Table:
    """One row per run."""
    rows = [
        (
            run["name"],
            *(_form(run[field], _count) for field in ("steps", "rollouts", "tokens", "rollouts_to_target")),
            _form(run["ratio_to_first"], _ratio),
            *(_form(run[field], _share) for field in ("first_accuracy", "final_accuracy")),
        )
        for run in summary["runs"]
    ]
    header = ("method", "steps", "rollouts", "tokens", _to_target(summary), "× first", "start", "final")
    return Table("Validation accuracy, and the rollouts sampled for it", header, tuple(rows))


def of_methods(summary: dict[str, Any]) -> Table | None:
    """Mean and range over seeds; None where no method has several."""
    several = any(len(method["runs"]) > 1 for method in summary["methods"])
    rows = [
        (
            method["name"],
            str(len(method["runs"])),
            str(method["reached_target"]),
            _spread(method, "rollouts_to_target", _count),
            _form(method["ratio_to_first"], _ratio),
            *(_spread(method, field, _share) for field in ("first_accuracy", "final_accuracy", "best_accuracy")),
        )
        for method in summary["methods"]
    ]
    header = ("method", "seeds", "reached", _to_target(summary), "× first", "start", "final", "best")
    return Table("Over seeds: mean (least to largest)", header, tuple(rows)) if several else None


def of_costs(summary: dict[str, Any]) -> Table | None:
    """Where each run's rollouts and its time went; None where no run logs it."""
    runs = [run for run in summary["runs"] if run["destinations"] or run["deciding_median_seconds"] is not None]
    rows = []
    for run in runs:
        parts, total = run["destinations"], sum(run["destinations"].values())
        discarded = sum(count for part, count in parts.items() if part.startswith("discarded"))
        counts = (parts.get("trained"), discarded if parts else None, parts.get("failed"), parts.get("buffered"))
        rows.append(
            (
                run["name"],
                *(_form(count / total if count is not None and total else None, _share) for count in counts),
                _form(run["seconds"], _duration),
                _form(run["deciding_median_seconds"], lambda seconds: f"{1000 * seconds:.1f} ms"),
                _form(run["deciding_median_share"], lambda share: f"{share:.2%}"),
            )
        )
    header = ("method", "trained", "discarded", "failed", "buffered", "time", "deciding", "of step")
    return Table("Where rollouts and time went", header, tuple(rows)) if rows else None


def to_rich(table: Table, caption: str | None = None) -> RichTable:
    """For the terminal. Names are shown as they are, brackets included."""
    shown = RichTable(title=table.title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, header in enumerate(table.header):
        shown.add_column(Text(header), justify="right" if place else "left", no_wrap=place == 0)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def _to_target(summary: dict[str, Any]) -> str:
    target = summary["target_accuracy"]
    return "rollouts to target" if target is None else f"rollouts to {target:.1%}"


def _form(value: float | None, form: Callable[[float], str]) -> str:
    return NOTHING if value is None else form(value)


def _spread(method: dict[str, Any], field: str, form: Callable[[float], str]) -> str:
    if method[field] is None:
        return NOTHING
    least, largest = method[f"{field}_range"]
    return form(method[field]) if least == largest else f"{form(method[field])} ({form(least)} to {form(largest)})"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _duration(seconds: float) -> str:
    unit, length = ("h", 3600) if seconds >= 7200 else ("min", 60) if seconds >= 120 else ("s", 1)
    return f"{seconds / length:.1f} {unit}"
