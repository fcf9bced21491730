"""Plots for the whole lab: lines with bands, stacks, and families of lines.

A method keeps its colour whatever the order of the arguments. Figures are built without pyplot, so importing this
module changes no setting of matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_ext.recipes import recipes

Series = tuple[np.ndarray, np.ndarray]
"""x and y, float64 of the same length."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933")
COLORS += ("#44AA99", "#AA4499", "#661100", "#332288", "#117733", "#DDCC77")
"""At least one for each recipe."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*", "<", ">", "h", "d", "8", "H")
DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
STACK = {"trained": "#0072B2", "failed": "#000000", "buffered": "#CCCCCC"}
REASONS = ("#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9", "#009E73", "#882255", "#999933", "#44AA99", "#8C564B")
LEVELS = ("extremely_hard", "hard", "medium", "easy", "extremely_easy")
"""Levels of difficulty (Knapsack-RL, section 5.3), in the order in which plots and tables show them."""
FEW = 30
"""Lines of at most this many points have markers."""
POINTS = 200
"""A longer series of single steps is drawn as means over this many stretches of about equal length."""
ROWS = 3
"""Rows of a legend for which a figure has room; each further row makes it higher."""


@dataclass(frozen=True)
class Plot:
    """A figure with its place and words on a page.

    Attributes:
        name: file name without ending.
        section: heading of the plot's section.
        title: heading of the plot.
        caption: one sentence below the plot, in plain text.
        figure: the drawing.
    """

    name: str
    section: str
    title: str
    caption: str
    figure: Figure

    def png(self) -> bytes:
        """The same figure gives the same bytes on the same machine: no date, no version."""
        buffer = BytesIO()
        self.figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
        return buffer.getvalue()


@dataclass(frozen=True)
class Curve:
    """A line with its band: mean and range over seeds.

    Attributes:
        name: label of the line.
        x, mean, low, high: (n,) with n >= 1. The band is drawn where low and high differ.
        seeds: number of runs behind the curve.
    """

    name: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def over_seeds(name: str, series: Iterable[Series]) -> Curve | None:
    """Mean and range at every x between the first and the last point of every seed; None without such an x.

    Seeds may have points at different x, for instance after different numbers of rollouts. A seed is linear between
    its points. Empty series are ignored.
    """
    series = [(x, y) for x, y in series if x.size]
    if not series:
        return None
    first, last = max(x.min() for x, _ in series), min(x.max() for x, _ in series)
    x = np.unique(np.concatenate([x for x, _ in series]))
    x = x[(x >= first) & (x <= last)]
    if not x.size:
        return None
    values = np.stack([np.interp(x, own, y) for own, y in series])
    return Curve(name, x, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(series))


def stretches(series: Series, of: Callable[[np.ndarray], Any] = np.mean) -> Series:
    """``of`` at most ``POINTS`` stretches of the series, so that noise of single steps does not hide a line."""
    x, y = series
    if x.size <= POINTS:
        return series
    return tuple(
        np.array([each(part) for part in np.array_split(values, POINTS)]) for each, values in ((np.mean, x), (of, y))
    )


# ---- colours ----


class Style(NamedTuple):
    """How a method is drawn."""

    color: str
    dashes: Any
    marker: str


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style per method, which depends on the set of names only.

    A recipe has the colour of its place among all recipes. A recipe with overrides, a seed or a model behind its name
    prefers the same colour, any other name the colours after those of the recipes. A taken colour gives way to the next
    free colour, and once all colours are taken, to another dash.
    """
    fixed, size = {name: place for place, name in enumerate(recipes())}, len(COLORS)
    places: dict[str, int] = {}
    for name in sorted(set(names), key=lambda name: (name not in fixed, name)):
        begun = [each for each in fixed if re.match(rf"{re.escape(each)}(?![^\W\d_])", name)]  # no letter follows
        wanted = fixed[max(begun, key=len)] if begun else len(fixed)
        free = set(range(size * (len(places) // size + 1))) - set(places.values())
        places[name] = min(free, key=lambda place: (place // size, (place - wanted) % size))  # noqa: B023
    return {
        name: Style(COLORS[place % size], DASHES[place // size % len(DASHES)], MARKERS[place % size])
        for name, place in places.items()
    }


def stack_colors(parts: Iterable[str]) -> dict[str, str]:
    """Colours of the parts of a stack: fixed for trained, failed and buffered, different for up to ten others."""
    others = enumerate(sorted(set(parts) - set(STACK)))
    return STACK | {part: REASONS[place % len(REASONS)] for place, part in others}


def ordered_colors(parts: Sequence[str]) -> dict[str, Any]:
    """From dark to light in the order of the parts; colour-blind readers see the order, too."""
    places = np.linspace(0.0, 0.92, max(len(parts), 2))
    return {part: colormaps["viridis"](place) for part, place in zip(parts, places, strict=False)}


def hard_first(part: str) -> tuple[int, int | str]:
    """Sort key of parts: levels from hard to easy; then c2 and k2 before c10 and k10; then the alphabet."""
    if part in LEVELS:
        return 0, LEVELS.index(part)
    digits = re.search(r"\d+$", part)
    return (1, int(digits[0])) if digits else (2, part)


# ---- figures ----


def lines(
    curves: Sequence[Curve | None],
    x: str,
    y: str,
    *,
    among: Iterable[str] = (),
    target: float | None = None,
    scale: float = 1,
    mark: bool = False,
    reference: str | None = None,
) -> Figure:
    """One line per method, and a band where a method has several seeds.

    Args:
        curves: None entries are ignored.
        x, y: labels of the axes.
        among: names of all methods of the page, which give a method one colour in all plots.
        target: y value, on the scale of the curves; it gets a dashed line, and a ring marks each curve's first point
            at or above it.
        scale: factor of all y values, 100 for percent.
        mark: whether short lines have a marker at every point.
        reference: name of a curve that is no method. It is black and dashed, and takes no colour from the methods.
    """
    drawn = [curve for curve in curves if curve is not None]
    style = styles({*among, *(curve.name for curve in drawn)} - {reference})
    if reference is not None:
        style[reference] = Style("#000000", DASHES[1], MARKERS[-1])
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    _clean(axes)
    for curve in drawn:
        color, dashes, marker = style[curve.name]
        marked = curve.x.size == 1 or (mark and curve.x.size <= FEW)
        axes.plot(
            curve.x, scale * curve.mean, color=color, linestyle=dashes, linewidth=1.8, markersize=5,
            marker=marker if marked else None, label=text(_with_seeds(curve)),
        )  # fmt: skip
        _band(axes, curve, color, scale)
        reached = np.flatnonzero(curve.mean >= target) if target is not None else ()
        if len(reached):
            axes.plot(
                curve.x[reached[0]], scale * curve.mean[reached[0]], "o", markersize=13, markerfacecolor="none",
                markeredgecolor=color, markeredgewidth=1.6, zorder=3,
            )  # fmt: skip
    if target is not None:
        axes.axhline(scale * target, color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"target\n{target:.1%}", (1, scale * target), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", ha="left", va="center", fontsize=9, color="0.4",
        )  # fmt: skip
    axes.set_xlabel(x)
    if x == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y)
    _legend(figure, axes)
    return figure


def stacks(parts: Mapping[str, Mapping[str, Curve]], y: str, colors: Mapping[str, Any]) -> Figure:
    """Stacked areas against steps, one panel per method: ``parts[method][part]``."""

    def draw(axes: Axes, method: str) -> None:
        curves = parts[method]
        x = np.unique(np.concatenate([curve.x for curve in curves.values()]))
        heights = [np.interp(x, curve.x, curve.mean) for curve in curves.values()]
        axes.stackplot(
            x, heights, colors=[colors[part] for part in curves], labels=list(map(text, curves)), linewidth=0
        )
        axes.margins(x=0)

    return _small_multiples(list(parts), y, draw)


def families(parts: Mapping[str, Mapping[str, Curve]], y: str, colors: Mapping[str, Any]) -> Figure:
    """Lines against steps, one panel per method: ``parts[method][part]``."""

    def draw(axes: Axes, method: str) -> None:
        for part, curve in parts[method].items():
            axes.plot(curve.x, curve.mean, color=colors[part], linewidth=1.6, label=text(part))
            _band(axes, curve, colors[part])

    return _small_multiples(list(parts), y, draw)


def _small_multiples(names: list[str], y: str, draw: Callable[[Axes, str], None]) -> Figure:
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(7.5, 2.4 * rows + 1.2 if columns > 1 else 4.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for place, (axes, name) in enumerate(zip(grid.flat, names, strict=False)):
        draw(axes, name)
        if place + columns >= len(names):
            axes.set_xlabel("step")
        if place % columns == 0:
            axes.set_ylabel(y)
        axes.set_title(text(name), loc="left", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _clean(axes)
    grid.flat[0].set_ylim(bottom=0)  # the panels share the axis, so its end is known once all are drawn
    for axes in grid.flat[len(names) :]:
        axes.remove()
    _legend(figure, *grid.flat[: len(names)])
    return figure


def _band(axes: Axes, curve: Curve, color: Any, scale: float = 1) -> None:
    if (curve.low < curve.high).any():
        axes.fill_between(curve.x, scale * curve.low, scale * curve.high, color=color, alpha=0.18, linewidth=0)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _tick(value))


def _tick(value: float) -> str:
    """At most seven characters, or neighbours would overlap: 950, 9,500, 9.5 M, 9.5 G."""
    for size, unit in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _legend(figure: Figure, *panels: Axes) -> None:
    """One legend for all panels, below them: inside a panel it would hide part of a line.

    It has as many columns as fit beside each other, three at most. Rows beyond the third make the figure higher.
    """
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    for columns in (3, 2, 1):
        legend = figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
        extent, rows = legend.get_window_extent(), math.ceil(len(entries) / columns)
        if extent.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + max(0, rows - ROWS) / rows * extent.height / figure.dpi)


def _with_seeds(curve: Curve) -> str:
    return f"{curve.name} ({curve.seeds} seeds)" if curve.seeds > 1 else curve.name


def text(name: str) -> str:
    """A name as it is: ``$`` would begin a formula, and matplotlib hides labels that begin with ``_``."""
    return name.replace("$", r"\$").lstrip("_")
