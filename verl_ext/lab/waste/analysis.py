"""All answers of a log, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.lab.report.runs import Run
from verl_ext.lab.waste import methods, prediction
from verl_ext.lab.waste.counterfactual import ASSUMPTION, Outcome, of_the_log, replay
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.rates import BAND_NAMES, RecordedRates, fit_prior
from verl_ext.lab.waste.spent import spent

ENOUGH = 300_000  # rollouts to replay per method, by default, before chance is no matter any more
MOST_REPEATS = 5


@dataclass(frozen=True)
class Analysis:
    """Everything that is shown.

    Attributes:
        summary: JSON-able.
        recorded: success rates, for the log that it was made of.
        replays: by method its outcomes, one per repeat; those of the log itself first.
        predictions: by estimator.
    """

    summary: dict[str, Any]
    recorded: RecordedRates
    replays: dict[str, list[Outcome]]
    predictions: dict[str, prediction.Prediction]


def analyse(
    log: RolloutLog,
    *,
    run: Run | None = None,
    repeats: int | None = None,
    embeddings: bool = False,
    progress: Callable[[str, int], Callable[[int], None]] = lambda task, total: lambda done: None,
) -> Analysis:
    """Answer the three questions: what was spent, what others would have done, what could have been predicted.

    Args:
        run: the same run's metrics: its budget includes what was sampled and never trained on, which no log of
            rollouts holds.
        repeats: replays of each method, with seeds 0, 1, ...; None: as many as 300,000 rollouts take, at most 5.
        embeddings: also what predicts from texts; the log has to hold them.
        progress: called with a task's name and its size; gives what is called with what has been done of it.

    Raises:
        ValueError: embeddings, and no model for them.
    """
    logged = int(log.rollouts.sum())
    budget = _budget(log, run)
    sizes = np.bincount(log.batch)
    train_batch_size = round(float(np.median(sizes)))
    n = max(2, round(logged / len(log.prompt)))
    if repeats is None:
        repeats = int(np.clip(ENOUGH // logged, 1, MOST_REPEATS))
    prior = fit_prior(log.correct, log.rollouts)
    recorded = RecordedRates(log, prior)

    replays = {"the log": [of_the_log(log, recorded, budget["rollouts"])]}
    settings, refused = {}, {}
    done = progress("Replaying methods", budget["rollouts"] * repeats * len(methods.POLICIES))
    for name in methods.POLICIES:
        try:
            outcomes = []
            for seed in range(repeats):
                options = methods.settings(name, n, seed, embeddings)
                policy = methods.build(name, options, train_batch_size)
                outcomes.append(
                    replay(
                        policy, log, recorded, train_batch_size=train_batch_size, budget=budget["rollouts"], seed=seed,
                        progress=done,
                    )
                )  # fmt: skip
        except ValueError as error:
            refused[name] = str(error)
            continue
        replays[name], settings[name] = outcomes, options

    names = prediction.names(embeddings)
    done = progress("Predicting success rates", len(log.prompt) * len(names))
    predictions = {name: prediction.predict(log, name, done) for name in names}
    statuses, moves = prediction.transitions(log)
    summary = {
        "log": _facts(log),
        "budget": budget,
        "spent": spent(log, prior),
        "counterfactual": {
            "assumption": ASSUMPTION,
            "prior": list(prior),
            "train_batch_size": train_batch_size,
            "n": n,
            "repeats": repeats,
            "settings": settings,
            "refused": refused,
            "methods": {name: _mean(outcomes) for name, outcomes in replays.items()},
        },
        "prediction": prediction.summary(log, predictions, recorded),
        "transitions": {"statuses": list(statuses), "counts": moves.tolist()},
    }
    return Analysis(summary, recorded, replays, predictions)


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
    """Rollouts and tokens up to the log's last step; the log's own rollouts where the metrics do not say."""
    found: dict[str, float] = {}
    if run is not None:
        last = int(log.step.max())
        for step, record in zip(run.steps, run.records, strict=True):
            if step <= last:
                found |= {name: value for name, value in record.items() if name.endswith("_total")}
    sampled, tokens = found.get("rollouts/sampled_total"), found.get("tokens/sampled_total")
    return {
        "rollouts": int(sampled) if sampled else int(log.rollouts.sum()),
        "tokens": None if tokens is None else int(tokens),
        "from_metrics": bool(sampled),
        "discarded": {
            name.removeprefix("rollouts/discarded_").removesuffix("_total"): int(value)
            for name, value in sorted(found.items())
            if name.startswith("rollouts/discarded_") and name != "rollouts/discarded_total"
        },
    }


def _mean(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Means over repeats, and least and largest of what methods are compared by."""
    rollouts = sum(outcome.rollouts_in_band for outcome in outcomes)
    prompts = sum(outcome.prompts_in_band for outcome in outcomes)
    per_thousand = [1000 * each.gradient_groups / each.sampled for each in outcomes if each.sampled]
    sums = {
        name: sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("trained_groups", "trained_rollouts", "gradient_groups", "gradient_rollouts", "sampled")
    }
    reasons = sorted({reason for outcome in outcomes for reason in outcome.discarded})
    return {
        "steps": float(np.mean([outcome.steps for outcome in outcomes])),
        **{name: value / len(outcomes) for name, value in sums.items()},
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
            reason: sum(outcome.discarded.get(reason, 0) for outcome in outcomes) / len(outcomes) for reason in reasons
        },
        "short_steps": float(np.mean([outcome.short_steps for outcome in outcomes])),
        "stopped": next((outcome.stopped for outcome in outcomes if outcome.stopped), None),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
