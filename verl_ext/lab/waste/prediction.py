"""Errors of predicted success rates, and how success rates change from a prompt's group to its next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.estimation.by_name import PromptEstimator
from verl_ext.lab.plot import LEVELS
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
"""Estimators with the papers' settings: VIP §6 (1,024 latest samples), Knapsack-RL §4.3 (16 latest rollouts)."""


@dataclass(frozen=True)
class Prediction:
    """An estimator's prediction for each group of the log, made from the steps before the group's step.

    Attributes:
        predicted: (G,) success rates.
        error: (G,) absolute difference to the group's success rate.
        mae: (T,) mean error in each step (VIP, Figure 3).
    """

    predicted: np.ndarray
    error: np.ndarray
    mae: np.ndarray


def predict(
    log: RolloutLog, name: str, progress: Callable[[int], None] = lambda groups: None, **options: Any
) -> Prediction:
    """Predict each step's groups, then show them to the estimator, step by step.

    Args:
        name: a key of :data:`ESTIMATORS`.
        progress: called after each step with its number of groups.
        options: further options of the estimator.

    Raises:
        ValueError: the estimator reads texts, and there is no model to embed them.
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
    return Prediction(predicted, error, log.mean_by_batch(error))


def summary(log: RolloutLog, predictions: dict[str, Prediction], recorded: RecordedRates) -> dict[str, Any]:
    """Error of each estimator over all groups, and over groups whose prompt was seen in an earlier step; and the floor.

    The floor is the error of the true success rates, since the rate of a few rollouts differs from the true rate. It is
    computed from one draw of rates and counts from the posteriors.
    """
    seen = seen_before(log)

    def errors(values: np.ndarray) -> dict[str, float | None]:
        return {"mae": float(values.mean()), "mae_seen_before": float(values[seen].mean()) if seen.any() else None}

    rng = np.random.default_rng(0)
    rates = recorded.draw(rng)
    floor = np.abs(rng.binomial(log.rollouts, rates) / log.rollouts - rates)
    return {
        "groups": len(seen),
        "groups_seen_before": int(seen.sum()),
        "floor": errors(floor),
        "estimators": {
            name: prediction_metrics(each.predicted, log.success_rate) | errors(each.error)
            for name, each in predictions.items()
        },
    }


def seen_before(log: RolloutLog) -> np.ndarray:
    """(G,) bool, whether the prompt has a group in an earlier step."""
    first = np.full(len(log.prompt_ids), np.iinfo(np.int64).max)
    np.minimum.at(first, log.prompt, log.batch)
    return log.batch > first[log.prompt]


def history_error(log: RolloutLog, history: Prediction) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the mean error of a prompt's history over prompts with a history (Knapsack-RL, Figure 15).

    The figure shows total variation distances; between two Bernoulli distributions, it is the absolute
    difference of their success rates.
    """
    errors = log.mean_by_batch(history.error, seen_before(log))
    known = np.isfinite(errors)
    return np.unique(log.step)[known], errors[known]


def transitions(log: RolloutLog) -> tuple[tuple[str, ...], np.ndarray]:
    """Levels of difficulty, and (5, 5) how often each level followed each from a prompt's group to its next.

    Source: Knapsack-RL, section 5.3 and Figure 6. Levels: 0 | (0, 0.2] | (0.2, 0.8) | [0.8, 1) | 1.
    """
    rate = log.success_rate
    of_group = np.select([rate == 0, rate <= 0.2, rate < 0.8, rate < 1], range(4), 4)
    prompt, now = log.prompt[log.by_prompt], of_group[log.by_prompt]
    same = prompt[1:] == prompt[:-1]
    counts = np.zeros((len(LEVELS), len(LEVELS)), dtype=np.int64)
    np.add.at(counts, (now[:-1][same], now[1:][same]), 1)
    return LEVELS, counts
