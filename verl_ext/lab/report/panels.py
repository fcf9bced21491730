"""Which plots there are. One is left out where no run logs its metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from verl_ext.lab.report import curves, plots
from verl_ext.lab.report.curves import Curve
from verl_ext.lab.report.methods import Method
from verl_ext.lab.report.runs import Run, Series
from verl_ext.lab.report.summary import DECIDING, accuracy_against, deciding_share, destinations


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        name: of its file, without ending.
        section: the heading that it is under.
        caption: what is seen, in a sentence; Markdown-free.
    """

    name: str
    section: str
    title: str
    caption: str
    figure: Figure


UNITS = (("rollouts", "rollouts sampled"), ("tokens", "tokens sampled"), ("step", "step"), ("seconds", "wall clock"))
SIGNAL = (
    ("reward_mean", "groups/reward_mean", "Reward", "Mean over the groups trained, each with the same weight."),
    ("reward_spread", "groups/reward_std_mean", "Reward spread", "Standard deviation in a group, mean over groups."),
    ("effective_groups", "groups/effective_ratio", "Groups with a gradient",
     "Share of trained groups whose rewards differ."),
    ("effective_rollouts", "rollouts/effective_ratio", "Rollouts with a gradient",
     "Share of trained rollouts whose group has rewards that differ."),
)  # fmt: skip
LEVELS = ("extremely_hard", "hard", "medium", "easy", "extremely_easy")
DIFFICULTY = (
    ("hora_shares", r"hora/share_of_rollouts_(c\d+)", "HORA: who gets the second wave",
     "Share of its rollouts by successes of the first wave, c.", "share of rollouts", False),
    ("knapsack_statuses", r"knapsack/status_(\w+)", "Knapsack: prompts by status", "Prompts seen so far, stacked.",
     "prompts", True),
    ("prefix_ratios", r"prefix_sampling/ratio_(k\d+)", "Prefix Sampling: prefix ratio",
     "Part of a trajectory that is replayed, by pass count of the parent, k.", "prefix ratio", False),
    ("prefix_pass_rates", r"prefix_sampling/pass_rate_ema_(k\d+)", "Prefix Sampling: pass rate of re-rollouts",
     "Moving average by pass count of the parent, k.", "pass rate", False),
)  # fmt: skip


def panels(methods: list[Method], target: float | None) -> Iterator[Panel]:
    """The plots in their order on the page."""
    yield from _accuracy(methods, target)
    yield from _signal(methods)
    yield from _rollouts(methods)
    yield from _difficulty(methods)
    yield from _cost(methods)


def _accuracy(methods: list[Method], target: float | None) -> Iterator[Panel]:
    caption = "Mean over data sources. A ring: where a line first is at the target."
    for unit, label in UNITS:
        found = curves.of_methods(methods, lambda run, unit=unit: accuracy_against(run, unit))
        if unit == "seconds":
            found, label = _readable(found)
            caption = "Time of training steps, without validation; what a resumed run did in vain is not counted."
        if any(found):
            figure = plots.lines(found, label, "validation accuracy (%)", target=target, scale=100, mark=True)
            title = f"Accuracy against {'steps' if unit == 'step' else label}"
            yield Panel(f"accuracy_{unit}", "Accuracy, and what it cost", title, caption, figure)


def _signal(methods: list[Method]) -> Iterator[Panel]:
    for name, metric, title, caption in SIGNAL:
        found = curves.of_methods(methods, lambda run, metric=metric: run.series(metric))
        if any(found):
            yield Panel(name, "What was trained on", title, caption, plots.lines(found, "step", title.lower()))


def _rollouts(methods: list[Method]) -> Iterator[Panel]:
    section = "Where rollouts went"
    found = {method.name: _destinations(method) for method in methods}
    found = {method: parts for method, parts in found.items() if parts}
    if found:
        caption = "Rollouts up to each step by what became of them; buffered ones wait. Mean over seeds."
        figure = plots.stacks(found, "rollouts", plots.stack_colors(_keys(found)))
        yield Panel("destinations", section, "Trained, discarded, failed, buffered", caption, figure)
    found = {method.name: _parts(method, _allocation) for method in methods}
    found = {method: parts for method, parts in found.items() if "mean" in parts}
    if found:
        caption = "Least, mean and most rollouts of a trained prompt; over all seeds."
        yield Panel("allocation", section, "Rollouts per prompt", caption, plots.ranges(found, "rollouts per prompt"))


def _difficulty(methods: list[Method]) -> Iterator[Panel]:
    for name, pattern, title, caption, y, stacked in DIFFICULTY:
        found = {method.name: _parts(method, partial(_matching, pattern=pattern)) for method in methods}
        found = {method: parts for method, parts in found.items() if parts}
        if found:
            draw = plots.stacks if stacked else plots.families
            colors = plots.ordered_colors(sorted(_keys(found), key=_rank))
            yield Panel(name, "What methods decide by difficulty", title, caption, draw(found, y, colors))


def _cost(methods: list[Method]) -> Iterator[Panel]:
    section = "Off-policy delay and overhead"
    for name, metric, title, caption in (
        ("delay_mean", "off_policy/delay_mean", "Off-policy delay, mean",
         "Policy versions from a rollout to its update."),
        ("delay_max", "off_policy/delay_max", "Off-policy delay, largest", "Of the oldest rollout in the batch."),
    ):  # fmt: skip
        found = curves.of_methods(methods, lambda run, metric=metric: run.series(metric))
        if any(found):
            yield Panel(name, section, title, caption, plots.lines(found, "step", "policy versions"))
    found = curves.of_methods(methods, lambda run: run.series(DECIDING))
    if any(found):
        caption = "What the policy takes to decide, on the driver."
        figure = plots.lines(found, "step", "milliseconds", scale=1000)
        yield Panel("deciding_seconds", section, "Time spent deciding", caption, figure)
    found = curves.of_methods(methods, deciding_share)
    if any(found):
        caption = "The same, as a share of the step."
        figure = plots.lines(found, "step", "share of the step (%)", scale=100)
        yield Panel("deciding_share", section, "Time spent deciding, share", caption, figure)


def _readable(found: list[Curve | None]) -> tuple[list[Curve | None], str]:
    """Seconds in the unit that gives numbers a reader has a feeling for."""
    longest = max((float(curve.x.max()) for curve in found if curve), default=0.0)
    unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 300 else ("seconds", 1)
    scaled = [curve and replace(curve, x=curve.x / seconds) for curve in found]
    return scaled, f"wall clock ({unit})"


def _parts(method: Method, of_run: Callable[[Run], dict[str, Series]]) -> dict[str, Curve]:
    return curves.parts_over_seeds(method.name, [of_run(run) for run in method.runs])


def _destinations(method: Method) -> dict[str, Curve]:
    """What any seed has of it; a seed in which nothing was discarded for a reason counts 0 there."""
    seeds = [(np.array(run.steps, dtype=np.float64), destinations(run)) for run in method.runs]
    seeds = [(steps, parts) for steps, parts in seeds if parts]
    some = {part for _, parts in seeds for part, counts in parts.items() if counts.any()}
    order = plots.in_stack(some)
    return curves.parts_over_seeds(
        method.name,
        [{part: (steps, parts.get(part, np.zeros_like(steps))) for part in order} for steps, parts in seeds],
    )


def _allocation(run: Run) -> dict[str, Series]:
    return {part: run.series(f"allocation/{part}") for part in ("min", "mean", "max")}


def _matching(run: Run, pattern: str) -> dict[str, Series]:
    names = {match[1]: match[0] for match in (re.fullmatch(pattern, name) for name in run.metrics()) if match}
    return {part: run.series(names[part]) for part in sorted(names, key=_rank)}


def _rank(part: str) -> tuple[int, int | str]:
    """Hard before easy; c2 and k2 before c10 and k10."""
    if part in LEVELS:
        return 0, LEVELS.index(part)
    digits = re.search(r"\d+$", part)
    return (1, int(digits[0])) if digits else (2, part)


def _keys(found: dict[str, dict[str, Curve]]) -> list[str]:
    return list(dict.fromkeys(part for parts in found.values() for part in parts))
