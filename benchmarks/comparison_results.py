"""Runs of benchmarks/comparison.py: the file that keeps them, the choice of settings, and the page of results."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_ext.lab.plot import styles
from verl_ext.lab.report.ratio import Ratio, paired
from verl_ext.lab.table import NOTHING

REFERENCE = "grpo"
METHODS = (
    *(REFERENCE, "dynamic_sampling", "pilot_commit", "hora", "vip", "knapsack", "prefix_sampling"),
    *("greso", "mopps", "speed_rl", "pods", "reinforce_ada", "recall"),
)
EVERY_WORLD = "n32"  # the question that all methods answer in several worlds
XLABEL = "times fewer rollouts than GRPO, with 95 % interval (right of the line: the method needs less)"
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
    "confirm_stack256": "256 rollouts a step, on the stack, confirmed",
    "lab256": "256 rollouts a step, the stack's prompts and a model from the same commands, in verl-ext learn",
}
TITLE_WIDTH = 40  # characters of a line above a panel
TUNING = dict.fromkeys(TITLES, (100, 101, 102))
TUNING |= {"confirm256": tuple(range(103, 119))} | dict.fromkeys(("confirm_stack256", "lab256"), tuple(range(103, 111)))
"""Seeds on which the settings of a question are chosen."""
FRESH = dict.fromkeys(TITLES, tuple(range(12))) | {"confirm256": tuple(range(12, 36))}
FRESH |= dict.fromkeys(("stack64", "stack256"), tuple(range(5))) | {"confirm_stack256": tuple(range(5, 13))}
"""Seeds that no tuning has seen."""
BUDGETS = dict.fromkeys(TITLES, 20_000) | {"n64": 40_000, "step1024": 80_000}
BUDGETS |= dict.fromkeys(("stack64", "stack256", "confirm_stack256"), 8_000)
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
        """Cost of the target for each seed, in ``rollouts``, ``tokens``, ``waves`` or ``steps``."""
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


# ---- the page ----


class Result(NamedTuple):
    """A method's result: the fresh seeds of a question, in a world.

    Attributes:
        method: name of the recipe.
        setting: chosen by the method's tuning.
        rollouts: ratio at each of :data:`SHARES`.
        missed: seeds that miss the target at each of :data:`SHARES`.
        tokens: ratio at the target by which settings are chosen.
        waves: the same; None: the runs do not count waves.
        needed: geometric mean of the rollouts to this target.
        accuracy: best accuracy of each seed.
    """

    method: str
    setting: Setting
    rollouts: list[Ratio]
    missed: list[int]
    tokens: Ratio
    waves: Ratio | None
    needed: float
    accuracy: list[float]


def results(kept: Kept, tuning: Sequence[int], fresh: Sequence[int], budget: float = math.inf) -> Iterator[Result]:
    """The methods whose runs on fresh seeds are complete; the reference comes first, and without it there is none.

    Args:
        kept: the runs of a question in a world.
        tuning: seeds of tuning.
        fresh: fresh seeds.
        budget: rollouts within which a fresh run must reach a target.
    """
    if not kept.settings(REFERENCE, tuning):
        return
    base = choose(kept, REFERENCE, tuning)
    if base not in kept.settings(REFERENCE, fresh):
        return
    targets = [target_of(kept, tuning, share) for share in SHARES]
    chosen_target = targets[PLACE]
    for method in dict.fromkeys((REFERENCE, *(name for name, _, _ in kept.runs))):
        if not kept.settings(method, tuning):
            continue
        setting = choose(kept, method, tuning)
        if setting not in kept.settings(method, fresh):
            continue

        def costs(
            target: float, unit: str, method: str = method, setting: Setting = setting
        ) -> tuple[list[Cost], list[Cost]]:
            return (
                kept.costs(REFERENCE, base, fresh, target, unit, budget),
                kept.costs(method, setting, fresh, target, unit, budget),
            )

        own = costs(chosen_target, "rollouts")[1]
        yield Result(
            method,
            setting,
            [ratio_of(*costs(target, "rollouts")) for target in targets],
            [sum(not cost.reached for cost in costs(target, "rollouts")[1]) for target in targets],
            ratio_of(*costs(chosen_target, "tokens")),
            ratio_of(*costs(chosen_target, "waves")) if "waves" in kept.runs[method, setting, fresh[0]] else None,
            math.exp(float(np.mean([math.log(cost.amount) for cost in own]))),
            kept.final(method, setting, fresh),
        )


def _shown(ratio: Ratio | None, is_reference: bool) -> str:
    if ratio is None:
        return NOTHING
    if is_reference:
        return "1"
    text = f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"**{text}**" if _is_certain(ratio) else text


def table(found: Sequence[Result]) -> list[str]:
    """Lines of one table in Markdown."""
    header = ["method", "lr, n, prompts", "rollouts"]
    header += [f"× at {share:.0%}" for share in SHARES] + ["tokens ×", "waves ×", "missed", "best accuracy"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for result in found:
        first = result.method == REFERENCE
        cells = [
            f"`{result.method}`",
            str(result.setting),
            f"{result.needed:,.0f}",
            *(_shown(ratio, first) for ratio in result.rollouts),
            _shown(result.tokens, first),
            _shown(result.waves, first),
            "/".join(map(str, result.missed)) if any(result.missed) else NOTHING,
            f"{np.mean(result.accuracy):.3f} ± {np.std(result.accuracy, ddof=1):.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def in_every_world(found: Mapping[str, Sequence[Result]]) -> list[str]:
    """Lines of a table in Markdown: each method's ratio in each world."""
    ratios = {
        world: {result.method: result.rollouts[PLACE] for result in each if result.method != REFERENCE}
        for world, each in found.items()
    }
    lines = ["| method | " + " | ".join(f"`{world}`" for world in ratios) + " |", "|---" * (1 + len(ratios)) + "|"]
    for method in _in_order(found):
        cells = [_shown(own.get(method), False) for own in ratios.values()]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines


def _in_order(found: Mapping[str, Sequence[Result]]) -> list[str]:
    """The methods without the reference: recipes, then other methods."""
    present = dict.fromkeys(result.method for each in found.values() for result in each)
    return [name for name in dict.fromkeys([*METHODS, *present]) if name in present and name != REFERENCE]


def picture_of_worlds(found: Mapping[str, Sequence[Result]]) -> Figure:
    """A panel for each world, and in each a line for each method, in the same order."""
    methods = _in_order(found)[::-1]
    figure = Figure(figsize=(1.4 + 1.9 * len(found), 0.6 + 0.25 * len(methods)), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharex=True, sharey=True)[0]
    style = styles(methods)
    for panel, (world, each) in zip(panels, found.items(), strict=True):
        for result in each:
            if result.method != REFERENCE:
                _draw(panel, methods.index(result.method), result.rollouts[PLACE], style[result.method].color)
        _frame(panel, methods)
        panel.set_title(world, fontsize=10)
    figure.supxlabel(XLABEL, fontsize=10)
    return figure


def picture(found: Mapping[tuple[str, str], Sequence[Result]]) -> Figure:
    """A panel for each question; each method's ratio with its interval in each world, and a line at 1."""
    worlds: dict[str, list[str]] = {}
    for world, question in found:
        worlds.setdefault(question, []).append(world)
    lines = {  # label, ratio and method of each question, from the last line to the first
        question: [
            (result.method if len(names) == 1 else f"{result.method}, {world}", result.rollouts[PLACE], result.method)
            for world in names
            for result in found[world, question]
            if result.method != REFERENCE
        ][::-1]
        for question, names in worlds.items()
    }
    columns = min(2, len(lines))
    counts = [len(each) for each in lines.values()]
    sizes = [max(counts[first : first + columns]) for first in range(0, len(counts), columns)]
    figure = Figure(figsize=(5.4 * columns, 0.8 * len(sizes) + 0.2 * sum(sizes) + 0.6), layout="constrained")
    panels = figure.subplots(
        len(sizes), columns, squeeze=False, sharex=True, height_ratios=[1 + size for size in sizes]
    )
    style = styles(result.method for each in found.values() for result in each)
    for panel, (question, each) in zip(panels.flat, lines.items(), strict=False):
        for height, (_, ratio, method) in enumerate(each):
            _draw(panel, height, ratio, style[method].color)
        _frame(panel, [label for label, *_ in each])
        where = f"{worlds[question][0]}: " if len(worlds[question]) == 1 else ""
        panel.set_title(textwrap.fill(f"{where}{TITLES[question]}", TITLE_WIDTH), fontsize=10)
    for panel in panels.flat[len(lines) :]:
        panel.set_axis_off()
    figure.supxlabel(XLABEL)
    return figure


def _is_certain(ratio: Ratio) -> bool:
    """Whether the interval does not contain 1."""
    return not ratio.low <= 1 <= ratio.high


def _draw(panel: Axes, height: int, ratio: Ratio, color: str) -> None:
    """The marker is filled if the interval does not contain 1."""
    face = color if _is_certain(ratio) else "white"
    error = [[ratio.mean - ratio.low], [ratio.high - ratio.mean]]
    panel.errorbar(ratio.mean, height, xerr=error, fmt="o", color=color, markerfacecolor=face, capsize=3)


def _frame(panel: Axes, labels: Sequence[str]) -> None:
    panel.axvline(1, color="0.6", linewidth=1, zorder=0)
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(-0.6, len(labels) - 0.4)
    panel.set_xscale("log")
    panel.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    panel.minorticks_off()


def write_page(page: Path, kept: Mapping[tuple[str, str], Kept]) -> dict[tuple[str, str], list[Result]]:
    """Write the page and its pictures; returns the results by world and question."""
    found = {
        (world, question): list(results(kept[world, question], TUNING[question], FRESH[question], BUDGETS[question]))
        for world, question in sorted(kept, key=lambda key: list(TITLES).index(key[1]))
    }
    found = {key: each for key, each in found.items() if len(each) > 1}
    worlds = {world: each for (world, question), each in found.items() if question == EVERY_WORLD}
    others = {key: each for key, each in found.items() if key[1] != EVERY_WORLD}
    lines = [
        "# The comparison: results",
        "",
        "`python benchmarks/comparison.py report` writes this page from the runs in `docs/comparison/`. The",
        "[protocol](comparison.md) says how methods are tuned and compared. `×` is the cost of GRPO divided by the",
        "method's, over fresh seeds, with its 95 % interval: above 1, the method needs less. Percentages",
        "are of the way from the warm start to GRPO's best accuracy; `rollouts`, `tokens ×` and `waves ×` are at 80 %.",
        "`missed` counts the fresh seeds that do not reach the three targets within the rollouts of a run, and then",
        "cost all of these. Accuracies: mean ± standard deviation.",
        "Markers are filled, and ratios in bold letters, where the interval does not contain 1.",
    ]
    for ending, part, draw in (("_worlds", worlds, picture_of_worlds), ("", others, picture)):
        if part:
            drawing = page.with_name(f"{page.stem}{ending}.png")
            draw(part).savefig(drawing, dpi=110, metadata={"Software": None})
            lines += ["", f"![Ratios with intervals]({drawing.name})"]
    if worlds:
        lines += ["", f"## {TITLES[EVERY_WORLD]}: × at {CHOICE:.0%} in every world", "", *in_every_world(worlds)]
    for (world, question), each in found.items():
        runs = len(kept[world, question].runs)
        counts = f"{runs:,} runs, tuning included; {len(FRESH[question])} fresh seeds."
        lines += ["", f"## {world}: {TITLES[question]}", "", *table(each), "", counts]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found
