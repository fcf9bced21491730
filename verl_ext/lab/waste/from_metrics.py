"""What metrics alone say of a run's waste: exact shares for runs of this project, a bound for other runs of verl.

verl logs the mean score of a step, not the scores of each group. If a score is one of two values, a group of n
rollouts without a gradient has 0 or n of the higher value; a group with a gradient has at least one of each value.
With r, the share of the higher value among all rollouts of a step of P groups, at most
min(P, r·n·P, (1 - r)·n·P) groups have a gradient, and this number is reached: one rollout of the rarer value in each
group. If r·n·P is a multiple of n, all groups may be without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from verl_ext.lab.page import Page
from verl_ext.lab.plot import Curve, Plot, lines
from verl_ext.lab.report.runs import Run
from verl_ext.lab.report.summary import SAMPLED, SIGNAL, TRAINED, how_read, listed, with_gradient
from verl_ext.lab.table import Table, count, number, percent

TITLE = "What the metrics say of the rollouts"
FAILED, BUFFERED = "rollouts/failed", "rollouts/buffered"
NEEDED = (SIGNAL, TRAINED, SAMPLED, FAILED)
"""Metrics without which nothing exact can be said; a run of this project logs them in every step."""
IN_BUFFER, UNKNOWN = "in the buffer at the end, less those at the start", "not in the export"
DISCARDED, TOTAL = "rollouts/discarded_", "_total"
MEANS = ("critic/score/mean", "critic/rewards/mean")
ADVANTAGES = ("critic/advantages/min", "critic/advantages/max")
EXACT_FIGURES = (
    "For exact figures, by prompt and difficulty, and for the rollouts that other methods would ask for, log with "
    "trainer.rollout_data_dir and run verl-ext waste on that folder."
)
RANGES = 12  # most rows of the table over training


def page_of(run: Run, n: int | None = None) -> Page:
    """The page for a run's metrics.

    Args:
        run: the metrics of each step.
        n: rollouts per prompt, at least 2, for a run that is not of this project; no metric of verl holds it.

    Raises:
        ValueError: the metrics are not there, or ``n`` is missing or has no meaning.
    """
    exact = any(SIGNAL in record for record in run.records.values())
    if not exact and n is None:
        raise ValueError("--n is missing: use actor_rollout_ref.rollout.n of the run, which no metric of verl holds.")
    if exact and n is not None:
        raise ValueError(f"--n {n} has no meaning for a run of this project, which logs {SIGNAL}: leave it out.")
    page = _exact(run) if n is None else _bounded(run, n)
    return replace(page, notes=[*page.notes, *listed(how_read([run]))])


def most_with_gradient(share: np.ndarray, n: int) -> np.ndarray:
    """Largest share of groups with a gradient, for groups of ``n`` rollouts with scores of two values.

    Args:
        share: of the higher value among all rollouts of a step, in [0, 1]; any shape.
        n: rollouts per group, at least 2.

    Returns:
        in [0, 1], with the shape of ``share``.
    """
    return np.minimum(1.0, n * np.minimum(share, 1 - share))


def reason_of(metric: str) -> str | None:
    """The reason whose discarded rollouts of a step the metric counts; None for all other metrics."""
    of_a_step = metric.startswith(DISCARDED) and not metric.endswith(TOTAL)
    return metric.removeprefix(DISCARDED) if of_a_step else None


def _exact(run: Run) -> Page:
    steps = {step: record for step, record in run.records.items() if set(NEEDED) <= set(record)}
    if not steps:
        missing = [name for name in NEEDED if name not in run.metrics()] or NEEDED
        raise ValueError(
            f"{run.name}: has {SIGNAL}, but no step that also has {', '.join(missing)}; "
            "export all metrics under rollouts/."
        )
    records = list(steps.values())

    def total(name: str) -> float:
        return sum(record.get(name, 0.0) for record in records)

    trained, gained = total(TRAINED), round(with_gradient(replace(run, records=steps)))
    reasons = sorted({name for record in records for name in record if reason_of(name) is not None})
    sampled = total(SAMPLED)
    if not sampled:
        raise ValueError(f"{run.name}: {SAMPLED} is 0 in every step; export a run that sampled rollouts.")
    parts = {
        "trained, with a gradient": gained,
        "trained, all rewards equal": trained - gained,
        **{f"discarded: {name.removeprefix(DISCARDED).replace('_', ' ')}": total(name) for name in reasons},
        "failed": total(FAILED),
    }
    rest, buffered = sampled - sum(parts.values()), _is_buffered(steps, reasons)
    if rest < 0 and not buffered:
        raise ValueError(
            f"{run.name}: counts {-rest:,.0f} rollouts more as trained, discarded and failed than as sampled; export "
            "every step of one run (W&B: scan_history(), because history() samples 500 steps), with all metrics under "
            "rollouts/."
        )
    parts[IN_BUFFER if buffered else UNKNOWN] = rest
    rows = [(name, count(value), percent(value / sampled)) for name, value in parts.items() if value]
    shares = np.array([record[SIGNAL] for record in records])
    lead = (
        f"{sampled:,.0f} rollouts in {len(steps):,} steps; {sampled - gained:,.0f} of them "
        f"({1 - gained / sampled:.1%}) were not trained on with a gradient."
    )
    notes = [f"Counted from {SIGNAL} and the counts under rollouts/, which runs of this project log.", EXACT_FIGURES]
    left_out = sum(bool(set(NEEDED) & set(record)) for record in run.records.values()) - len(steps)
    if left_out:
        notes.insert(1, f"Steps left out, since they lack one of {', '.join(NEEDED)}: {left_out:,}.")
    if parts.get(UNKNOWN):
        notes.insert(
            1,
            f"No exported column says why {parts[UNKNOWN]:,.0f} rollouts were not trained on: a column "
            f"{DISCARDED}... or {BUFFERED} is missing, or the steps are not all there.",
        )
    numbers = {"run": run.name, "steps": len(steps), "exact": True, "rollouts": parts, "sampled": sampled}
    tables = [Table("Where the rollouts went", ("rollouts", "number", "% of all"), rows)]
    trained_of_step = np.array([record[TRAINED] for record in records])
    tables.append(_over_training(list(steps), shares, "trained rollouts with a gradient", trained_of_step))
    return Page(TITLE, lead, tables, notes, [_plot(list(steps), shares, "share of trained rollouts")], numbers)


def _is_buffered(steps: Mapping[int, Mapping[str, float]], reasons: Sequence[str]) -> bool:
    """Whether the growth of the buffer accounts for all rollouts that were not trained, discarded or failed.

    If it does not, the export lacks a column, such as a reason for which rollouts were discarded.
    """
    buffered = 0.0 if min(steps) == 1 else None  # before the first step; unknown if the export begins later
    for record in steps.values():
        if BUFFERED not in record:
            return False
        rest = record[SAMPLED] - sum(record.get(name, 0.0) for name in (TRAINED, FAILED, *reasons))
        before = record[BUFFERED] - rest
        if before < 0 or (buffered is not None and before != buffered):
            return False
        buffered = record[BUFFERED]
    return True


def _bounded(run: Run, n: int) -> Page:
    metric = next((name for name in MEANS if any(name in record for record in run.records.values())), None)
    if metric is None:
        raise ValueError(f"{run.name}: has neither {SIGNAL} nor {' nor '.join(MEANS)}; export one of these metrics.")
    steps, means = run.series(metric)
    low, high, where = _values(run, metric, means)
    share = np.clip((means - low) / (high - low), 0, 1)
    most = most_with_gradient(share, n)
    flat = {
        step
        for step, record in run.records.items()
        if all(name in record for name in ADVANTAGES) and not any(record[name] for name in ADVANTAGES)
    }
    most = np.where(np.isin(steps, list(flat)), 0.0, most)
    mean = float(most.mean())
    if mean < 1:
        lead = (
            f"At least {1 - mean:.1%} of the rollouts of {len(steps):,} steps were in groups without a gradient, if "
            f"each score is {low:g} or {high:g}: with n = {n} and these mean scores, at most {mean:.1%} were in others."
        )
    else:
        lead = (
            f"The export cannot tell how much was wasted: with n = {n}, every group may have had a gradient at the "
            f"mean scores of these {len(steps):,} steps ({means.min():.3g} to {means.max():.3g})."
        )
    notes = [
        f"verl's metrics hold the mean score of a step ({metric}), not the scores of each group. With r, the share of "
        f"the score {high:g}, at most min(1, n·r, n·(1 - r)) of the groups have two different scores; all groups may "
        "have equal ones.",
        f"The two scores are {where}. The bound needs scores of two values; with others, the mean says nothing.",
        EXACT_FIGURES,
    ]
    if flat:
        notes.insert(1, f"Steps in which every advantage was 0, so no group had a gradient: {len(flat):,}.")
    numbers = {
        "run": run.name, "steps": len(steps), "exact": False, "n": n, "scores": [low, high],
        "most_with_gradient": mean, "steps_without_gradient": len(flat),
    }  # fmt: skip
    place = [int(step) for step in steps]
    alike = np.ones_like(most)  # no metric of verl counts the rollouts of a step
    table = _over_training(place, most, "rollouts with a gradient, at most", alike, means)
    return Page(TITLE, lead, [table], notes, [_plot(place, most, "largest share of rollouts")], numbers)


def _values(run: Run, metric: str, means: np.ndarray) -> tuple[float, float, str]:
    """The two scores, and where they come from."""
    ends = [metric.replace("mean", end) for end in ("min", "max")]
    lows, highs = (run.series(name)[1] for name in ends)
    if lows.size and highs.size and lows.min() < highs.max():
        return float(lows.min()), float(highs.max()), f"the least {ends[0]} and the largest {ends[1]}"
    if means.min() < 0 or means.max() > 1:
        raise ValueError(
            f"{run.name}: has mean scores outside 0 to 1 and lacks {' and '.join(ends)}; export these, too."
        )
    return 0.0, 1.0, f"taken to be 0 and 1, since the export lacks {' and '.join(ends)} or they are equal"


def _over_training(
    steps: list[int], shares: np.ndarray, name: str, weights: np.ndarray, means: np.ndarray | None = None
) -> Table:
    """Means over stretches of the steps, of the (steps,) ``shares`` by ``weights``, and of the ``means`` by steps."""
    places = np.array_split(np.arange(len(steps)), min(len(steps), RANGES))
    rows = [
        (
            f"{steps[part[0]]} to {steps[part[-1]]}" if len(part) > 1 else str(steps[part[0]]),
            *([] if means is None else [number(float(means[part].mean()), ".3f")]),
            percent(float(np.average(shares[part], weights=weights[part])) if weights[part].any() else None),
        )
        for part in places
    ]
    header = ("steps", *([] if means is None else ["mean score"]), f"% of {name}")
    return Table("Over training", header, rows)


def _plot(steps: list[int], shares: np.ndarray, label: str) -> Plot:
    x = np.array(steps, dtype=np.float64)
    figure = lines([Curve("with a gradient", x, shares, shares, shares, 1)], "step", label)
    return Plot("gradient", "Over training", "Rollouts with a gradient", "Means of each step.", figure)
