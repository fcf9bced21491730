"""A method's curve: mean and range over its seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl_ext.lab.report.methods import Method
from verl_ext.lab.report.runs import Run, Series


@dataclass(frozen=True)
class Curve:
    """One line with its band.

    Attributes:
        x, mean, low, high: of the same length, at least 1.
        seeds: how many runs are behind it; with one, the band is the line.
    """

    name: str
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def over_seeds(name: str, series: list[Series]) -> Curve | None:
    """Mean and range where all seeds have values; None where there is none.

    Seeds may have been measured at different places, for instance after different numbers of rollouts. Between two of
    its own a seed is taken to be linear; beyond its first and last it is not continued, and the curve ends.
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


def of_methods(methods: list[Method], of_run: Callable[[Run], Series]) -> list[Curve | None]:
    """A curve per method, in their order; None for those that lack it."""
    return [over_seeds(method.name, [of_run(run) for run in method.runs]) for method in methods]


def parts_over_seeds(name: str, parts: list[dict[str, Series]]) -> dict[str, Curve]:
    """A curve per part, over the seeds that have it; parts in the order in which they appear."""
    keys = dict.fromkeys(key for seed in parts for key in seed)
    found = {key: over_seeds(name, [seed[key] for seed in parts if key in seed]) for key in keys}
    return {key: curve for key, curve in found.items() if curve is not None}
