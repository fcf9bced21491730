"""All numbers of a log: gradients of its groups, the same budget under other methods, and predicted success rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.estimation.by_name import BY_TEXT
from verl_ext.lab.method import Method
from verl_ext.lab.report.runs import Run
from verl_ext.lab.report.summary import SAMPLED, TRAINED
from verl_ext.lab.table import mean_times_fewer
from verl_ext.lab.waste import prediction
from verl_ext.lab.waste.counterfactual import ASSUMPTION, Spending, recipe_method, spend, spending_of_log
from verl_ext.lab.waste.from_metrics import DISCARDED, reason_of
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.rates import BAND_NAMES, RecordedRates, band, fit_prior
from verl_ext.recipes import recipes

LOG, TOKENS = "the log", "tokens/sampled"
WITH, CORRECT, WRONG, EQUAL = "with gradient", "all correct", "all wrong", "equal scores"
KINDS = (WITH, CORRECT, WRONG, EQUAL)
"""Kinds of groups. Equal scores: no gradient although some rollouts are correct and some are wrong."""
VISIT_RANGES = 12  # most rows of the table by epoch
ENOUGH = 300_000  # rollouts per method, over all repeats, after which chance hardly matters
MOST_REPEATS = 5
ENOUGH_GROUPS = 30
"""If 90 % of the sampled groups have a gradient, 30 groups all have a gradient by chance in 4 % of logs."""
WITHOUT_SCORES = "empty"  # reason for discarding a group of which all rollouts failed: its rewards do not matter


@dataclass(frozen=True)
class Analysis:
    """The numbers, and the material of the plots.

    Attributes:
        summary: all numbers, JSON-able.
        spendings: by method, one per repeat; the log itself first.
        predictions: by estimator.
    """

    summary: dict[str, Any]
    spendings: dict[str, list[Spending]]
    predictions: dict[str, prediction.Prediction]


def analyse(
    log: RolloutLog,
    *,
    run: Run | None = None,
    repeats: int | None = None,
    embeddings: bool = False,
    progress: Callable[[str, int], Callable[[int], None]] = lambda task, total: lambda done: None,
) -> Analysis:
    """Compute all numbers of a log.

    Args:
        run: metrics of the same run. They give the budget with all rollouts sampled; a log of rollouts holds only the
            trained rollouts.
        repeats: runs of each method, with seeds 0, 1, ...; None: as many as 300,000 rollouts allow, at most 5.
        embeddings: whether to use estimators over texts; the log must hold the texts.
        progress: called with the name of a task and its size; returns a function to call with the progress made.

    Raises:
        ValueError: embeddings are asked for, and there is no model for them; or the metrics lack a step of the
            log, or count fewer trained rollouts in a step than the log has.
    """
    logged = int(log.rollouts.sum())
    budget = _budget(log, run)
    train_batch_size = round(float(np.median(np.bincount(log.batch))))
    n = max(2, round(logged / len(log.prompt)))
    if repeats is None:
        repeats = int(np.clip(ENOUGH // logged, 1, MOST_REPEATS))
    prior = fit_prior(log.correct, log.rollouts)
    recorded = RecordedRates(log, prior)

    spendings = {LOG: [spending_of_log(log, recorded, _sampled(log, run if budget["from_metrics"] else None))]}
    settings: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    done = progress("Spending the budget with each method", budget["rollouts"] * repeats * len(recipes()))
    for name in recipes():
        try:
            recipe = Method.parse(name, train_batch_size)
            found = [recipe_method(recipe, n, seed, texts=embeddings) for seed in range(repeats)]
            if None in found:
                left_out[name] = "a log of rollouts is not enough to run it."
                continue
            spendings[name] = [
                spend(
                    method.policy(seed), log, recorded, train_batch_size=train_batch_size, budget=budget["rollouts"],
                    seed=seed, progress=done,
                )
                for seed, (method, _) in enumerate(found)
            ]  # fmt: skip
        except ValueError as error:
            left_out[name] = str(error)
            continue
        settings[name] = found[0][1]

    names = [name for name in prediction.ESTIMATORS if embeddings or name not in BY_TEXT]
    done = progress("Predicting success rates", len(log.prompt) * len(names))
    predictions = {name: prediction.predict(log, name, done) for name in names}
    statuses, moves = prediction.transitions(log)
    methods = {name: _mean(each) for name, each in spendings.items()}
    selection = _selection(log, budget["discarded"])
    own = methods[LOG]["gradient_groups_per_1000"]
    for name, each in methods.items():
        known = selection is None or name == LOG
        rates = _per_1000(spendings[name])
        each["times_fewer_rollouts"] = mean_times_fewer(rates, [own] * len(rates)) if known else None
    summary = {
        "log": _facts(log),
        "budget": budget,
        "spent": spent(log, prior),
        "counterfactual": {
            "assumption": ASSUMPTION,
            "selection": selection,
            "prior": list(prior),
            "train_batch_size": train_batch_size,
            "n": n,
            "repeats": repeats,
            "settings": settings,
            "left_out": left_out,
            "methods": methods,
        },
        "prediction": prediction.summary(log, predictions, recorded),
        "transitions": {"statuses": list(statuses), "counts": moves.tolist()},
    }
    return Analysis(summary, spendings, predictions)


def kinds(log: RolloutLog) -> np.ndarray:
    """(G,) index into :data:`KINDS`. A group has a gradient if its scores differ, whatever the verdicts."""
    without = np.where(log.correct == log.rollouts, 1, np.where(log.correct == 0, 2, 3))
    return np.where(log.has_spread, 0, without)


def spent(log: RolloutLog, prior: tuple[float, float]) -> dict[str, Any]:
    """Groups, rollouts and characters by kind of group: in total, by visit and by difficulty.

    A prompt's difficulty is its success rate over the whole log: the posterior mean under the Beta ``prior``.
    """
    kind = kinds(log)
    prompts = len(log.prompt_ids)
    correct = np.bincount(log.prompt, weights=log.correct, minlength=prompts)
    rollouts = np.bincount(log.prompt, weights=log.rollouts, minlength=prompts)
    difficulty = band((prior[0] + correct) / (sum(prior) + rollouts))
    last = int(log.visit.max())
    edges = np.unique(np.linspace(0, last, min(last, VISIT_RANGES) + 1).round().astype(int))
    part = np.searchsorted(edges, log.visit) - 1
    ranges = zip(edges[:-1] + 1, edges[1:], strict=True)
    visits = [str(first) if first == final else f"{first} to {final}" for first, final in ranges]
    return {
        "total": _count(log, kind, np.ones(len(kind), dtype=bool)),
        "by_visit": {name: _count(log, kind, part == place) for place, name in enumerate(visits)},
        "by_difficulty": {
            name: {"prompts": int((difficulty == place).sum()), **_count(log, kind, difficulty[log.prompt] == place)}
            for place, name in enumerate(BAND_NAMES)
        },
    }


def by_batch(log: RolloutLog) -> dict[str, np.ndarray]:
    """(T,) share of each step's groups, for every kind of group in the log."""
    kind = kinds(log)
    return {name: log.mean_by_batch(kind == place) for place, name in enumerate(KINDS) if (kind == place).any()}


def _count(log: RolloutLog, kind: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    def by_kind(weights: np.ndarray) -> dict[str, int]:
        sums = np.bincount(kind[rows], weights=weights[rows], minlength=len(KINDS))
        return dict(zip(KINDS, map(int, sums), strict=True))

    rollouts = int(log.rollouts[rows].sum())
    return {
        "groups": by_kind(np.ones(len(kind))),
        "rollouts": by_kind(log.rollouts),
        "characters": by_kind(log.characters),
        "success_rate": float(log.correct[rows].sum() / rollouts) if rollouts else None,
    }


def _facts(log: RolloutLog) -> dict[str, Any]:
    return {
        "steps": len(log.batches),
        "prompts": len(log.prompt_ids),
        "groups": len(log.prompt),
        "rollouts": int(log.rollouts.sum()),
        "characters": int(log.characters.sum()),
        "visits_most": int(log.visit.max()),
        "success_rate": float(log.correct.sum() / log.rollouts.sum()),
        "correct_above": log.threshold,
        "skipped": dict(log.skipped),
        "first_skipped": dict(log.examples),
        "merged_outputs": log.merged,
        "steps_in_several_files": list(log.repeated_steps),
    }


def _budget(log: RolloutLog, run: Run | None) -> dict[str, Any]:
    """Rollouts and tokens of the log's steps, from the metrics; else the number of logged rollouts.

    Raises:
        ValueError: the metrics do not count the rollouts of every step of the log, or count fewer as trained.
    """
    if run is None:
        return {"rollouts": int(log.rollouts.sum()), "tokens": None, "from_metrics": False, "discarded": {}}
    steps = np.unique(log.step).tolist()
    lacking = [step for step in steps if SAMPLED not in run.records.get(step, {})]
    if lacking:
        raise ValueError(
            f"--metrics: lacks {SAMPLED} in {len(lacking):,} of the log's {len(steps):,} steps (first: {lacking[0]}); "
            "give all files of the run (a.jsonl+b.jsonl), or leave --metrics out."
        )
    records = [run.records[step] for step in steps]
    for step, record, logged in zip(steps, records, np.bincount(log.batch, weights=log.rollouts), strict=True):
        if record.get(TRAINED, logged) < logged:
            raise ValueError(
                f"--metrics: counts {record[TRAINED]:,.0f} trained rollouts in step {step}, and the log has "
                f"{logged:,.0f} of this step; give metrics and rollouts of one run, each step once."
            )

    def spent(name: str) -> int:
        return round(sum(record.get(name, 0.0) for record in records))

    sampled, reasons = spent(SAMPLED), sorted(filter(None, map(reason_of, run.metrics())))
    return {
        "rollouts": sampled or int(log.rollouts.sum()),
        "tokens": spent(TOKENS) if all(TOKENS in record for record in records) else None,
        "from_metrics": bool(sampled),
        "discarded": {reason: count for reason in reasons if (count := spent(f"{DISCARDED}{reason}"))},
    }


def _sampled(log: RolloutLog, run: Run | None) -> np.ndarray:
    """(T,) rollouts sampled in each of the log's steps, from the metrics; else the logged rollouts."""
    if run is None:
        return np.bincount(log.batch, weights=log.rollouts)
    return np.array([run.records[step][SAMPLED] for step in np.unique(log.step).tolist()])


def _selection(log: RolloutLog, discarded: Mapping[str, int]) -> str | None:
    """Evidence that the log holds only some of the sampled groups, chosen by the method; None: no evidence.

    Success rates of chosen groups are not those of the prompts: a method that discards groups without a gradient logs
    prompts that are neither too easy nor too hard.
    """
    reasons = {reason: count for reason, count in discarded.items() if count and reason != WITHOUT_SCORES}
    if reasons:
        return f"{sum(reasons.values()):,} sampled rollouts were discarded ({', '.join(reasons)})"
    if len(log.prompt) >= ENOUGH_GROUPS and log.has_spread.all():
        return f"every one of the {len(log.prompt):,} logged groups has a gradient"
    return None


def _mean(spendings: Sequence[Spending]) -> dict[str, Any]:
    """Means over repeats; for groups with a gradient per 1,000 rollouts also the range."""
    rollouts = sum(spending.rollouts_in_band for spending in spendings)
    prompts = sum(spending.prompts_in_band for spending in spendings)
    per_thousand = _per_1000(spendings)
    sums = {
        name: sum(getattr(spending, name) for spending in spendings)
        for name in ("trained_groups", "trained_rollouts", "gradient_groups", "gradient_rollouts", "sampled")
    }
    reasons = sorted({reason for spending in spendings for reason in spending.discarded})
    return {
        "steps": float(np.mean([spending.steps for spending in spendings])),
        **{name: value / len(spendings) for name, value in sums.items()},
        "groups_with_gradient": _share(sums["gradient_groups"], sums["trained_groups"]),
        "rollouts_with_gradient": _share(sums["gradient_rollouts"], sums["trained_rollouts"]),
        "sampled_with_gradient": _share(sums["gradient_rollouts"], sums["sampled"]),
        "gradient_groups_per_1000": float(np.mean(per_thousand)) if per_thousand else None,
        "gradient_groups_per_1000_range": [min(per_thousand), max(per_thousand)] if per_thousand else None,
        "rollouts_per_prompt": {
            name: _share(int(each), int(drawn)) for name, each, drawn in zip(BAND_NAMES, rollouts, prompts, strict=True)
        },
        "share_of_rollouts": {
            name: _share(int(each), int(rollouts.sum())) for name, each in zip(BAND_NAMES, rollouts, strict=True)
        },
        "discarded": {
            reason: sum(each.discarded.get(reason, 0) for each in spendings) / len(spendings) for reason in reasons
        },
        "short_steps": float(np.mean([spending.short_steps for spending in spendings])),
        "stopped": next((spending.stopped for spending in spendings if spending.stopped), None),
    }


def _per_1000(spendings: Sequence[Spending]) -> list[float]:
    """Groups with a gradient per 1,000 sampled rollouts, of each repeat that sampled any."""
    return [1000 * each.gradient_groups / each.sampled for each in spendings if each.sampled]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
