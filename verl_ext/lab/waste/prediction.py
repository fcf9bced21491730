"""How well success rates would have been predicted, and how they moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import numpy as np

from verl_ext.estimation.by_name import BY_TEXT, PromptEstimator
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.rates import RecordedRates
from verl_ext.one_wave import prediction_metrics
from verl_ext.policy import Prompt

ESTIMATORS: dict[str, dict[str, Any]] = {
    "moving_average": {"window": 1024},
    "history": {"size": 16},
    "beta_posterior": {},
    "gaussian_process": {},
    "ridge_regression": {"window": 1024},
}
"""With the settings of the papers: VIP §6 (1,024 most recent samples), Knapsack-RL §4.3 (16 last outcomes)."""


@dataclass(frozen=True)
class Prediction:
    """What an estimator said before each group of the log, having seen the batches before it.

    Attributes:
        predicted: (G,) success rates.
        error: (G,) absolute difference to the group's own rate.
        mae: (T,) mean of it in each step (VIP's Figure 3).
    """

    predicted: np.ndarray
    error: np.ndarray
    mae: np.ndarray


def predict(
    log: RolloutLog, name: str, progress: Callable[[int], None] = lambda groups: None, **options: Any
) -> Prediction:
    """Predict every batch of the log, then let the estimator see it.

    Raises:
        ValueError: an estimator over texts, and no model to embed them with.
    """
    estimator = PromptEstimator(name, ESTIMATORS[name] | options)
    estimator.start_run(log.texts if log.texts is not None else log.prompt_ids)
    prompts = [Prompt(prompt, row) for row, prompt in enumerate(log.prompt_ids)]
    predicted = np.empty(len(log.prompt))
    for rows in log.batches:
        batch = [prompts[row] for row in log.prompt[rows].tolist()]
        predicted[rows] = estimator.predict(batch)
        estimator.observe(batch, log.success_rate[rows], log.rollouts[rows])
        progress(len(batch))
    error = np.abs(predicted - log.success_rate)
    return Prediction(predicted, error, np.bincount(log.batch, weights=error) / np.bincount(log.batch))


def names(embeddings: bool) -> list[str]:
    """The estimators that can be compared."""
    return [name for name in ESTIMATORS if embeddings or name not in BY_TEXT]


def summary(log: RolloutLog, predictions: dict[str, Prediction], recorded: RecordedRates) -> dict[str, Any]:
    """Errors of each estimator, of all groups and of those whose prompt was seen in an earlier step, and the floor.

    The floor is the error that the true rates would have, as groups have few rollouts: one draw of rates and counts
    from the posteriors.
    """
    seen = seen_before(log)
    rng = np.random.default_rng(0)
    rates = recorded.draw(rng)
    floor = np.abs(rng.binomial(log.rollouts, rates) / log.rollouts - rates)
    return {
        "groups": len(seen),
        "groups_seen_before": int(seen.sum()),
        "floor": {"mae": float(floor.mean()), "mae_seen_before": float(floor[seen].mean()) if seen.any() else None},
        "estimators": {
            name: prediction_metrics(each.predicted, log.success_rate)
            | {"mae_seen_before": float(each.error[seen].mean()) if seen.any() else None}
            for name, each in predictions.items()
        },
    }


def seen_before(log: RolloutLog) -> np.ndarray:
    """(G,) bool: the prompt has a group in an earlier step."""
    first = np.full(len(log.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, log.prompt, log.batch)
    return log.batch > first[log.prompt]


def history_error(log: RolloutLog, history: Prediction) -> tuple[np.ndarray, np.ndarray]:
    """Steps and mean error of a prompt's history, over prompts that have one (Knapsack-RL's Figure 15).

    For two coins the total variation distance of the figure is the absolute difference of their rates.
    """
    seen = seen_before(log)
    groups = np.bincount(log.batch[seen], minlength=len(log.batches))
    errors = np.bincount(log.batch[seen], weights=history.error[seen], minlength=len(log.batches))
    return np.unique(log.step)[groups > 0], errors[groups > 0] / groups[groups > 0]


def transitions(log: RolloutLog) -> tuple[tuple[str, ...], np.ndarray]:
    """Statuses, and (5, 5) how often one followed another from a prompt's group to its next (Knapsack-RL, Figure 6)."""
    statuses, status = (resolve_name(f"recipe.knapsack.policy:{name}") for name in ("STATUSES", "status"))
    rates, place = np.unique(log.success_rate, return_inverse=True)
    of_group = np.array([status(rate) for rate in rates.tolist()])[place]
    order = np.argsort(log.prompt, kind="stable")
    prompt, now = log.prompt[order], of_group[order]
    same = prompt[1:] == prompt[:-1]
    counts = np.zeros((len(statuses), len(statuses)), dtype=np.int64)
    np.add.at(counts, (now[:-1][same], now[1:][same]), 1)
    return statuses, counts
