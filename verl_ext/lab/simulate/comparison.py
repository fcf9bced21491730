"""Cost and accuracy of simulated methods, over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_ext.lab.report.runs import Run
from verl_ext.lab.report.summary import accuracy_against, common_target, destinations, first_at
from verl_ext.lab.simulate.run import SimulatedRun
from verl_ext.lab.table import NOTHING, Table, number, times_fewer

Values = list[float | None]


@dataclass(frozen=True)
class MethodCost:
    """One method's runs; each list has an entry per seed, None if the run lacks the number.

    Attributes:
        name: of the method.
        rollouts, tokens, seconds, steps: spent up to the first validation at or above the target; None: not reached.
        accuracy: best validation.
        effective_groups, effective_rollouts: share of trained groups, and rollouts, with a gradient; mean over steps.
        delay: policy versions between a rollout and its update; mean over steps.
        rollouts_per_step: rollouts sampled; mean over steps.
        waste: by reason, share of all sampled rollouts not trained on; rollouts left in buffers are included.
        ended: errors behind runs that ended early, each once.
    """

    name: str
    rollouts: Values
    tokens: Values
    seconds: Values
    steps: Values
    accuracy: Values
    effective_groups: Values
    effective_rollouts: Values
    delay: Values
    rollouts_per_step: Values
    waste: dict[str, Values]
    ended: tuple[str, ...]


def as_run(name: str, seed: int, simulated: SimulatedRun) -> Run:
    """The simulated run as the report reads a training run."""
    return Run(f"{name}_{seed}", tuple(simulated.records), tuple(simulated.records.values()))


def compare(runs: dict[str, list[SimulatedRun]], target: float | None = None) -> tuple[float, list[MethodCost]]:
    """The target accuracy, and each method's cost of reaching it.

    Args:
        runs: by method, one run per seed.
        target: accuracy in [0, 1]; None: the best accuracy reached by every run.
    """
    as_runs = {name: [as_run(name, seed, run) for seed, run in enumerate(seeds)] for name, seeds in runs.items()}
    if target is None:
        target = common_target([run for seeds in as_runs.values() for run in seeds]) or 0.0
    return target, [_cost(name, as_runs[name], seeds, target) for name, seeds in runs.items()]


def _cost(name: str, runs: Sequence[Run], simulated: Sequence[SimulatedRun], target: float) -> MethodCost:
    reached = [first_at(run, target) for run in runs]
    reasons = list(dict.fromkeys(reason for run in runs for reason in destinations(run) if reason != "trained"))
    return MethodCost(
        name,
        rollouts=[None if point is None else point.rollouts for point in reached],
        tokens=[None if point is None else point.tokens for point in reached],
        seconds=[None if point is None else point.seconds for point in reached],
        steps=[None if point is None else float(point.step) for point in reached],
        accuracy=[float(accuracy_against(run, "step")[1].max()) for run in runs],
        effective_groups=_means(runs, "groups/effective_ratio"),
        effective_rollouts=_means(runs, "rollouts/effective_ratio"),
        delay=_means(runs, "off_policy/delay_mean"),
        rollouts_per_step=_means(runs, "rollouts/sampled"),
        waste={reason: [_share(run, reason) for run in runs] for reason in reasons},
        ended=tuple(dict.fromkeys(run.ended for run in simulated if run.ended is not None)),
    )


def _means(runs: Sequence[Run], metric: str) -> Values:
    series = [run.series(metric)[1] for run in runs]
    return [float(values.mean()) if values.size else None for values in series]


def _share(run: Run, reason: str) -> float | None:
    sampled = run.last("rollouts/sampled_total")
    counts = destinations(run).get(reason)
    return None if not sampled else 0.0 if counts is None else float(counts[-1]) / sampled


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
    """Cost of reaching the target accuracy; the first method is the reference for "times fewer"."""
    seeds = len(costs[0].rollouts)
    reference = mean(costs[0].rollouts)
    rows = [
        (
            cost.name,
            spread(cost.rollouts),
            number(times_fewer(reference, mean(cost.rollouts))),
            spread(cost.tokens, ".1f", 1e-6),
            spread(cost.seconds, ".2f", 1 / 3600),
            spread(cost.steps),
            spread(cost.accuracy, ".1f", 100, " %"),
        )
        for cost in costs
    ]
    title = f"To a held-out accuracy of {target:.1%}; mean ± standard deviation of {seeds} seeds"
    header = ("method", "rollouts", "times fewer", "tokens, M", "hours", "steps", "best accuracy")
    return Table(title, header, rows, expendable=("steps", "hours", "tokens, M"))


def waste_table(costs: Sequence[MethodCost]) -> Table:
    """Signal of the trained batches, and rollouts not trained on, over whole runs."""
    rows = []
    for cost in costs:
        shares = {reason.removeprefix("discarded: "): mean(values) for reason, values in cost.waste.items()}
        rows.append(
            (
                cost.name,
                spread(cost.effective_groups, ".1f", 100, " %"),
                spread(cost.effective_rollouts, ".1f", 100, " %"),
                spread(cost.delay, ".2f"),
                ", ".join(f"{reason} {share:.0%}" for reason, share in shares.items() if share and share >= 0.005)
                or NOTHING,
            )
        )
    title = "Signal of the batches, and rollouts not trained on, by reason"
    header = ("method", "groups with a gradient", "rollouts", "delay", "not trained")
    return Table(title, header, rows, expendable=("delay", "rollouts"))
