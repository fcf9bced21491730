"""Runs of benchmarks/comparison.py: the file that keeps them, costs of targets, and the choice of settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_ext.lab.report.ratio import Ratio, paired

REFERENCE = "grpo"
METHODS = (
    *(REFERENCE, "dynamic_sampling", "pilot_commit", "hora", "vip", "knapsack", "prefix_sampling"),
    *("greso", "mopps", "speed_rl", "pods", "reinforce_ada", "recall"),
)
SHARES = (0.5, 0.8, 0.95)  # targets, as shares of the way from the warm start to the best accuracy of the reference
CHOICE = 0.8  # the target by which settings are chosen, as a share
PLACE = SHARES.index(CHOICE)
TITLES = {
    "n32": "n = 32, 8 prompts a step",
    "n64": "n = 64, 8 prompts a step",
    "step256": "256 rollouts a step",
    "confirm256": "256 rollouts a step, confirmed",
    "step1024": "1,024 rollouts a step",
    "tool256": "two turns with a tool, 256 rollouts a step",
    "free": "nothing held fixed",
    "stack64": "n = 64, 4 prompts a step, on the stack",
    "stack256": "256 rollouts a step, on the stack",
    "confirm_stack64": "n = 64, 4 prompts a step, on the stack, confirmed",
    "confirm_stack256": "256 rollouts a step, on the stack, confirmed",
    "lab256": "256 rollouts a step, the stack's prompts and a model from the same commands, in verl-ext learn",
}
TUNING = dict.fromkeys(TITLES, (100, 101, 102))
TUNING |= {"confirm256": tuple(range(103, 119))}
TUNING |= dict.fromkeys(("confirm_stack64", "confirm_stack256", "lab256"), tuple(range(103, 111)))
"""Seeds on which the settings of a question are chosen."""
FRESH = dict.fromkeys(TITLES, tuple(range(12))) | {"confirm256": tuple(range(12, 36))}
FRESH |= dict.fromkeys(("stack64", "stack256"), tuple(range(5)))
FRESH |= dict.fromkeys(("confirm_stack64", "confirm_stack256"), tuple(range(5, 13)))
"""Seeds that no tuning has seen."""
BUDGETS = dict.fromkeys(TITLES, 20_000) | {"n64": 40_000, "step1024": 80_000}
BUDGETS |= dict.fromkeys(("stack64", "stack256", "confirm_stack64", "confirm_stack256"), 8_000)
"""Rollouts of a run, pilots included. The step that passes this number is the last; on the stack, the step whose count
is nearest to it."""


class Setting(NamedTuple):
    """What is tuned: learning rate, rollouts per prompt and prompts per step."""

    lr: float
    n: int
    prompts: int

    def __str__(self) -> str:
        return f"{self.lr:g}, {self.n}, {self.prompts}"


class Cost(NamedTuple):
    """The cost of a target accuracy in a run, or of the run's budget if the target is missed: see :func:`cost_of`."""

    amount: float
    reached: bool


class Kept:
    """The finished runs of a question in a world. A file has one JSON object for each run, and only grows.

    All runs of a file begin with one model, so with one accuracy: accuracies are exact, on the same prompts.

    Args:
        file: where the runs are kept; it need not exist yet.

    Raises:
        ValueError: the runs of the file begin with different models.
    """

    def __init__(self, file: Path):
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.runs: dict[tuple[str, Setting, int], dict[str, Any]] = {}
        for run in map(json.loads, lines):
            self._keep(run)

    def __contains__(self, key: tuple[str, Setting, int]) -> bool:
        return key in self.runs

    def add(self, run: dict[str, Any]) -> None:
        """Keep a run; ValueError if it begins with another model than the kept runs."""
        self._keep(run)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")

    def _keep(self, run: dict[str, Any]) -> None:
        mine, theirs = (each["accuracy"][0] for each in (run, next(iter(self.runs.values()), run)))
        if abs(mine - theirs) > 1e-3:  # the same model on another machine differs by rounding
            raise ValueError(f"{self.file}: a run begins at an accuracy of {mine}, and others at {theirs}: two models.")
        self.runs[_key(run)] = run

    def settings(self, method: str, seeds: Sequence[int]) -> list[Setting]:
        """The settings that have been run on all these seeds."""
        tried = dict.fromkeys(setting for name, setting, _ in self.runs if name == method)
        return [setting for setting in tried if all((method, setting, seed) in self for seed in seeds)]

    def costs(
        self, method: str, setting: Setting, seeds: Sequence[int], target: float, unit: str, budget: float = math.inf
    ) -> list[Cost]:
        """Cost of the target for each seed, in ``rollouts``, ``tokens``, ``waves``, ``steps`` or ``seconds``."""
        return [cost_of(self.runs[method, setting, seed], target, unit, budget) for seed in seeds]

    def final(self, method: str, setting: Setting, seeds: Sequence[int]) -> list[float]:
        """Best accuracy for each seed."""
        return [max(self.runs[method, setting, seed]["accuracy"]) for seed in seeds]


def _key(run: Mapping[str, Any]) -> tuple[str, Setting, int]:
    return run["method"], Setting(run["lr"], run["n"], run["prompts"]), run["seed"]


def cost_of(run: Mapping[str, Any], target: float, unit: str, budget: float = math.inf) -> Cost:
    """Cost when the accuracy first reaches the target; between two measurements the accuracy is a straight line.

    If a run misses the target within ``budget`` rollouts, its cost is the cost of its first ``budget`` rollouts. If
    such a run ended earlier, it costs what ``budget`` rollouts would have cost at the same rate. An early end thus
    makes no run cheaper, and a last step beyond the budget makes no run dearer. Without a budget, the cost of a run
    that misses the target is all that the run spent.
    """
    rollouts, spent, accuracy = (np.array(run[name], float) for name in ("rollouts", unit, "accuracy"))
    reached = np.flatnonzero(accuracy >= target)
    if reached.size:
        at, share = int(reached[0]), 1.0
        if at == 0:
            at = min(1, spent.size - 1)
        else:
            share = (target - accuracy[at - 1]) / (accuracy[at] - accuracy[at - 1])
        if (1 - share) * rollouts[at - 1] + share * rollouts[at] <= budget:
            return Cost(float((1 - share) * spent[at - 1] + share * spent[at]), True)
    if budget == math.inf:
        return Cost(float(spent[-1]), False)
    return Cost(float(np.interp(budget, rollouts, spent) * max(budget / rollouts[-1], 1)), False)


def target_of(kept: Kept, seeds: Sequence[int], share: float = CHOICE) -> float:
    """Accuracy that is this share of the way from the warm start to the best mean accuracy of the reference.

    The best is taken over the settings of the reference that were run on all these seeds.
    """
    settings = kept.settings(REFERENCE, seeds)
    start = kept.runs[REFERENCE, settings[0], seeds[0]]["accuracy"][0]
    best = max(float(np.mean(kept.final(REFERENCE, setting, seeds))) for setting in settings)
    return start + share * (best - start)


def ranked(kept: Kept, method: str, settings: Sequence[Setting], seeds: Sequence[int], target: float) -> list[Setting]:
    """The settings, best first.

    The number of seeds that miss the target comes first. Then, if no seed misses it, the mean of log(rollouts); and
    otherwise the mean of the best accuracies, since a run that misses the target says nothing by its length.
    """

    def badness(setting: Setting) -> tuple[int, float]:
        costs = kept.costs(method, setting, seeds, target, "rollouts")
        missed = sum(not cost.reached for cost in costs)
        if missed:
            return missed, -sum(kept.final(method, setting, seeds))
        return missed, sum(math.log(cost.amount) for cost in costs)

    return sorted(settings, key=badness)


def choose(kept: Kept, method: str, seeds: Sequence[int]) -> Setting:
    """The method's best setting among those that were run on all the tuning seeds."""
    return ranked(kept, method, kept.settings(method, seeds), seeds, target_of(kept, seeds))[0]


def ratio_of(reference: Sequence[Cost], method: Sequence[Cost]) -> Ratio:
    """How many times less the method needs, seed by seed."""
    return paired([cost.amount for cost in reference], [cost.amount for cost in method])
