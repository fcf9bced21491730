"""The plots of the waste analysis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verl_ext.lab import plot
from verl_ext.lab.plot import Curve, Plot, over_seeds
from verl_ext.lab.waste.analysis import Analysis
from verl_ext.lab.waste.counterfactual import Outcome
from verl_ext.lab.waste.log import RolloutLog
from verl_ext.lab.waste.prediction import history_error
from verl_ext.lab.waste.rates import BANDS
from verl_ext.lab.waste.spent import CORRECT, EQUAL, WITH, WRONG, by_batch
from verl_ext.lab.waste.tables import NAMES

SPENT, OTHERS, PREDICTED = "What was spent", "What each method would have done", "What could have been predicted"
COLORS = {WITH: "#0072B2", CORRECT: "#E69F00", WRONG: "#D55E00", EQUAL: "#CC79A7"}
POINTS = 200
"""A longer curve over steps is shown as means of so many stretches of about the same length."""


def plots(log: RolloutLog, analysis: Analysis) -> Iterator[Plot]:
    """In their order on the page."""
    steps = np.unique(log.step)
    parts = {name: _over_steps(name, steps, shares) for name, shares in by_batch(log).items()}
    figure = plot.stacks({"the log": parts}, "share of groups", COLORS)
    caption = "Groups of each step by whether their scores differ."
    yield Plot("spent", SPENT, "Groups with a gradient, and without", caption, figure)

    curves = [_gained(name, outcomes) for name, outcomes in analysis.replays.items()]
    caption = "What the budget buys under the recorded success rates. Lines end where budget or steps are over."
    figure = plot.lines(curves, "rollouts sampled", "groups with a gradient")
    yield Plot("gradient_groups", OTHERS, "Groups with a gradient against rollouts", caption, figure)
    curves = [_allocated(name, outcomes) for name, outcomes in analysis.replays.items()]
    caption = "Rollouts of a prompt that was drawn, all waves, by bands of its success rate."
    figure = plot.lines(curves, "success rate", "rollouts per prompt", mark=True)
    yield Plot("allocation", OTHERS, "Allocation by difficulty", caption, figure)

    curves = [_over_steps(NAMES[name], steps, each.mae) for name, each in analysis.predictions.items()]
    caption = "Of predictions made before each step, over all its groups (VIP, Figure 3)."
    figure = plot.lines(curves, "step", "mean absolute error")
    yield Plot("prediction_error", PREDICTED, "Prediction error", caption, figure)
    x, errors = history_error(log, analysis.predictions["history"])
    if x.size:
        curve = _over_steps(NAMES["history"], x, errors)
        caption = "A prompt's past outcomes against its new ones, prompts seen before only (Knapsack-RL, Figure 15)."
        figure = plot.lines([curve], "step", "mean absolute error")
        yield Plot("history_error", PREDICTED, "Success rates remembered", caption, figure)


def _over_steps(name: str, steps: np.ndarray, values: np.ndarray) -> Curve:
    count = min(POINTS, len(steps))
    x, y = (np.array([part.mean() for part in np.array_split(each, count)]) for each in (steps, values))
    return Curve(name, x, y, y, y, 1)


def _gained(name: str, outcomes: list[Outcome]) -> Curve | None:
    series = []
    for outcome in outcomes:
        points = np.array([(0, 0), *outcome.curve], dtype=np.float64)
        points = points[np.unique(np.linspace(0, len(points) - 1, POINTS).round().astype(int))]
        series.append((points[:, 0], points[:, 1]))
    return over_seeds(name, series)


def _allocated(name: str, outcomes: list[Outcome]) -> Curve | None:
    middle = (BANDS[1:] + BANDS[:-1]) / 2
    series = []
    for outcome in outcomes:
        drawn = outcome.prompts_in_band > 0
        counts = outcome.rollouts_in_band[drawn] / outcome.prompts_in_band[drawn]
        series.append((middle[drawn], counts))
    return over_seeds(name, series)
