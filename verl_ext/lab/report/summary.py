"""The numbers: accuracy and what it cost, where rollouts went, time spent deciding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl_ext.lab.report.methods import by_method
from verl_ext.lab.report.runs import Run, Series

ROLLOUTS, TOKENS, SECONDS = "rollouts/sampled_total", "tokens/sampled_total", "timing_s/step"
DECIDING = "allocation/seconds"
ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")
DISCARDED = re.compile(r"rollouts/discarded_(.+)_total")
RULE = "To target: at the first validation at or above it."
COMMON = "Target: the best accuracy that every run reached."


@dataclass(frozen=True)
class Point:
    """One validation: accuracy in [0, 1] and what was spent up to it, validation not counted; None: not logged.

    ``seconds`` is the sum of ``timing_s/step``, without what a resumed run did in vain.
    """

    step: int
    rollouts: float | None
    tokens: float | None
    seconds: float | None
    accuracy: float


def accuracy_of(data: Mapping[str, float]) -> float | None:
    """Mean over the data sources, each with the same weight; None where the step has no validation."""
    values = [value for key, value in data.items() if key.startswith("val-core/") and ACCURACY.fullmatch(key)]
    return sum(values) / len(values) if values else None


def points(run: Run) -> list[Point]:
    """The run's validations in the order of steps."""
    # Nothing is spent at step 0. A file that begins later lacks the start of its run: what that has spent is not known.
    only_start = run.steps[-1] == 0
    rollouts, tokens, seconds = (
        0.0 if run.steps[0] == 0 and (only_start or run.last(name) is not None) else None
        for name in (ROLLOUTS, TOKENS, SECONDS)
    )
    found = []
    for step, data in zip(run.steps, run.records, strict=True):
        rollouts, tokens = data.get(ROLLOUTS, rollouts), data.get(TOKENS, tokens)
        if SECONDS in data:
            seconds = (seconds or 0.0) + data[SECONDS]
        accuracy = accuracy_of(data)
        if accuracy is not None:
            found.append(Point(step, rollouts, tokens, seconds, accuracy))
    return found


def accuracy_against(run: Run, unit: str) -> Series:
    """Accuracy against what ``Point`` calls ``unit``; validations whose unit is not known are left out."""
    known = [(getattr(point, unit), point.accuracy) for point in points(run) if getattr(point, unit) is not None]
    spent, accuracies = zip(*known, strict=True) if known else ((), ())
    return np.array(spent, dtype=np.float64), np.array(accuracies, dtype=np.float64)


def common_target(runs: Sequence[Run]) -> float | None:
    """The best accuracy that every run with a validation reached: the smallest of their best ones."""
    best = [max(point.accuracy for point in found) for found in map(points, runs) if found]
    return min(best, default=None)


def first_at(run: Run, target: float | None) -> Point | None:
    """First validation at or above the target; None where there is none."""
    return next((point for point in points(run) if target is not None and point.accuracy >= target), None)


def destinations(run: Run) -> dict[str, np.ndarray]:
    """Rollouts up to each step by what became of them; empty where the run does not log it.

    ``buffered`` is a level; together they are the rollouts sampled.
    """
    logged = run.metrics()
    reasons = sorted(match[1] for match in map(DISCARDED.fullmatch, logged) if match)
    parts = {"trained": "rollouts/trained_total"}
    parts |= {f"discarded: {reason}": f"rollouts/discarded_{reason}_total" for reason in reasons}
    parts |= {"failed": "rollouts/failed_total", "buffered": "rollouts/buffered"}
    return {part: run.level(name) for part, name in parts.items() if name in logged}


def deciding_share(run: Run) -> Series:
    """Time spent deciding, as a share of the step."""
    pairs = [
        (step, data[DECIDING] / data[SECONDS])
        for step, data in zip(run.steps, run.records, strict=True)
        if DECIDING in data and data.get(SECONDS, 0.0) > 0
    ]
    steps, shares = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps, dtype=np.float64), np.array(shares, dtype=np.float64)


def summarize(runs: Sequence[Run], target: float | None = None) -> dict[str, Any]:
    """What the tables show, as plain JSON values; None where a run does not have it.

    Args:
        runs: at least one; ratios are to the first.
        target: accuracy in [0, 1]; by default the best that every run reached.
    """
    rule = RULE if target is not None else f"{COMMON} {RULE}"
    target = common_target(runs) if target is None else target
    rows = {run.name: _of_run(run, target) for run in runs}
    _add_ratios(list(rows.values()))
    methods = [
        _of_method(method.name, [rows[run.name] for run in method.runs])
        for method in by_method(runs)
    ]  # fmt: skip
    _add_ratios(methods)
    return {
        "target_accuracy": target,
        "rule": rule,
        "runs": list(rows.values()),
        "methods": methods,
        "notes": _notes(runs),
    }


def _of_run(run: Run, target: float | None) -> dict[str, Any]:
    validations, reached = points(run), first_at(run, target)
    accuracies = [point.accuracy for point in validations]
    _, deciding = run.series(DECIDING)
    _, shares = deciding_share(run)
    _, seconds = run.series(SECONDS)
    return {
        "name": run.name,
        "steps": run.steps[-1],
        "rollouts": run.last(ROLLOUTS),
        "tokens": run.last(TOKENS),
        "seconds": float(seconds.sum()) if seconds.size else None,
        "first_accuracy": accuracies[0] if accuracies else None,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "rollouts_to_target": reached.rollouts if reached else None,
        "to_target": asdict(reached) if reached else None,
        "destinations": {part: float(counts[-1]) for part, counts in destinations(run).items()},
        "deciding_median_seconds": float(np.median(deciding)) if deciding.size else None,
        "deciding_median_share": float(np.median(shares)) if shares.size else None,
        "skipped_lines": run.skipped_lines,
        "skipped_values": run.skipped_values,
        "unread_bytes": run.unread_bytes,
        "validations": [asdict(point) for point in validations],
    }


def _of_method(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and range over the seeds. Where a seed lacks a number, the method does: what is left would flatter it."""
    fields = ("steps", "rollouts", "tokens", "seconds", "rollouts_to_target")
    fields += ("first_accuracy", "final_accuracy", "best_accuracy")
    method: dict[str, Any] = {"name": name, "runs": [row["name"] for row in rows]}
    method["reached_target"] = sum(row["to_target"] is not None for row in rows)
    for field in fields:
        values = [row[field] for row in rows if row[field] is not None]
        complete = len(values) == len(rows)
        method[field] = sum(values) / len(values) if complete else None
        method[f"{field}_range"] = [min(values), max(values)] if complete else None
    return method


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    first = rows[0]["rollouts_to_target"]
    for row in rows:
        needed = row["rollouts_to_target"]
        row["ratio_to_first"] = needed / first if needed is not None and first else None


def _notes(runs: Sequence[Run]) -> list[str]:
    """What a reader has to know about how the runs were read."""
    lines = [f"{run.name} {run.skipped_lines}" for run in runs if run.skipped_lines]
    values = [f"{run.name} {run.skipped_values}" for run in runs if run.skipped_values]
    unread = [f"{run.name} {run.unread_bytes}" for run in runs if run.unread_bytes]
    blind = [run.name for run in runs if not points(run)]
    uncounted = [run.name for run in runs if run.steps[-1] > 0 and run.last(ROLLOUTS) is None]
    notes = (
        ("Lines skipped, since they are not those of verl's file logger", lines),
        ("Bytes of event files not read, from where a record is cut off or damaged", unread),
        ("Values skipped, since they are not finite", values),
        ("No validation accuracy (trainer.test_freq and data.val_files give one)", blind),
        ("No count of rollouts, so compared by steps and time only", uncounted),
    )
    ends = [f"{method.name} {', '.join(str(run.steps[-1]) for run in method.runs)}" for method in by_method(runs)
            if len({run.steps[-1] for run in method.runs}) > 1]  # fmt: skip
    notes += (("Seeds that end at different steps, so that their curves end with the shortest", ends),)
    return [f"{note}: {'; '.join(names)}." for note, names in notes if names]
