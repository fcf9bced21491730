"""The report's plots. A plot is left out if no run logs its metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from verl_ext.lab import plot
from verl_ext.lab.method import recipe_panels
from verl_ext.lab.plot import Curve, Plot, Series, over_seeds
from verl_ext.lab.report.accuracy import accuracy_against
from verl_ext.lab.report.runs import Run, RunGroup
from verl_ext.lab.report.summary import DECIDING, deciding_share, destinations

UNITS = (("rollouts", "rollouts sampled"), ("tokens", "tokens sampled"), ("step", "step"), ("seconds", "wall clock"))
TRAINED, OVERHEAD = "The trained batches", "Off-policy delay and overhead"
SIGNAL = (
    ("reward_mean", TRAINED, "Reward", "Mean over the groups trained, each with the same weight.",
     "reward", "groups/reward_mean", 1),
    ("reward_spread", TRAINED, "Reward spread", "Standard deviation in a group, mean over groups.",
     "reward spread", "groups/reward_std_mean", 1),
    ("effective_groups", TRAINED, "Groups with a gradient", "Share of trained groups whose rewards differ.",
     "groups with a gradient", "groups/effective_ratio", 1),
    ("effective_rollouts", TRAINED, "Rollouts with a gradient",
     "Share of trained rollouts in groups whose rewards differ.",
     "rollouts with a gradient", "rollouts/effective_ratio", 1),
)  # fmt: skip
COSTS = (
    ("delay_mean", OVERHEAD, "Off-policy delay, mean", "Policy versions between a rollout and its update.",
     "policy versions", "off_policy/delay_mean", 1),
    ("delay_max", OVERHEAD, "Off-policy delay, largest", "Delay of the oldest rollout in the batch.",
     "policy versions", "off_policy/delay_max", 1),
    ("deciding_seconds", OVERHEAD, "Time spent deciding", "Computation of the policy, in the driver.",
     "milliseconds", DECIDING, 1000),
    ("deciding_share", OVERHEAD, "Time spent deciding, share", "Computation of the policy, as a share of the step.",
     "share of the step (%)", deciding_share, 100),
)  # fmt: skip
"""Plots over steps: name, section, title, caption, y axis, a metric or a series of a run, and its factor."""


def plots(methods: Sequence[RunGroup], target: float | None) -> Iterator[Plot]:
    """The plots in their order on the page.

    Args:
        methods: runs by method; each method keeps its colour in all plots.
        target: accuracy in [0, 1], marked in the accuracy plots; None: no mark.
    """
    among = [method.name for method in methods]
    yield from _accuracy(methods, among, target)
    yield from _lines(methods, among, SIGNAL)
    yield from _rollouts(methods)
    yield from _difficulty(methods)
    yield from _lines(methods, among, COSTS)


def _lines(methods: Sequence[RunGroup], among: list[str], wanted: Sequence[tuple]) -> Iterator[Plot]:
    for name, section, title, caption, y, values, scale in wanted:
        of_run = values if callable(values) else partial(Run.series, name=values)
        largest = name == "delay_max"
        of = np.max if largest else np.mean
        if any(found := _of_methods(methods, lambda run: plot.stretches(of_run(run), of))):  # noqa: B023
            caption = _of_stretches(caption, methods, "the largest values" if largest else "means")
            yield Plot(name, section, title, caption, plot.lines(found, "step", y, among=among, scale=scale))


def _accuracy(methods: Sequence[RunGroup], among: list[str], target: float | None) -> Iterator[Plot]:
    caption = "Mean over data sources. A ring marks the first point of a line at or above the target."
    for unit, label in UNITS:
        found = _of_methods(methods, partial(accuracy_against, unit=unit))
        if unit == "seconds":
            found, label = _readable(found)
            caption = "Time of training steps, without validations and without steps repeated by a resumed run."
        if any(found):
            figure = plot.lines(
                found, label, "validation accuracy (%)", among=among, target=target, scale=100, mark=True
            )
            title = f"Accuracy against {'steps' if unit == 'step' else label}"
            yield Plot(f"accuracy_{unit}", "Accuracy and its cost", title, caption, figure)


def _rollouts(methods: Sequence[RunGroup]) -> Iterator[Plot]:
    section = "Where rollouts went"
    if found := {method.name: parts for method in methods if (parts := _destinations(method))}:
        caption = "Rollouts trained, discarded (by reason) and failed up to each step, and buffered. Mean over seeds."
        figure = plot.stacks(found, "rollouts", plot.stack_colors(_keys(found)))
        yield Plot("destinations", section, "Trained, discarded, failed, buffered", caption, figure)
    if found := {method.name: {"mean": curve} for method in methods if (curve := _allocation(method))}:
        caption = "Mean rollouts of a trained prompt, and the range from the least to the most; over all seeds."
        caption = _of_stretches(caption, methods, "means, and the range as the least and the most,")
        figure = plot.families(found, "rollouts per prompt", {"mean": plot.COLORS[0]})
        yield Plot("allocation", section, "Rollouts per prompt", caption, figure)


def _difficulty(methods: Sequence[RunGroup]) -> Iterator[Plot]:
    for panel in recipe_panels():
        matching = partial(_matching, pattern=panel.pattern)
        if found := {method.name: parts for method in methods if (parts := _parts(method, matching))}:
            draw = plot.stacks if panel.stacked else plot.families
            colors = plot.ordered_colors(sorted(_keys(found), key=plot.hard_first))
            figure = draw(found, panel.unit, colors)
            caption = _of_stretches(panel.caption, methods)
            yield Plot(panel.name, "Decisions by difficulty", panel.title, caption, figure)


def _of_stretches(caption: str, methods: Sequence[RunGroup], shown: str = "means") -> str:
    """The caption, and a sentence on stretches if a run has enough steps."""
    if not any(len(run.steps) > plot.POINTS for method in methods for run in method.runs):
        return caption
    return f"{caption} A run of more than {plot.POINTS} steps is shown as {shown} of {plot.POINTS} equal stretches."


def _of_methods(methods: Sequence[RunGroup], of_run: Callable[[Run], Series]) -> list[Curve | None]:
    """A curve per method, in the order of the methods; None for a method without the series."""
    return [over_seeds(method.name, [of_run(run) for run in method.runs]) for method in methods]


def _parts(method: RunGroup, of_run: Callable[[Run], dict[str, Series]]) -> dict[str, Curve]:
    return _over_seeds(method.name, [of_run(run) for run in method.runs])


def _over_seeds(name: str, seeds: list[dict[str, Series]]) -> dict[str, Curve]:
    """A curve per part, over the seeds with this part; parts in the order of their first occurrence."""
    keys = dict.fromkeys(key for parts in seeds for key in parts)
    found = {key: over_seeds(name, [parts[key] for parts in seeds if key in parts]) for key in keys}
    return {key: curve for key, curve in found.items() if curve is not None}


def _destinations(method: RunGroup) -> dict[str, Curve]:
    """Parts of the rollouts, from the bottom of the stack; a seed without a part counts 0 there."""
    seeds = [(np.array(run.steps, dtype=np.float64), destinations(run)) for run in method.runs]
    seeds = [(steps, parts) for steps, parts in seeds if parts]
    some = {part for _, parts in seeds for part, counts in parts.items() if counts.any()}
    order = sorted(some, key=lambda part: ({"trained": 0, "failed": 2, "buffered": 3}.get(part, 1), part))
    return _over_seeds(
        method.name,
        [{part: (steps, parts.get(part, np.zeros_like(steps))) for part in order} for steps, parts in seeds],
    )


def _allocation(method: RunGroup) -> Curve | None:
    """Rollouts per prompt: the mean, with the least and the most of any seed as its band."""
    curves = _parts(method, _extent)
    if "mean" not in curves or not {"min", "max"} <= set(curves):
        return curves.get("mean")
    mean, least, most = curves["mean"], curves["min"], curves["max"]
    return replace(mean, low=np.interp(mean.x, least.x, least.low), high=np.interp(mean.x, most.x, most.high))


def _extent(run: Run) -> dict[str, Series]:
    parts = {"min": np.min, "mean": np.mean, "max": np.max}
    return {part: plot.stretches(run.series(f"allocation/{part}"), of) for part, of in parts.items()}


def _matching(run: Run, pattern: str) -> dict[str, Series]:
    names = {match[1]: match[0] for match in (re.fullmatch(pattern, name) for name in run.metrics()) if match}
    return {part: plot.stretches(run.series(names[part])) for part in sorted(names, key=plot.hard_first)}


def _readable(found: list[Curve | None]) -> tuple[list[Curve | None], str]:
    """Curves over seconds, in a unit with numbers of readable size."""
    longest = max((float(curve.x.max()) for curve in found if curve), default=0.0)
    unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 300 else ("seconds", 1)
    scaled = [curve and replace(curve, x=curve.x / seconds) for curve in found]
    return scaled, f"wall clock ({unit})"


def _keys(found: dict[str, dict[str, Curve]]) -> list[str]:
    return list(dict.fromkeys(part for parts in found.values() for part in parts))
