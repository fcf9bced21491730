"""What an evaluation found: numbers, table and curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from verl_ext.evaluation.benchmark import Problem
from verl_ext.evaluation.estimators import mean_at_k, pass_at_k
from verl_ext.evaluation.majority import majority_at_k
from verl_ext.evaluation.samples import Sample

# The error of a benchmark's mean is smaller by the square root of its problems.
DRAWS = 1024
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def summarize(
    problems: Mapping[str, Problem],
    found: Mapping[str, Mapping[int, Sample]],
    n: int,
    ks: Sequence[int],
    correct_from: float,
    console: Console,
) -> dict[str, dict[str, Any]]:
    """Per benchmark, as plain JSON values; each is a mean over problems, all with the same weight.

    ``mean@k`` is the mean accuracy, the same for every k; ``pass@k`` and ``maj@k`` map k to a probability and take a
    sample for correct whose accuracy is at least ``correct_from``. ``maj@k`` is None where no response has an answer;
    ``maj@k_standard_error`` is that of the Monte Carlo, 0 where all is exact. ``answered`` and ``cut`` are the shares
    of responses that have an answer and that ended at the token limit, ``tokens`` the mean length.
    """
    members: dict[str, list[list[Sample]]] = {}
    for key, problem in problems.items():
        members.setdefault(problem.benchmark, []).append([found[key][number] for number in range(n)])
    return {name: _benchmark(name, group, ks, correct_from, console) for name, group in members.items()}


def _benchmark(
    name: str, group: Sequence[Sequence[Sample]], ks: Sequence[int], correct_from: float, console: Console
) -> dict[str, Any]:
    n = len(group[0])
    accuracy = np.array([[sample.accuracy for sample in samples] for samples in group])
    correct = accuracy >= correct_from
    passed = pass_at_k(n, correct.sum(axis=1)[:, None], list(ks)).mean(axis=0)
    answers = [[sample.answer for sample in samples] for samples in group]
    answered = np.mean([[answer is not None for answer in row] for row in answers])
    majority = majority_error = None
    if answered:
        rows = list(zip(answers, correct, strict=True))
        watched = track(rows, f"maj@k {escape(name)}", console=console, transient=True)
        found = [[majority_at_k(row, right, k, draws=DRAWS) for k in ks] for row, right in watched]
        probability, error = np.moveaxis(np.array(found), -1, 0)
        majority = _by_k(ks, probability.mean(axis=0))
        majority_error = _by_k(ks, np.sqrt((error**2).sum(axis=0)) / len(group))
    return {
        "problems": len(group),
        "mean@k": float(mean_at_k(accuracy).mean()),
        "pass@k": _by_k(ks, passed),
        "maj@k": majority,
        "maj@k_standard_error": majority_error,
        "answered": float(answered),
        "cut": float(np.mean([[sample.cut for sample in samples] for samples in group])),
        "tokens": float(np.mean([[sample.tokens for sample in samples] for samples in group])),
    }


def _by_k(ks: Sequence[int], values: np.ndarray) -> dict[str, float]:
    return {str(k): float(value) for k, value in zip(ks, values, strict=True)}


def to_table(benchmarks: Mapping[str, Mapping[str, Any]], n: int) -> Table:
    """One row per benchmark and k."""
    table = Table(title=f"{n} samples per problem", caption="mean@k: mean accuracy, the same for every k")
    table.add_column("benchmark", overflow="fold")
    for header in ("problems", "k", "mean@k", "pass@k", "maj@k"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, result in benchmarks.items():
        for place, (k, passed) in enumerate(result["pass@k"].items()):
            majority = f"{result['maj@k'][k]:.1%}" if result["maj@k"] else "no answers"
            head = ("", "") if place else (escape(name), str(result["problems"]))
            table.add_row(*head, k, f"{result['mean@k']:.1%}", f"{passed:.1%}", majority)
        table.add_section()
    return table


def plot(benchmarks: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """pass@k over k on a log2 axis, solid; maj@k dashed; one color per benchmark."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for place, (name, result) in enumerate(benchmarks.items()):
        color = COLORS[place % len(COLORS)]
        for measure, line in (("pass@k", "-"), ("maj@k", "--")):
            values = result[measure]
            if values:
                ks = [int(k) for k in values]
                percent = [100 * value for value in values.values()]
                axes.plot(ks, percent, line, color=color, marker="o", markersize=4, label=f"{name}, {measure}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("k, samples per problem")
    axes.set_ylabel("problems (%)")
    axes.set_ylim(0, 102)
    axes.set_title("Solved by one of k samples, and by their majority", loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)
    plt.close(figure)
