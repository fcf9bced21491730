"""The report's numbers as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_ext.lab.table import NOTHING, Table, count, number, percent

GROUPS_PER_1000 = "Groups per 1,000: trained groups with a gradient per 1,000 sampled rollouts"


def tables(summary: dict[str, Any]) -> list[Table]:
    """In the order in which they are shown; tables without content are left out."""
    found = (_of_runs(summary), _of_methods(summary), _of_costs(summary))
    return [table for table in found if table is not None]


def _of_runs(summary: dict[str, Any]) -> Table:
    """One row per run."""
    rows = [
        (
            run["name"],
            *(count(run[field]) for field in ("steps", "rollouts", "tokens", "rollouts_to_target")),
            number(run["times_fewer_rollouts"]),
            *(percent(run[field]) for field in ("first_accuracy", "final_accuracy")),
        )
        for run in summary["runs"]
    ]
    header = ("run", "steps", "rollouts", "tokens", *_target_columns(summary), "start", "final")
    title = "Validation accuracy, and the rollouts sampled for it"
    return Table(title, header, rows, _explanation(summary, "runs"), expendable=("tokens", "start", "steps"))


def _of_methods(summary: dict[str, Any]) -> Table | None:
    """Mean and range over seeds; None where no method has several."""
    if all(len(method["runs"]) == 1 for method in summary["methods"]):
        return None
    rows = [
        (
            method["name"],
            str(len(method["runs"])),
            str(method["reached_target"]),
            _spread(method, "rollouts_to_target", count),
            number(method["times_fewer_rollouts"]),
            _interval(method["times_fewer_rollouts_interval"]),
            *(_spread(method, field, percent) for field in ("first_accuracy", "final_accuracy", "best_accuracy")),
        )
        for method in summary["methods"]
    ]
    header = ("method", "seeds", "reached", *_target_columns(summary), "95 % interval", "start", "final", "best")
    caption = (
        f"{_explanation(summary, 'methods')} Over seeds: geometric mean of the ratios of the seeds in common. Each "
        "interval is for one method alone, and is not widened for the choice of the best."
    )
    return Table("Over seeds: mean (least to largest)", header, rows, caption, expendable=("start", "final"))


def _of_costs(summary: dict[str, Any]) -> Table | None:
    """Where each run's rollouts and time went; None where no run logs either."""
    rows = []
    for run in summary["runs"]:
        parts, total = run["destinations"], sum(run["destinations"].values())
        if not parts and run["deciding_median_seconds"] is None:
            continue
        discarded = sum(value for part, value in parts.items() if part.startswith("discarded"))
        counts = (parts.get("trained"), discarded if parts else None, parts.get("failed"), parts.get("buffered"))
        seconds = run["deciding_median_seconds"]
        rows.append(
            (
                run["name"],
                *(percent(value / total if value is not None and total else None) for value in counts),
                number(run["groups_per_1000"], ".1f"),
                _duration(run["seconds"]),
                NOTHING if seconds is None else f"{1000 * seconds:.1f} ms",
                number(run["deciding_median_share"], ".2%"),
            )
        )
    header = ("run", "trained", "discarded", "failed", "buffered", "groups per 1,000", "time", "deciding", "of step")
    caption = f"{GROUPS_PER_1000} of the whole run. Deciding: the policy's own computation, median over steps."
    return Table("Where rollouts and time went", header, rows, caption) if rows else None


def _target_columns(summary: dict[str, Any]) -> tuple[str, str]:
    target = summary["target_accuracy"]
    return "rollouts to target" if target is None else f"rollouts to {target:.1%}", "times fewer rollouts"


def _explanation(summary: dict[str, Any], level: str) -> str:
    first = summary[level][0]["name"]
    return f"Times fewer rollouts: rollouts to the target of {first}, divided by those of the row. Above 1 is cheaper."


def _spread(method: dict[str, Any], field: str, form: Callable[[float | None], str]) -> str:
    if method[field] is None:
        return NOTHING
    least, largest = map(form, method[f"{field}_range"])
    return least if least == largest else f"{form(method[field])} ({least} to {largest})"


def _interval(ends: list[float] | None) -> str:
    return NOTHING if ends is None else " to ".join(map(number, ends))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    unit, length = ("h", 3600) if seconds >= 7200 else ("min", 60) if seconds >= 120 else ("s", 1)
    return f"{seconds / length:.1f} {unit}"
