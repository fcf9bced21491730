"""Compare runs by what they paid for: accuracy against rollouts sampled.

    python examples/quickstart/compare.py grpo.jsonl pilot_commit.jsonl --out results

Reads the JSON lines of verl's ``file`` logger and writes ``comparison.json`` and ``comparison.png``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROLLOUTS, TOKENS = "rollouts/sampled_total", "tokens/sampled_total"
ACCURACY = re.compile(r"val-core/.+/acc/mean@\d+")
RULE = "Target: the best accuracy that every run reached. Rollouts to target: at the first validation at or above it."
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Point:
    """One validation: accuracy in [0, 1], with the rollouts and tokens sampled up to it."""

    step: int
    rollouts: float
    tokens: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        method: name of the run, from its file.
        steps: last training step that was logged.
        rollouts, tokens: sampled in total, as of that step; validation not counted.
        points: validations in the order of steps; at least one.
    """

    method: str
    steps: int
    rollouts: float
    tokens: float
    points: tuple[Point, ...]

    @property
    def best(self) -> float:
        """Highest validation accuracy."""
        return max(point.accuracy for point in self.points)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps that were logged. The last line may be cut off, as a killed run leaves it; no other may.

    Raises:
        ValueError: the file cannot be read, or a line is not what verl's logger writes.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({"step": int(record["step"]), "data": dict(record["data"])})
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a line of verl's file logger.") from error
    return records


def accuracy_of(data: dict[str, Any]) -> float | None:
    """Mean over the data sources, each with the same weight; None where the step has no validation."""
    values = [float(value) for key, value in data.items() if ACCURACY.fullmatch(key) and value is not None]
    return sum(values) / len(values) if values else None


def read_run(path: Path, method: str | None = None) -> Run:
    """The run that a JSONL file records; its method is the file's name unless given.

    Raises:
        ValueError: as ``read_lines``, or the run holds no validation, or an accuracy that is not finite.
    """
    rollouts = tokens = 0.0
    step, points = 0, []
    for record in read_lines(path):
        step, data = max(step, record["step"]), record["data"]
        rollouts = max(rollouts, float(data.get(ROLLOUTS, 0.0)))
        tokens = max(tokens, float(data.get(TOKENS, 0.0)))
        accuracy = accuracy_of(data)
        if accuracy is None:
            continue
        if not math.isfinite(accuracy):
            raise ValueError(f"{path}: the validation accuracy at step {record['step']} is {accuracy}.")
        points.append(Point(record["step"], rollouts, tokens, accuracy))
    if not points:
        raise ValueError(f"{path}: the run holds no validation accuracy; set trainer.test_freq and data.val_files.")
    return Run(method or path.stem, step, rollouts, tokens, tuple(points))


def names(paths: Sequence[Path]) -> list[str]:
    """The files' names without ending; with their folders' where two are the same."""
    stems = [path.stem for path in paths]
    return [
        stem if stems.count(stem) == 1 else f"{path.resolve().parent.name}/{stem}"
        for stem, path in zip(stems, paths, strict=True)
    ]


def common_target(runs: Sequence[Run]) -> float:
    """The best accuracy that every run reached: the smallest of the runs' best accuracies."""
    return min(run.best for run in runs)


def rollouts_to(run: Run, target: float) -> float | None:
    """Rollouts sampled at the first validation at or above the target; None where there is none."""
    return next((point.rollouts for point in run.points if point.accuracy >= target), None)


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """What the table shows, and the curves, as plain JSON values."""
    target = common_target(runs)
    return {
        "target_accuracy": target,
        "rule": RULE,
        "runs": [
            {
                "method": run.method,
                "steps": run.steps,
                "rollouts": run.rollouts,
                "tokens": run.tokens,
                "rollouts_to_target": rollouts_to(run, target),
                "first_accuracy": run.points[0].accuracy,
                "final_accuracy": run.points[-1].accuracy,
                "best_accuracy": run.best,
                "validations": [asdict(point) for point in run.points],
            }
            for run in runs
        ],
    }


def to_table(summary: dict[str, Any]) -> Table:
    """One row per run."""
    target = summary["target_accuracy"]
    table = Table(title="Validation accuracy, and the rollouts sampled for it", caption=summary["rule"])
    table.add_column("method", no_wrap=True)
    to_target = f"rollouts to {target:.1%}"
    for header in ("steps", "rollouts", "tokens", to_target, "start", "final", "best"):
        table.add_column(header, justify="right")
    for run in summary["runs"]:
        counts = (run["steps"], run["rollouts"], run["tokens"], run["rollouts_to_target"])
        accuracies = (run["first_accuracy"], run["final_accuracy"], run["best_accuracy"])
        table.add_row(run["method"], *(f"{value:,.0f}" for value in counts), *(f"{value:.1%}" for value in accuracies))
    return table


def plot(runs: Sequence[Run], path: Path) -> None:
    """Accuracy against cumulative rollouts, one line per run; a ring marks where a run reached the target."""
    target = common_target(runs)
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.axhline(100 * target, color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        f"target\n{target:.1%}", (1, 100 * target), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", ha="left", va="center", fontsize=9, color="0.4",
    )  # fmt: skip
    for place, run in enumerate(runs):
        color = COLORS[place % len(COLORS)]
        rollouts = [point.rollouts for point in run.points]
        accuracies = [100 * point.accuracy for point in run.points]
        marker = MARKERS[place % len(MARKERS)]
        axes.plot(rollouts, accuracies, color=color, marker=marker, markersize=5, linewidth=2, label=run.method)
        reached = next(point for point in run.points if point.accuracy >= target)
        axes.plot(
            reached.rollouts, 100 * reached.accuracy, "o", markersize=13, markerfacecolor="none",
            markeredgecolor=color, markeredgewidth=1.6, zorder=3,
        )  # fmt: skip
    axes.set_xlabel("rollouts sampled")
    axes.set_ylabel("validation accuracy (%)")
    axes.set_title("Accuracy against rollouts sampled", loc="left", fontweight="bold")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(
    runs: Annotated[list[Path], typer.Argument(help="JSONL files of verl's file logger; the name is the method.")],
    out: Annotated[Path, typer.Option(help="Folder for comparison.json and comparison.png.")],
) -> None:
    """Compare runs by the rollouts they needed."""
    try:
        members = [read_run(path, method) for path, method in zip(runs, names(runs), strict=True)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    summary = summarize(members)
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(summary, indent=2))
    plot(members, out / "comparison.png")
    console = Console()
    console.print(to_table(summary))
    console.print(f"Plot: {out / 'comparison.png'}")


if __name__ == "__main__":
    typer.run(main)
