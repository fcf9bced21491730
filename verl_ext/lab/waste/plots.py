"""The plots of the waste analysis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl_ext.lab import plot
from verl_ext.lab.plot import Curve, Plot, over_seeds
from verl_ext.lab.waste.analysis import CORRECT, EQUAL, LOG, WITH, WRONG, Analysis, by_batch
from verl_ext.lab.waste.counterfactual import Spending
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.prediction import history_error
from verl_ext.lab.waste.rates import BANDS
from verl_ext.lab.waste.tables import NAMES

SPENT, OTHERS, PREDICTED = "The logged rollouts", "The same budget under other methods", "Predicted success rates"
COLORS = {WITH: "#0072B2", CORRECT: "#E69F00", WRONG: "#D55E00", EQUAL: "#CC79A7"}


def plots(log: RolloutLog, analysis: Analysis) -> Iterator[Plot]:
    """The plots in their order on the page."""
    steps = np.unique(log.step)
    parts = {name: _over_steps(name, steps, shares) for name, shares in by_batch(log).items()}
    figure = plot.stacks({LOG: parts}, "share of groups", COLORS)
    caption = "Groups of each step by whether their scores differ."
    yield Plot("spent", SPENT, "Groups with and without a gradient", caption, figure)

    curves = [_gained(name, spendings) for name, spendings in analysis.spendings.items()]
    caption = "Computed from the recorded success rates. A line ends where the budget or the log's steps are used up."
    figure = plot.lines(curves, "rollouts sampled", "groups with a gradient", among=analysis.spendings, reference=LOG)
    yield Plot("gradient_groups", OTHERS, "Groups with a gradient against rollouts", caption, figure)
    curves = [_allocated(name, spendings) for name, spendings in analysis.spendings.items()]
    caption = "Rollouts of a drawn prompt in all waves, by bands of its success rate."
    figure = plot.lines(
        curves, "success rate", "rollouts per prompt", among=analysis.spendings, mark=True, reference=LOG
    )
    yield Plot("allocation", OTHERS, "Allocation by difficulty", caption, figure)

    curves = [_over_steps(NAMES[name], steps, each.mae) for name, each in analysis.predictions.items()]
    caption = "Error of predictions made before each step, over all groups of the step (VIP, Figure 3)."
    figure = plot.lines(curves, "step", "mean absolute error", among=NAMES.values())
    yield Plot("prediction_error", PREDICTED, "Prediction error", caption, figure)
    x, errors = history_error(log, analysis.predictions["history"])
    if x.size:
        curve = _over_steps(NAMES["history"], x, errors)
        caption = "A prompt's past rollouts against its new ones, for prompts seen before (Knapsack-RL, Figure 15)."
        figure = plot.lines([curve], "step", "mean absolute error", among=NAMES.values())
        yield Plot("history_error", PREDICTED, "Error of remembered success rates", caption, figure)


def _over_steps(name: str, steps: np.ndarray, values: np.ndarray) -> Curve:
    x, y = plot.stretches((steps, values))
    return Curve(name, x, y, y, y, 1)


def _gained(name: str, spendings: list[Spending]) -> Curve | None:
    series = []
    for spending in spendings:
        points = np.array([(0, 0), *spending.curve], dtype=np.float64)
        points = points[np.unique(np.linspace(0, len(points) - 1, plot.POINTS).round().astype(int))]
        series.append((points[:, 0], points[:, 1]))
    return over_seeds(name, series)


def _allocated(name: str, spendings: list[Spending]) -> Curve | None:
    middle = (BANDS[1:] + BANDS[:-1]) / 2
    series = []
    for spending in spendings:
        drawn = spending.prompts_in_band > 0
        counts = spending.rollouts_in_band[drawn] / spending.prompts_in_band[drawn]
        series.append((middle[drawn], counts))
    return over_seeds(name, series)
