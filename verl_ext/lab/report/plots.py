"""Drawing. Figures are built without pyplot, so that importing this changes nothing for the importer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl_ext.lab.report.curves import Curve

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
STACK = {"trained": "#0072B2", "failed": "#000000", "buffered": "#CCCCCC"}
REASONS = ("#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9", "#009E73")
FEW = 30
"""Up to so many points of a line are marked."""


def to_png(figure: Figure) -> bytes:
    """The same figure gives the same bytes on the same machine: no date, no version."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def lines(
    curves: Sequence[Curve | None], x: str, y: str, *, target: float | None = None, scale: float = 1, mark: bool = False
) -> Figure:
    """One line per method, a band where it has several seeds.

    Args:
        curves: in the order of the methods, which gives their colours; None for a method without one.
        x, y: names of the axes.
        target: draws a line there, on the scale of the curves, and a ring where each curve's mean first is above.
        scale: what values are multiplied with, for percent.
        mark: marks every point that was measured.
    """
    figure, axes = _figure()
    for place, curve in enumerate(curves):
        if curve is None:
            continue
        color = COLORS[place % len(COLORS)]
        few = mark and curve.x.size <= FEW
        marker = MARKERS[place % len(MARKERS)] if few or curve.x.size == 1 else None
        dashes = DASHES[place // len(COLORS) % len(DASHES)]
        axes.plot(
            curve.x, scale * curve.mean, color=color, linestyle=dashes, linewidth=1.8, marker=marker, markersize=5,
            label=_plain(curve),
        )  # fmt: skip
        if curve.seeds > 1:
            axes.fill_between(curve.x, scale * curve.low, scale * curve.high, color=color, alpha=0.18, linewidth=0)
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


def stacks(parts: Mapping[str, Mapping[str, Curve]], y: str, colors: Mapping[str, str]) -> Figure:
    """Stacked areas against steps, one panel per method: ``parts[method][part]``."""

    def draw(axes: Axes, method: str) -> None:
        curves = parts[method]
        x = np.unique(np.concatenate([curve.x for curve in curves.values()]))
        heights = [np.interp(x, curve.x, curve.mean) for curve in curves.values()]
        axes.stackplot(x, heights, colors=[colors[part] for part in curves], labels=list(curves), linewidth=0)
        axes.margins(x=0)

    return _small_multiples(list(parts), y, draw)


def families(parts: Mapping[str, Mapping[str, Curve]], y: str, colors: Mapping[str, str]) -> Figure:
    """Lines against steps, one panel per method: ``parts[method][part]``."""

    def draw(axes: Axes, method: str) -> None:
        for part, curve in parts[method].items():
            axes.plot(curve.x, curve.mean, color=colors[part], linewidth=1.6, label=part)
            if curve.seeds > 1:
                axes.fill_between(curve.x, curve.low, curve.high, color=colors[part], alpha=0.15, linewidth=0)

    return _small_multiples(list(parts), y, draw)


def ranges(parts: Mapping[str, Mapping[str, Curve]], y: str) -> Figure:
    """A mean and the range around it against steps, one panel per method: parts ``min``, ``mean`` and ``max``."""

    def draw(axes: Axes, method: str) -> None:
        curves = parts[method]
        if "min" in curves and "max" in curves:
            low, high = curves["min"], curves["max"]
            axes.fill_between(low.x, low.low, np.interp(low.x, high.x, high.high), color=COLORS[5], alpha=0.45,
                              linewidth=0, label="least to most")  # fmt: skip
        axes.plot(curves["mean"].x, curves["mean"].mean, color=COLORS[0], linewidth=1.8, label="mean")

    figure = _small_multiples(list(parts), y, draw)
    figure.axes[0].set_ylim(bottom=0)  # once all are drawn, as they share it
    return figure


def in_stack(parts: Iterable[str]) -> list[str]:
    """From the bottom: trained, discarded by reason, failed, buffered."""
    return sorted(parts, key=lambda part: ({"trained": 0, "failed": 2, "buffered": 3}.get(part, 1), part))


def stack_colors(parts: Sequence[str]) -> dict[str, str]:
    """Trained, failed and buffered look the same in every report; reasons of discards take turns."""
    reasons = [part for part in parts if part not in STACK]
    return STACK | {part: REASONS[place % len(REASONS)] for place, part in enumerate(reasons)}


def ordered_colors(parts: Sequence[str]) -> dict[str, str]:
    """From dark to light in the order of the parts, which colour-blind readers see as well."""
    places = np.linspace(0.0, 0.92, max(len(parts), 2))
    return {part: colormaps["viridis"](place) for part, place in zip(parts, places, strict=False)}


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    _clean(axes)
    return figure, axes


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
        axes.set_title(_text(name), loc="left", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _clean(axes)
    for axes in grid.flat[len(names) :]:
        axes.remove()
    _legend(figure, *grid.flat[: len(names)])
    return figure


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}")


def _legend(figure: Figure, *panels: Axes) -> None:
    """One for all panels, below them: inside it would hide something in one or the other."""
    entries: dict[str, object] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(_text(label), handle)
    if entries:
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=3, frameon=False, fontsize=9
        )


def _plain(curve: Curve) -> str:
    return f"{curve.name} ({curve.seeds} seeds)" if curve.seeds > 1 else curve.name


def _text(name: str) -> str:
    """A name as it is: ``$`` would begin a formula, and matplotlib hides labels that begin with ``_``."""
    return name.replace("$", r"\$").lstrip("_")
