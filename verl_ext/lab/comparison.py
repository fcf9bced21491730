"""Cost and accuracy of the methods that a command of the lab has run, over seeds."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from verl_ext.lab.report.accuracy import (
    NO_GAIN,
    ROLLOUTS,
    SECONDS,
    accuracy_against,
    common_target,
    first_at,
    points,
    without_gain,
)
from verl_ext.lab.report.runs import Run
from verl_ext.lab.report.summary import destinations, groups_per_1000, how_read, listed, with_gradient
from verl_ext.lab.report.tables import GROUPS_PER_1000
from verl_ext.lab.table import NOTHING, Table, mean_times_fewer, number

Values = list[float | None]

# The argument of a command that compares methods.
Methods = Annotated[
    list[str],
    typer.Argument(
        metavar="METHOD",
        help="Recipes, or .yaml files with a rollout_policy; the first is the reference of the comparison. "
        'Overrides follow in quotes: "grpo n=16". A key without dots is a key of rollout_policy; other keys are '
        'written in full. A name may come first: "mine:grpo n=16".',
    ),
]


@dataclass(frozen=True)
class LabRun(Run):
    """A run of the lab; its metrics have their names in training.

    Step 0 of a run that learns is the validation before training. A simulated run has no records if its first step
    cannot be completed.

    Attributes:
        duration: seconds that the run took.
        ended: error behind an early end; None if the run reached its end.
    """

    duration: float = 0.0
    ended: str | None = None

    @property
    def rollouts(self) -> int:
        """Rollouts sampled in the whole run."""
        return int(self.last(ROLLOUTS) or 0)


@dataclass(frozen=True)
class MethodCost:
    """The runs of a method with different seeds. Lists have an entry for each run, None if the run lacks the number.

    Attributes:
        name: of the method.
        runs: one per seed.
        target: accuracy to reach, in [0, 1]; None: the runs have no accuracy.
    """

    name: str
    runs: Sequence[LabRun]
    target: float | None = None

    def to_target(self, unit: str) -> Values:
        """Cost up to the first validation at or above the target: the field ``unit`` of the validation's Point."""
        reached = (first_at(run, self.target) for run in self.runs)
        costs = (None if point is None else getattr(point, unit) for point in reached)
        return [None if cost is None else float(cost) for cost in costs]

    def accuracy(self) -> Values:
        """Accuracy of the best validation."""
        return [float(accuracy_against(run, "step")[1].max()) for run in self.runs]

    def average(self, metric: str) -> Values:
        """Mean of a metric; steps without the metric do not count."""
        values = (run.series(metric)[1] for run in self.runs)
        return [float(each.mean()) if each.size else None for each in values]

    def with_gradient(self) -> Values:
        """Share of all sampled rollouts that were trained on in a group with different rewards."""
        return [with_gradient(run) / run.rollouts if run.rollouts else None for run in self.runs]

    def groups_per_1000(self) -> Values:
        """Trained groups with a gradient per 1,000 rollouts, up to the target or the end of a run that misses it."""
        reached = (first_at(run, self.target) if run.records else None for run in self.runs)
        return [
            groups_per_1000(run, point.step if point else math.inf)
            for run, point in zip(self.runs, reached, strict=True)
        ]

    def waste(self) -> dict[str, Values]:
        """By reason, share of all sampled rollouts not trained on; rollouts left in buffers are included."""
        ends = [{part: counts[-1] for part, counts in destinations(run).items()} for run in self.runs]
        return {
            reason: [end.get(reason, 0.0) / run.rollouts if run.rollouts else None
                     for end, run in zip(ends, self.runs, strict=True)]
            for reason in dict.fromkeys(reason for end in ends for reason in end if reason != "trained")
        }  # fmt: skip

    def ended(self) -> list[str]:
        """Errors behind runs that ended early, each once."""
        return list(dict.fromkeys(run.ended for run in self.runs if run.ended is not None))


def compare(runs: Mapping[str, Sequence[LabRun]], target: float | None = None) -> tuple[float, list[MethodCost]]:
    """The target accuracy, and each method's cost of reaching it.

    Args:
        runs: by method, one run per seed.
        target: accuracy in [0, 1]; None: that of :func:`~verl_ext.lab.report.accuracy.common_target`.
    """
    if target is None:
        target = common_target([run for seeds in runs.values() for run in seeds]) or 0.0
    return target, [MethodCost(name, seeds, target) for name, seeds in runs.items()]


def print_comparison(cost: Table, costs: Sequence[MethodCost], out: Path, console: Console) -> None:
    """Print what each method cost, where its rollouts went, which runs ended early, and how to plot the logs.

    Args:
        cost: :func:`cost_table`, or :func:`step_table` for runs without an accuracy.
        costs: of every method.
        out: folder with the logs of the runs.
        console: where to print.
    """
    console.print(cost)
    console.print(waste_table(costs))
    for each in costs:
        for reason in each.ended():
            console.print(Text(f"{each.name} ended early: {reason}"))
    everything = [run for each in costs for run in each.runs]
    if stuck := without_gain((run.name, points(run)) for run in everything if run.records):
        console.print(Text(f"{NO_GAIN}: {', '.join(stuck)}."))
    for note in listed(how_read(everything)):
        console.print(Text(note))
    rollouts, seconds = sum(run.rollouts for run in everything), sum(run.duration for run in everything)
    # In the order of the methods, since a report's first run is its reference.
    logs = " ".join(_logs(each, out) for each in costs if any(run.records for run in each.runs))
    ending = f"{rollouts:,} rollouts in {seconds:.0f} s. Plots: verl-ext report {logs}"
    console.print(Text(ending), soft_wrap=True)  # a line break would cut the command in two


def _logs(cost: MethodCost, out: Path) -> str:
    """The logs of a method's runs, for a shell: ``<method>_{0,1,2}.jsonl``. Runs without a step have no log.

    A pattern such as ``<method>_*.jsonl`` would also find runs of earlier commands.
    """
    seeds = [run.name.removeprefix(f"{cost.name}_") for run in cost.runs if run.records]
    listed = f"{{{','.join(seeds)}}}" if len(seeds) > 1 else seeds[0]
    return f"{shlex.quote(str(out / cost.name))}_{listed}.jsonl"


def mean(values: Values) -> float | None:
    """Mean over the seeds; None if a seed lacks the number, since the mean of the others would flatter the method."""
    return None if not values or None in values else float(np.mean(values))


def spread(values: Values, form: str = ",.0f", scale: float = 1.0, unit: str = "") -> str:
    """``mean ± standard deviation`` over seeds, times ``scale``; a dash if a seed lacks the number."""
    middle = mean(values)
    if middle is None:
        found = sum(value is not None for value in values)
        return f"{NOTHING} ({found} of {len(values)})" if found else NOTHING
    deviation = f" ± {np.std(values, ddof=1) * scale:{form}}" if len(values) > 1 else ""
    return f"{middle * scale:{form}}{deviation}{unit}"


def cost_table(target: float, costs: Sequence[MethodCost]) -> Table:
    """Cost of reaching the target accuracy; the first method is the reference for "times fewer".

    All methods have run with the same seeds, in the same order.
    """
    reference = costs[0].to_target("rollouts")
    rows = [
        (
            cost.name,
            spread(cost.to_target("rollouts")),
            number(mean_times_fewer(reference, cost.to_target("rollouts"))),
            spread(cost.groups_per_1000(), ".1f"),
            spread(cost.to_target("tokens")),
            spread(cost.to_target("seconds"), ".1f"),
            spread(cost.to_target("step")),
            spread(cost.accuracy(), ".1f", 100, " %"),
        )
        for cost in costs
    ]
    title = f"To a held-out accuracy of {target:.1%}; mean ± standard deviation of {len(costs[0].runs)} seeds"
    header = ("method", "rollouts", "times fewer", "groups per 1,000", "tokens", "seconds", "steps", "best accuracy")
    caption = (
        "Times fewer: the first method's rollouts divided by the row's; geometric mean over the seeds' ratios. "
        f"{GROUPS_PER_1000} up to the target, or of the whole run if it misses it."
    )
    return Table(title, header, rows, caption, expendable=("steps", "seconds", "tokens"))


def step_table(costs: Sequence[MethodCost]) -> Table:
    """Cost of a training step, on average over whole runs; the first method is the reference for "times longer".

    The methods have no target, so the groups with a gradient are those of whole runs, too.
    """
    reference = costs[0].average(SECONDS)
    rows = [
        (
            cost.name,
            spread(cost.average("rollouts/sampled")),
            spread(cost.average("tokens/sampled"), ".2f", 1e-6),
            spread(cost.average(SECONDS), ".0f"),
            number(mean_times_fewer(cost.average(SECONDS), reference)),  # the row's seconds / the reference's
            spread(cost.average("timing_s/gen"), ".0f"),
            spread(cost.with_gradient(), ".1f", 100, " %"),
            spread(cost.groups_per_1000(), ".1f"),
        )
        for cost in costs
    ]
    title = f"A training step; mean ± standard deviation of {len(costs[0].runs)} seeds"
    header = ("method", "rollouts", "tokens, M", "seconds", "times longer", "generation, s", "sampled with a gradient",
              "groups per 1,000")  # fmt: skip
    return Table(
        title,
        header,
        rows,
        "Times longer: the row's seconds divided by the first method's; geometric mean over the seeds' ratios. "
        f"{GROUPS_PER_1000} of the whole run.",
        expendable=("generation, s", "times longer", "tokens, M"),
    )


def waste_table(costs: Sequence[MethodCost]) -> Table:
    """Signal of the trained batches, and rollouts not trained on, over whole runs."""

    def reasons(cost: MethodCost) -> str:
        shares = {reason.removeprefix("discarded: "): mean(values) for reason, values in cost.waste().items()}
        return ", ".join(f"{reason} {share:.0%}" for reason, share in shares.items() if share and share >= 0.005)

    rows = [
        (
            cost.name,
            spread(cost.average("groups/effective_ratio"), ".1f", 100, " %"),
            spread(cost.average("rollouts/effective_ratio"), ".1f", 100, " %"),
            spread(cost.average("off_policy/delay_mean"), ".2f"),
            reasons(cost) or NOTHING,
        )
        for cost in costs
    ]
    title = "Signal of the batches, and rollouts not trained on, by reason"
    header = ("method", "groups with a gradient", "rollouts", "delay", "not trained")
    return Table(title, header, rows, expendable=("delay", "rollouts"))
