"""A run's validations: accuracy, and what was spent up to each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_high

from verl_ext.lab.plot import Series
from verl_ext.lab.report.runs import Run, as_series

ROLLOUTS, TOKENS, SECONDS = "rollouts/sampled_total", "tokens/sampled_total", "timing_s/step"
NO_GAIN = (
    "Runs never better than before their first step, so a common target is that of the other runs (without others, it "
    "is the accuracy at the start, and reached at no cost)"
)
ACCURACY = re.compile(r"val-core/(?P<source>.+)/acc/mean@(?P<samples>\d+)")
REWARD = re.compile(r"val-core/(?P<source>.+)/reward/mean@\d+")


@dataclass(frozen=True)
class Point:
    """One validation and the cost up to it, without the cost of validations; None: the run does not log it.

    Attributes:
        step: training steps done.
        rollouts, tokens: sampled so far.
        seconds: sum of ``timing_s/step``, without steps repeated by a resumed run.
        accuracy: in [0, 1].
    """

    step: int
    rollouts: float | None
    tokens: float | None
    seconds: float | None
    accuracy: float


def source_of(metric: str) -> str | None:
    """The data source of which a metric is the validation accuracy; None for all other metrics."""
    match = ACCURACY.fullmatch(metric) if metric.startswith("val-core/") else None
    return match["source"] if match else None


def accuracy_of(data: Mapping[str, float]) -> float | None:
    """Validation accuracy: mean over data sources with equal weights; None for a step without validation."""
    values = [value for key, value in data.items() if source_of(key) is not None]
    return sum(values) / len(values) if values else None


def sources_of(metrics: Iterable[str]) -> set[str]:
    """The data sources with a validation accuracy among the metrics."""
    return {source for source in map(source_of, metrics) if source is not None}


def sources_by_reward(run: Run) -> dict[str, bool]:
    """Data sources with a validation, but without ``acc``: verl then logs the mean reward.

    Returns:
        by source: whether all mean rewards lie in [0, 1], as those of rewards of 0 and 1 do, so that they are
        accuracies.
    """
    with_acc = sources_of(run.metrics())
    found: dict[str, bool] = {}
    for data in run.records.values():
        for name, value in data.items():
            match = REWARD.fullmatch(name) if name.startswith("val-core/") else None
            if match and match["source"] not in with_acc:
                found[match["source"]] = found.get(match["source"], True) and 0 <= value <= 1
    return found


def with_accuracies(run: Run) -> Run:
    """The run with its mean rewards in [0, 1] renamed to accuracies, for the data sources without ``acc``."""
    sources = {source for source, is_accuracy in sources_by_reward(run).items() if is_accuracy}
    if not sources:
        return run

    def renamed(name: str) -> str:
        match = REWARD.fullmatch(name)
        return name.replace("/reward/mean@", "/acc/mean@") if match and match["source"] in sources else name

    records = {step: {renamed(name): value for name, value in data.items()} for step, data in run.records.items()}
    return replace(run, records=records)


def on_common_sources(runs: Sequence[Run]) -> list[Run]:
    """The runs with the accuracies of only those data sources on which every run with a validation was validated.

    Raises:
        ValueError: there is no such data source.
    """
    runs = [with_accuracies(run) for run in runs]
    sources = {run.name: found for run in runs if (found := sources_of(run.metrics()))}
    common = set.intersection(*sources.values()) if sources else set()
    if sources and not common:
        each = "; ".join(f"{name}: {', '.join(sorted(found))}" for name, found in sources.items())
        raise ValueError(f"The runs have no data source of their validations in common ({each}).")

    def kept(data: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in data.items() if source_of(name) in {None, *common}}

    return [replace(run, records={step: kept(data) for step, data in run.records.items()}) for run in runs]


def is_partial(data: Mapping[str, float], sources: set[str]) -> bool:
    """Whether a step is a validation that lacks one of the run's data sources."""
    found = sources_of(data)
    return bool(found) and found != sources


def begins_late(run: Run) -> bool:
    """Whether the run lacks its first step, so the time before its first logged step is unknown."""
    return run.steps[0] > 1


def points(run: Run) -> list[Point]:
    """The run's validations in the order of steps, without those that lack a data source of the run.

    The mean over other data sources would be another accuracy.
    """
    sources, late = sources_of(run.metrics()), begins_late(run)
    # Costs are 0 at step 0. A file from a later step on lacks the start of its run, so the costs are unknown.
    only_start = run.steps[-1] == 0
    rollouts, tokens, seconds = (
        0.0 if run.steps[0] == 0 and (only_start or run.last(name) is not None) else None
        for name in (ROLLOUTS, TOKENS, SECONDS)
    )
    found = []
    for step, data in run.records.items():
        rollouts, tokens = data.get(ROLLOUTS, rollouts), data.get(TOKENS, tokens)
        if SECONDS in data and not late:
            seconds = (seconds or 0.0) + data[SECONDS]
        accuracy = accuracy_of(data)
        if accuracy is not None and not is_partial(data, sources):
            found.append(Point(step, rollouts, tokens, seconds, accuracy))
    return found


def accuracy_against(run: Run, unit: str) -> Series:
    """Accuracy against the field ``unit`` of :class:`Point`; validations at an unknown cost are left out."""
    spent = ((getattr(point, unit), point.accuracy) for point in points(run))
    return as_series((cost, accuracy) for cost, accuracy in spent if cost is not None)


def common_target(runs: Sequence[Run]) -> float | None:
    """The smallest of the best accuracies of the runs with a validation; None if there is no such run.

    Runs without a gain do not count if others have one: every run reaches the accuracy of the start at no cost.
    """
    found = [validations for validations in map(points, runs) if validations]
    counted = list(filter(gains, found)) or found
    return min((max(point.accuracy for point in validations) for validations in counted), default=None)


def gains(validations: Sequence[Point]) -> bool:
    """Whether any validation is better than that before the first step; True without a validation before it."""
    first, *later = validations
    return first.step > 0 or any(point.accuracy > first.accuracy for point in later)


def without_gain(validations: Iterable[tuple[str, Sequence[Point]]]) -> list[str]:
    """Names of the runs that :func:`common_target` leaves out, or of all runs if none has a gain.

    Args:
        validations: each run's name and validations. If no run has a gain, those with one validation are not named.
    """
    found = [(name, each, gains(each)) for name, each in validations if each]
    others = any(has_gain for *_, has_gain in found)
    return [name for name, each, has_gain in found if not has_gain and (others or len(each) > 1)]


def first_at(run: Run, target: float | None) -> Point | None:
    """First validation at or above the target; None if there is none."""
    return next((point for point in points(run) if target is not None and point.accuracy >= target), None)


def samples_of(run: Run) -> str | None:
    """Samples of each validated prompt, ``mean@16``, by data source where they differ; None without a validation."""
    matches = [ACCURACY.fullmatch(name) for name in run.metrics()]
    found = sorted((match["source"], int(match["samples"])) for match in matches if match)
    sizes = {samples for _, samples in found}
    if len(sizes) < 2:
        return f"mean@{sizes.pop()}" if sizes else None
    return ", ".join(f"{source} mean@{samples}" for source, samples in found)


def validated_every(validations: Sequence[Point]) -> int | None:
    """The most frequent number of steps between two validations of a run; None for fewer than two."""
    distances = Counter(after.step - before.step for before, after in pairwise(validations))
    return max(distances, key=lambda distance: distances[distance]) if distances else None


def rollouts_between(validations: Sequence[Point]) -> float | None:
    """Median number of rollouts between two validations of a run; None for fewer than two that count them."""
    counts = [point.rollouts for point in validations if point.rollouts is not None]
    return median_high(after - before for before, after in pairwise(counts)) if len(counts) > 1 else None
