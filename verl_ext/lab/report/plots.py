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
from verl_ext.lab.report.runs import Run, RunGroup
from verl_ext.lab.report.summary import DECIDING, accuracy_against, deciding_share, destinations

UNITS = (("rollouts", "rollouts sampled"), ("tokens", "tokens sampled"), ("step", "step"), ("seconds", "wall clock"))
SIGNAL = (
    ("reward_mean", "groups/reward_mean", "Reward", "Mean over the groups trained, each with the same weight."),
    ("reward_spread", "groups/reward_std_mean", "Reward spread", "Standard deviation in a group, mean over groups."),
    ("effective_groups", "groups/effective_ratio", "Groups with a gradient",
     "Share of trained groups whose rewards differ."),
    ("effective_rollouts", "rollouts/effective_ratio", "Rollouts with a gradient",
     "Share of trained rollouts in groups whose rewards differ."),
)  # fmt: skip
DELAY = (
    ("delay_mean", "off_policy/delay_mean", "Off-policy delay, mean",
     "Policy versions between a rollout and its update."),
    ("delay_max", "off_policy/delay_max", "Off-policy delay, largest", "Delay of the oldest rollout in the batch."),
)  # fmt: skip


def plots(methods: Sequence[RunGroup], target: float | None) -> Iterator[Plot]:
    """The plots in their order on the page.

    Args:
        methods: runs by method; each method keeps its colour in all plots.
        target: accuracy in [0, 1], marked in the accuracy plots; None: no mark.
    """
    among = [method.name for method in methods]
    yield from _accuracy(methods, among, target)
    for name, metric, title, caption in SIGNAL:
        if any(found := _of_metric(methods, metric)):
            figure = plot.lines(found, "step", title.lower(), among=among)
            yield Plot(name, "What was trained on", title, caption, figure)
    yield from _rollouts(methods)
    yield from _difficulty(methods)
    section = "Off-policy delay and overhead"
    for name, metric, title, caption in DELAY:
        if any(found := _of_metric(methods, metric)):
            yield Plot(name, section, title, caption, plot.lines(found, "step", "policy versions", among=among))
    if any(found := _of_metric(methods, DECIDING)):
        caption = "Computation of the policy, in the driver."
        figure = plot.lines(found, "step", "milliseconds", among=among, scale=1000)
        yield Plot("deciding_seconds", section, "Time spent deciding", caption, figure)
    if any(found := _of_methods(methods, deciding_share)):
        caption = "Computation of the policy, as a share of the step."
        figure = plot.lines(found, "step", "share of the step (%)", among=among, scale=100)
        yield Plot("deciding_share", section, "Time spent deciding, share", caption, figure)


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
    if found := {method.name: parts for method in methods if "mean" in (parts := _parts(method, _allocation))}:
        caption = "Least, mean and most rollouts of a trained prompt; over all seeds."
        yield Plot("allocation", section, "Rollouts per prompt", caption, plot.ranges(found, "rollouts per prompt"))


def _difficulty(methods: Sequence[RunGroup]) -> Iterator[Plot]:
    for panel in recipe_panels():
        matching = partial(_matching, pattern=panel.pattern)
        if found := {method.name: parts for method in methods if (parts := _parts(method, matching))}:
            draw = plot.stacks if panel.stacked else plot.families
            colors = plot.ordered_colors(sorted(_keys(found), key=plot.hard_first))
            figure = draw(found, panel.unit, colors)
            yield Plot(panel.name, "What methods decide by difficulty", panel.title, panel.caption, figure)


def _of_methods(methods: Sequence[RunGroup], of_run: Callable[[Run], Series]) -> list[Curve | None]:
    """A curve per method, in the order of the methods; None for a method without the series."""
    return [over_seeds(method.name, [of_run(run) for run in method.runs]) for method in methods]


def _of_metric(methods: Sequence[RunGroup], metric: str) -> list[Curve | None]:
    return _of_methods(methods, lambda run: run.series(metric))


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


def _allocation(run: Run) -> dict[str, Series]:
    return {part: run.series(f"allocation/{part}") for part in ("min", "mean", "max")}


def _matching(run: Run, pattern: str) -> dict[str, Series]:
    names = {match[1]: match[0] for match in (re.fullmatch(pattern, name) for name in run.metrics()) if match}
    return {part: run.series(names[part]) for part in sorted(names, key=plot.hard_first)}


def _readable(found: list[Curve | None]) -> tuple[list[Curve | None], str]:
    """Curves over seconds, in a unit with numbers of readable size."""
    longest = max((float(curve.x.max()) for curve in found if curve), default=0.0)
    unit, seconds = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 300 else ("seconds", 1)
    scaled = [curve and replace(curve, x=curve.x / seconds) for curve in found]
    return scaled, f"wall clock ({unit})"


def _keys(found: dict[str, dict[str, Curve]]) -> list[str]:
    return list(dict.fromkeys(part for parts in found.values() for part in parts))
