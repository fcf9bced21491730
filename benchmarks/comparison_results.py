"""Writes the page of results of benchmarks/comparison.py, with tables and pictures."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from comparison_runs import (
    BUDGETS,
    CHOICE,
    FRESH,
    METHODS,
    PLACE,
    REFERENCE,
    SHARES,
    TITLES,
    TUNING,
    Cost,
    Kept,
    Setting,
    choose,
    ratio_of,
    target_of,
)
from comparison_time import AT_MOST, Cluster
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_ext.lab.plot import styles
from verl_ext.lab.report.ratio import Ratio
from verl_ext.lab.table import NOTHING

EVERY_WORLD = "n32"  # the question that all methods answer in several worlds
XLABEL = "times fewer rollouts than GRPO, with 95 % interval (right of the line: the method needs less)"
TIMED = SHARES[:2]  # targets whose times are shown
TITLE_WIDTH = 36  # characters of a line above a panel
CLUSTER = Cluster()


class Result(NamedTuple):
    """A method's result: the fresh seeds of a question, in a world.

    Attributes:
        method: name of the recipe.
        setting: chosen by the method's tuning.
        rollouts: ratio at each of :data:`SHARES`.
        missed: seeds that miss the target at each of :data:`SHARES`.
        times: ratio at each of :data:`TIMED`; None: the runs have neither seconds nor waves from which to model them.
        times_at_most: whether the method's times may be shorter than counted.
        tokens: ratio at the target by which settings are chosen.
        waves: the same; None: the runs do not count waves.
        needed: geometric mean of the rollouts to the target by which settings are chosen.
        accuracy: best accuracy of each seed.
    """

    method: str
    setting: Setting
    rollouts: list[Ratio]
    missed: list[int]
    times: list[Ratio] | None
    times_at_most: bool
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
    kept = timed(kept, base, fresh)
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
            [ratio_of(*costs(target, "seconds")) for target in targets[: len(TIMED)]]
            if "seconds" in kept.runs[method, setting, fresh[0]]
            else None,
            method in AT_MOST and "waves" in kept.runs[method, setting, fresh[0]],
            ratio_of(*costs(chosen_target, "tokens")),
            ratio_of(*costs(chosen_target, "waves")) if "waves" in kept.runs[method, setting, fresh[0]] else None,
            math.exp(float(np.mean([math.log(cost.amount) for cost in own]))),
            kept.final(method, setting, fresh),
        )


def timed(kept: Kept, base: Setting, fresh: Sequence[int]) -> Kept:
    """The runs; those on fresh seeds that count waves and have no seconds get the seconds of a modelled cluster.

    A run whose steps are larger or smaller than those of the reference gets none.

    Args:
        kept: the runs.
        base: the setting of the reference. Rollouts of its first measurements have the usual length.
        fresh: fresh seeds.
    """
    first, step = [kept.runs[REFERENCE, base, seed] for seed in fresh], base.n * base.prompts
    usual_tokens = sum(run["tokens"][1] for run in first) / sum(run["rollouts"][1] for run in first)

    def with_seconds(run: dict[str, Any]) -> dict[str, Any]:
        if "seconds" in run or "waves" not in run or run["n"] * run["prompts"] != step:
            return run
        return run | {"seconds": CLUSTER.seconds(run, step, usual_tokens).tolist()}

    found = copy.copy(kept)
    found.runs = {key: with_seconds(run) if key[2] in fresh else run for key, run in kept.runs.items()}
    return found


def _shown(ratio: Ratio | None, is_reference: bool, fair: bool = True, at_least: bool = False) -> str:
    """A ratio with its interval; in parentheses and without it if the method's cost is counted too low.

    ``at_least``: the method's cost may be counted too high.
    """
    if ratio is None:
        return NOTHING
    if is_reference:
        return "1"
    if not fair:
        return f"({ratio.mean:.2f})"
    text = f"{'≥ ' if at_least else ''}{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"**{text}**" if ratio.low > 1 or (_is_certain(ratio) and not at_least) else text


def table(found: Sequence[Result]) -> list[str]:
    """Lines of one table in Markdown."""
    header = ["method", "lr, n, prompts", "rollouts"]
    header += [f"× at {share:.0%}" for share in SHARES] + ["tokens ×", "waves ×"]
    header += [f"time × at {share:.0%}" for share in TIMED] + ["missed", "best accuracy"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for result in found:
        first = result.method == REFERENCE
        fair = result.missed[PLACE] <= found[0].missed[PLACE]
        cells = [
            f"`{result.method}`",
            str(result.setting),
            f"{result.needed:,.0f}",
            *(_shown(ratio, first) for ratio in result.rollouts),
            _shown(result.tokens, first),
            _shown(result.waves, first, fair),
            *(time_cell(result, found[0], place) for place in range(len(TIMED))),
            "/".join(map(str, result.missed)) if any(result.missed) else NOTHING,
            f"{np.mean(result.accuracy):.3f} ± {np.std(result.accuracy, ddof=1):.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def in_every_world(found: Mapping[str, Sequence[Result]], cell: Callable[[Result, Result], str]) -> list[str]:
    """Lines of a table in Markdown: each method's cell in each world, from its result and that of the reference."""
    cells = {
        world: {result.method: cell(result, each[0]) for result in each if result.method != REFERENCE}
        for world, each in found.items()
    }
    lines = ["| method | " + " | ".join(f"`{world}`" for world in cells) + " |", "|---" * (1 + len(cells)) + "|"]
    for method in _in_order(found):
        line = [own.get(method, NOTHING) for own in cells.values()]
        lines.append(f"| `{method}` | " + " | ".join(line) + " |")
    return lines


def rollouts_cell(result: Result, _: Result) -> str:
    """Ratio of rollouts at the target by which settings are chosen."""
    return _shown(result.rollouts[PLACE], False)


def time_cell(result: Result, reference: Result, place: int = 0) -> str:
    """Ratio of times at one of :data:`TIMED`, by default at the first, which most runs reach."""
    fair = result.missed[place] <= reference.missed[place]
    ratio = result.times[place] if result.times else None
    return _shown(ratio, result.method == REFERENCE, fair, result.times_at_most)


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
        "`time ×` is that of a [modelled cluster](comparison.md#time), and on the stack that of two cores; `≥`: the",
        "method's time may be shorter than counted.",
        "`missed` counts the fresh seeds that do not reach the three targets within the rollouts of a run, and then",
        "cost all of these, with the waves and the time that these took. A method with large waves then has fewer",
        "waves and less time than GRPO with as many rollouts. If more seeds of the method than of GRPO miss a target,",
        "its ratios of waves and time are therefore too high, and stand in parentheses.",
        "Accuracies: mean ± standard deviation.",
        "Markers are filled, and ratios in bold letters, where the interval does not contain 1.",
    ]
    for ending, part, draw in (("_worlds", worlds, picture_of_worlds), ("", others, picture)):
        if part:
            drawing = page.with_name(f"{page.stem}{ending}.png")
            draw(part).savefig(drawing, dpi=110, metadata={"Software": None})
            lines += ["", f"![Ratios with intervals]({drawing.name})"]
    if worlds:
        title = f"## {TITLES[EVERY_WORLD]}:"
        lines += ["", f"{title} × at {CHOICE:.0%} in every world", "", *in_every_world(worlds, rollouts_cell)]
        lines += ["", f"{title} time × at {SHARES[0]:.0%} in every world", "", *in_every_world(worlds, time_cell)]
    for (world, question), each in found.items():
        runs = len(kept[world, question].runs)
        counts = f"{runs:,} runs, tuning included; {len(FRESH[question])} fresh seeds."
        lines += ["", f"## {world}: {TITLES[question]}", "", *table(each), "", counts]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found
