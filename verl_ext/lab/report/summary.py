"""The report's numbers: costs to the target, where rollouts went, and time spent deciding."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from verl_ext.lab.plot import Series
from verl_ext.lab.report.accuracy import (
    NO_GAIN,
    ROLLOUTS,
    SECONDS,
    TOKENS,
    Point,
    begins_late,
    common_target,
    first_at,
    is_partial,
    on_common_sources,
    points,
    rollouts_between,
    samples_of,
    sources_by_reward,
    sources_of,
    validated_every,
    with_accuracies,
    without_gain,
)
from verl_ext.lab.report.ratio import paired
from verl_ext.lab.report.runs import Run, as_series, by_method, seed_of
from verl_ext.lab.table import mean_times_fewer, times_fewer

TRAINED, SIGNAL = "rollouts/trained", "rollouts/effective_ratio"
GROUPS, GROUP_SIGNAL, SAMPLED = "groups/trained", "groups/effective_ratio", "rollouts/sampled"
DECIDING = "allocation/seconds"
DISCARDED = re.compile(r"rollouts/discarded_(.+)_total")
ALIKE = 1.5
"""Largest ratio of the rollouts between two validations of runs that are validated equally often."""
RULE = "Costs to the target are those up to the first validation at or above it."
EMPTY = "Files without a step, left out, such as those of a start that died before its first step"
NO_LOG = "Files of a folder left out, since they hold no step of verl's file logger"
REPLACED = (
    "Records dropped, since a record behind them has the same or an earlier step, as in a resumed run (in "
    "a.jsonl+b.jsonl, a is the older file)"
)
UNTRAINED = "Runs left out, since they have not trained a step yet"
COMMON = (
    "The target is the best accuracy that every run with a validation reached, except runs that were never better than "
    "before their first step."
)


def trained(runs: Sequence[Run]) -> list[Run]:
    """The runs that have trained a step; all runs if none has.

    A run with only the validation before its first step would cut the mean of its seeds to one point.
    """
    return [run for run in runs if run.steps[-1] > 0] or list(runs)


def destinations(run: Run) -> dict[str, np.ndarray]:
    """(steps,) rollouts trained, discarded (by reason) and failed up to each step, and buffered at that step.

    The parts add up to the rollouts sampled. Empty if the run does not log them.
    """
    logged = run.metrics()
    reasons = sorted(match[1] for match in map(DISCARDED.fullmatch, logged) if match)
    parts = {"trained": "rollouts/trained_total"}
    parts |= {f"discarded: {reason}": f"rollouts/discarded_{reason}_total" for reason in reasons}
    parts |= {"failed": "rollouts/failed_total", "buffered": "rollouts/buffered"}
    return {part: run.level(name) for part, name in parts.items() if name in logged}


def with_gradient(run: Run) -> float:
    """Rollouts of the whole run that were trained on in a group with different rewards."""
    return sum(record[SIGNAL] * record[TRAINED] for record in run.records.values() if {SIGNAL, TRAINED} <= set(record))


def groups_per_1000(run: Run, until: float = math.inf) -> float | None:
    """Trained groups with different rewards per 1,000 sampled rollouts, up to and including step ``until``.

    Methods and group sizes compare by this number: a share of the trained groups hides the rollouts that were sampled
    and not trained on.

    Returns:
        None if the run lacks one of the three metrics, or sampled nothing.
    """
    records = [record for step, record in run.records.items() if step <= until]
    sampled = sum(record.get(SAMPLED, 0.0) for record in records)
    groups = [record[GROUPS] * record[GROUP_SIGNAL] for record in records if {GROUPS, GROUP_SIGNAL} <= set(record)]
    return 1000 * sum(groups) / sampled if groups and sampled else None


def deciding_share(run: Run) -> Series:
    """Time spent deciding, as a share of the step."""
    known = ((step, data) for step, data in run.records.items() if DECIDING in data and data.get(SECONDS, 0.0) > 0)
    return as_series((step, data[DECIDING] / data[SECONDS]) for step, data in known)


def summarize(runs: Sequence[Run], target: float | None = None) -> dict[str, Any]:
    """The numbers of all tables as plain JSON values; None where a run lacks a number.

    Args:
        runs: at least one; the first run that has trained a step, and its method, is the reference of all ratios. Runs
            that have not are left out, unless no run has.
        target: accuracy in [0, 1]; None: that of :func:`~verl_ext.lab.report.accuracy.common_target`.

    Raises:
        ValueError: the runs were validated, and on no common data source.
    """
    everything, runs = [run.name for run in runs], trained(runs)
    rewarded = {run.name: sources_by_reward(run) for run in runs}
    left_out = sources_of(name for run in map(with_accuracies, runs) for name in run.metrics())
    runs = on_common_sources(runs)
    left_out -= sources_of(name for run in runs for name in run.metrics())
    rule = RULE if target is not None else f"{COMMON} {RULE}"
    target = common_target(runs) if target is None else target
    if target is None:  # no run was validated
        rule = ""
    rows = {run.name: _of_run(run, target) for run in runs}
    untrained = {UNTRAINED: [name for name in everything if name not in rows]}
    first = rows[runs[0].name]
    for row in rows.values():
        row["times_fewer_rollouts"] = times_fewer(first["rollouts_to_target"], row["rollouts_to_target"])
    methods = [
        _of_method(method.name, [rows[run.name] for run in method.runs])
        for method in by_method(runs)
    ]  # fmt: skip
    for method in methods:
        costs = paired_costs(rows, methods[0]["runs"], method["runs"])
        method["paired_seeds"] = len(costs[0]) if costs else 0
        method["times_fewer_rollouts"] = mean_times_fewer(*costs) if costs else None
        alike = validated_alike(rows, [*methods[0]["runs"], *method["runs"]])
        method["times_fewer_rollouts_interval"] = _interval(*costs) if costs and alike else None
    return {
        "target_accuracy": target,
        "rule": rule,
        "runs": list(rows.values()),
        "methods": methods,
        "notes": listed(untrained) + _notes(runs, left_out, rewarded, rows),
    }


def _of_run(run: Run, target: float | None) -> dict[str, Any]:
    validations, reached = points(run), first_at(run, target)
    if reached and reached.step == validations[0].step > 0:
        # The run may have reached the target at any step up to its first validation.
        reached = replace(reached, rollouts=None, tokens=None, seconds=None)
    accuracies = [point.accuracy for point in validations]
    _, deciding = run.series(DECIDING)
    _, shares = deciding_share(run)
    _, seconds = run.series(SECONDS)
    return {
        "name": run.name,
        "steps": run.steps[-1],
        "rollouts": run.last(ROLLOUTS),
        "tokens": run.last(TOKENS),
        "seconds": float(seconds.sum()) if seconds.size and not begins_late(run) else None,
        "first_accuracy": accuracies[0] if validations and validations[0].step == 0 else None,
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "rollouts_to_target": reached.rollouts if reached else None,
        "to_target": asdict(reached) if reached else None,
        "validated_every": validated_every(validations),
        "rollouts_between_validations": rollouts_between(validations),
        "groups_per_1000": groups_per_1000(run),
        "destinations": {part: float(counts[-1]) for part, counts in destinations(run).items()},
        "deciding_median_seconds": float(np.median(deciding)) if deciding.size else None,
        "deciding_median_share": float(np.median(shares)) if shares.size else None,
        "replaced_records": run.replaced_records,
        "skipped_lines": run.skipped_lines,
        "skipped_values": run.skipped_values,
        "unread_bytes": run.unread_bytes,
        "validations": [asdict(point) for point in validations],
    }


def _of_method(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and range over seeds; None if a seed lacks the number: the other seeds would flatter the method."""
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


def paired_costs(
    rows: Mapping[str, Mapping[str, Any]], reference: Sequence[str], method: Sequence[str]
) -> tuple[list[float], list[float]] | None:
    """Rollouts to the target of two methods, for the seeds that both have, in the same order.

    Args:
        rows: each run's numbers by the run's name.
        reference, method: names of the methods' runs.

    Returns:
        None if a run of either method has no cost, as it never reaches the target or counts no rollouts: the other
        seeds would flatter the method. None, too, if two runs of a method have one seed: which of them makes the pair
        is unknown. Two methods with a single run each are one pair, whatever their seeds; other methods are paired only
        if they have a common seed.
    """
    if any(rows[name]["rollouts_to_target"] is None for name in (*reference, *method)):
        return None
    if repeated_seeds(reference) or repeated_seeds(method):
        return None
    ours, theirs = (
        {seed_of(name): rows[name]["rollouts_to_target"] for name in names} for names in (reference, method)
    )
    if len(ours) == len(theirs) == 1:
        return [*ours.values()], [*theirs.values()]
    common = [seed for seed in ours if seed in theirs]
    return ([ours[seed] for seed in common], [theirs[seed] for seed in common]) if common else None


def repeated_seeds(names: Iterable[str]) -> list[int | None]:
    """The seeds that several of these runs of a method have, as ``grpo_1`` and ``grpo_seed1`` do."""
    return [seed for seed, count in Counter(map(seed_of, names)).items() if count > 1]


def _interval(reference: Sequence[float], method: Sequence[float]) -> list[float] | None:
    """The ends of the 95 % interval of :func:`~verl_ext.lab.report.ratio.paired`.

    Returns:
        None without two seeds, with a cost of 0, and if all seeds have the same ratio: such an interval has no width.
    """
    ratios = {times_fewer(*costs) for costs in zip(reference, method, strict=True)}
    if len(ratios) < 2 or None in ratios:
        return None
    ratio = paired(reference, method)
    return [ratio.low, ratio.high]


def validated_alike(rows: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> bool:
    """Whether the runs were validated equally often, in steps or in rollouts.

    A run that is validated more often reaches a target earlier. ``verl-ext learn`` validates by rollouts, so there the
    steps between two validations differ between methods.

    Args:
        rows: each run's numbers by the run's name.
        names: of the runs; those with fewer than two validations do not count.
    """
    known = [rows[name] for name in names if rows[name]["validated_every"] is not None]
    if len({row["validated_every"] for row in known}) < 2:
        return True
    rollouts = [row["rollouts_between_validations"] for row in known]
    return None not in rollouts and max(rollouts) <= ALIKE * min(rollouts)


def _notes(
    runs: Sequence[Run],
    left_out: set[str],
    rewarded: Mapping[str, Mapping[str, bool]],
    rows: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Sentences on how the runs were read.

    Args:
        left_out: data sources on which only some of the runs were validated.
        rewarded: by run, :func:`sources_by_reward`.
        rows: each run's numbers by the run's name.
    """
    by_reward: dict[bool, list[str]] = {True: [], False: []}
    for run, sources in rewarded.items():
        for source, is_accuracy in sources.items():
            by_reward[is_accuracy].append(f"{run} {source}")
    methods = by_method(runs)
    ends = {method.name: [run.steps[-1] for run in method.runs] for method in methods}
    notes = {
        **how_read(runs),
        "Data sources left out of the accuracy, since not every run was validated on them": sorted(left_out),
        "Validations skipped because they lack a data source of their run": [
            f"{run.name} {count}" for run in runs if (count := _partial_validations(run))
        ],
        "No validation accuracy (simulations have none; trainings need trainer.test_freq and data.val_files)": [
            run.name for run in runs if not rows[run.name]["validations"] and not rewarded[run.name]
        ],
        "The accuracy is the mean reward, since the reward function returns no acc": by_reward[True],
        "No accuracy from mean rewards outside 0 to 1 (return acc from the reward function)": by_reward[False],
        "No count of rollouts, so the comparison is by steps and time only": [
            run.name for run in runs if run.steps[-1] > 0 and run.last(ROLLOUTS) is None
        ],
        "Cost to the target unknown, since the first validation reaches it": [
            f"{name} at step {first['step']}, so at most {first['rollouts']:,.0f} rollouts"
            for name, row in rows.items()
            for first in row["validations"][:1]
            if first["rollouts"] and row["to_target"] and row["to_target"]["step"] == first["step"]
        ],
        "Validated at different steps, and a run that validates more often reaches a target earlier": []
        if validated_alike(rows, rows)
        else _differing(
            runs, lambda run: None if (every := rows[run.name]["validated_every"]) is None else f"every {every}"
        ),
        "Validated with different numbers of samples": _differing(runs, samples_of),
        NO_GAIN: without_gain((name, [Point(**each) for each in row["validations"]]) for name, row in rows.items()),
        "Time unknown, since the log begins after step 1": [
            f"{run.name} begins at step {run.steps[0]}"
            for run in runs
            if begins_late(run) and run.last(SECONDS) is not None
        ],
        "Taken as seeds": [
            f"{method.name} {', '.join(map(_seed, method.runs))}" for method in methods if len(method.runs) > 1
        ],
        "Several runs of a method have one seed, so the method has no ratio": [
            f"{method.name} {seed}" for method in methods for seed in repeated_seeds(run.name for run in method.runs)
        ],
        "Seeds with different last steps; the mean ends with the shortest seed": [
            f"{name} {', '.join(map(str, steps))}" for name, steps in ends.items() if len(set(steps)) > 1
        ],
    }
    return listed(notes)


def how_read(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What was left out of the runs' files, for :func:`listed`."""
    return {
        EMPTY: [name for run in runs for name in run.empty_parts],
        REPLACED: _counts(runs, "replaced_records"),
        "Lines skipped because they are not those of verl's file logger": _counts(runs, "skipped_lines"),
        "Bytes of event files not read, from the first unfinished or damaged record on": _counts(runs, "unread_bytes"),
        "Values skipped because they are not finite": _counts(runs, "skipped_values"),
    }


def listed(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence for each note that applies to something, such as to names of runs."""
    return [f"{note}: {'; '.join(names)}." for note, names in notes.items() if names]


def _differing(runs: Sequence[Run], of_run: Callable[[Run], str | None]) -> list[str]:
    """The value of each method, or of each run if the method's runs differ; empty if all runs have the same value."""
    known = {run.name: value for run in runs if (value := of_run(run)) is not None}
    if len(set(known.values())) < 2:
        return []
    found = []
    for method in by_method(runs):
        own = {run.name: known[run.name] for run in method.runs if run.name in known}
        same = len(set(own.values())) == 1
        found += [f"{method.name if same else name} {value}" for name, value in own.items()]
    return list(dict.fromkeys(found))


def _seed(run: Run) -> str:
    seed = seed_of(run.name)
    return "no number" if seed is None else str(seed)


def _partial_validations(run: Run) -> int:
    sources = sources_of(run.metrics())
    return sum(is_partial(data, sources) for data in run.records.values())


def _counts(runs: Sequence[Run], field: str) -> list[str]:
    return [f"{run.name} {getattr(run, field)}" for run in runs if getattr(run, field)]
