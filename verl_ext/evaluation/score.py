"""pass@k, mean@k and maj@k of each data source: numbers, table and plot."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from verl_ext import checks
from verl_ext.evaluation.measures import majority_at_k, pass_at_k
from verl_ext.evaluation.samples import FAILED, Problem
from verl_ext.lab.table import Table, percent
from verl_ext.policy import NOISE

CORRECT_FROM = 1.0
"""Accuracy from which a sample is correct, unless the command says otherwise."""

RIGHT_ANSWER = object()
"""The vote that all correct samples with an answer share: the verifier has judged answers such as 1/2 and 0.5 equal."""


def parse_ks(text: str | None, fewest: Mapping[str, int]) -> dict[str, list[int]]:
    """The k to report for each data source, sorted.

    Args:
        text: numbers separated by commas or spaces; None: the powers of 2 up to n, and n.
        fewest: by data source, the number of samples n that each of its problems has. A k above n is left out; if no k
            is left, n itself is reported.

    Raises:
        InvalidValue: a k is not an integer in [1, the largest n].
    """
    if text is None:
        return {source: sorted({2**power for power in range(n.bit_length())} | {n}) for source, n in fewest.items()}
    words, most = text.replace(",", " ").split(), max(fewest.values())
    accepted = words and all(word.isdecimal() and 1 <= int(word) <= most for word in words)
    held = ", ".join(f"{n} samples in {source}" for source, n in fewest.items())
    checks.require(bool(accepted), "k", text, f"use integers in [1, {most}], such as '1,2'; a problem has {held}")
    ks = sorted({int(word) for word in words})
    return {source: [k for k in ks if k <= n] or [n] for source, n in fewest.items()}


def is_correct(problem: Problem, correct_from: float) -> np.ndarray:
    """(n,) bool of a problem's n samples; a failed rollout is never correct."""
    return np.array([sample is not FAILED and sample.accuracy >= correct_from - NOISE for sample in problem.samples])


def votes_of(problem: Problem, correct: np.ndarray) -> list[Hashable | None]:
    """(n,) votes in maj@k. Wrong answers are compared as texts, since no verifier says which of them are equal.

    Args:
        correct: of :func:`is_correct`.
    """
    return [
        RIGHT_ANSWER if right and sample.answer is not None else sample.answer
        for sample, right in zip(problem.samples, correct, strict=True)
    ]


def are_shares(problems: Sequence[Problem]) -> bool:
    """Whether the accuracies of all samples lie in [0, 1], so that their mean is an accuracy.

    A line without ``acc`` has its score as accuracy, and scores may lie outside [0, 1].
    """
    return all(-NOISE <= sample.accuracy <= 1 + NOISE for problem in problems for sample in problem.samples)


def accuracies_of(problems: Sequence[Problem], correct_from: float) -> list[np.ndarray]:
    """(n,) accuracy in [0, 1] of each problem's n samples.

    In a data source with an accuracy outside [0, 1], each sample counts as 1 if it is correct, and as 0 otherwise.
    """
    judged = {problem.data_source for problem in problems if not are_shares([problem])}
    return [
        is_correct(problem, correct_from).astype(float)
        if problem.data_source in judged
        else np.array([sample.accuracy for sample in problem.samples])
        for problem in problems
    ]


def summarize(problems: Sequence[Problem], ks: Sequence[int], correct_from: float, console: Console) -> dict[str, Any]:
    """The results for the problems of one data source, as JSON; problems have equal weight.

    Args:
        problems: at least one.
        ks: at least one, in [1, the smallest number of samples].
        correct_from: a sample is correct in pass@k and maj@k if its accuracy is at least this.
        console: for the progress of maj@k.

    Returns:
        ``problems``, ``samples`` (fewest and most of a problem), ``failed`` (rollouts), ``answered`` (share of samples
        with an answer), ``mean_of`` (what mean@k averages: accuracies or correct samples), ``mean@k``, ``pass@k`` by k,
        and ``maj@k`` by k (None without any answer). Each measure is (mean over problems, standard error over
        problems), the error None for a single problem.
    """
    n = np.array([len(problem.samples) for problem in problems])
    accuracies = accuracies_of(problems, correct_from)
    correct = [is_correct(problem, correct_from) for problem in problems]
    passed = pass_at_k(n[:, None], np.array([right.sum() for right in correct])[:, None], ks)
    answers = [votes_of(problem, right) for problem, right in zip(problems, correct, strict=True)]
    answered = sum(answer is not None for row in answers for answer in row)
    majority = None
    if answered:
        watched = track(list(zip(answers, correct, strict=True)), "maj@k", console=console, transient=True)
        votes = [[majority_at_k(row, right, k) for k in ks] for row, right in watched]
        majority = _by_k(ks, np.array(votes))
    return {
        "problems": len(problems),
        "samples": [int(n.min()), int(n.max())],
        "failed": sum(problem.failed for problem in problems),
        "answered": answered / int(n.sum()),
        "mean_of": "accuracies" if are_shares(problems) else "correct samples",
        "mean@k": _mean(np.array([accuracy.mean() for accuracy in accuracies])),
        "pass@k": _by_k(ks, passed),
        "maj@k": majority,
    }


def to_table(results: Mapping[str, Mapping[str, Any]], step: int) -> Table:
    """One row per data source and k, in percent."""
    rows = []
    for source, result in results.items():
        fewest, most = result["samples"]
        head = [source, str(result["problems"]), str(most) if fewest == most else f"{fewest} to {most}"]
        for k, passed in result["pass@k"].items():
            majority = _percent(result["maj@k"][k]) if result["maj@k"] else "no answers"
            rows.append([*head, k, _percent(result["mean@k"]), _percent(passed), majority])
            head = ["", "", ""]
    caption = "Mean over problems ± standard error; mean@k is the mean accuracy, the same for every k."
    if outside := [source for source, result in results.items() if result["mean_of"] == "correct samples"]:
        caption += f" Scores of {', '.join(outside)} lie outside 0 to 1; mean@k is the share of correct samples there."
    header = ("data source", "problems", "samples", "k", "mean@k", "pass@k", "maj@k")
    return Table(f"Step {step}", header, rows, caption, expendable=("samples", "problems"))


def plot(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """pass@k (solid) and maj@k (dashed) over k, with bands of one standard error; a color per data source."""
    from matplotlib.figure import Figure

    from verl_ext.lab.plot import COLORS, text

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, (source, result) in enumerate(results.items()):
        color = COLORS[place % len(COLORS)]
        for measure, line in (("pass@k", "-"), ("maj@k", "--")):
            if values := result[measure]:
                ks = [int(k) for k in values]
                mean, error = 100 * np.array([(value, deviation or 0.0) for value, deviation in values.values()]).T
                axes.plot(ks, mean, line, color=color, marker="o", markersize=4, label=text(f"{source}, {measure}"))
                axes.fill_between(ks, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="k, samples per problem", ylabel="problems (%)", ylim=(0, 102))
    axes.set_title("Solved by one of k samples, and by their majority", loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def _mean(values: np.ndarray) -> list[float | None]:
    """Mean over problems, (P,), and its standard error."""
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else None
    return [float(values.mean()), error]


def _by_k(ks: Sequence[int], values: np.ndarray) -> dict[str, list[float | None]]:
    return {str(k): _mean(column) for k, column in zip(ks, values.T, strict=True)}


def _percent(measure: Sequence[float | None]) -> str:
    mean, error = measure
    return percent(mean) if error is None else f"{100 * mean:.1f} ± {percent(error)}"
