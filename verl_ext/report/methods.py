"""Runs that differ only by their seed belong to one method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ext.report.runs import Run

SEED = re.compile(r"(?P<method>.+)_(?P<seed>\d+)")


@dataclass(frozen=True)
class Method:
    """One line of a plot: the runs of a method, one per seed."""

    name: str
    runs: tuple[Run, ...]


def without_seed(name: str) -> str:
    """The name without a trailing ``_<seed>``."""
    match = SEED.fullmatch(name)
    return match["method"] if match else name


def names(paths: Sequence[Path]) -> list[str]:
    """The files' names without ending, different from each other.

    Where two of a method are the same, all of that method get their folder's name before theirs, so that seeds of one
    folder stay together; where that does not help, the whole path.
    """
    stems = [path.stem for path in paths]
    clashing = {without_seed(stem) for stem in stems if stems.count(stem) > 1}
    chosen = [
        f"{path.resolve().parent.name}/{stem}" if without_seed(stem) in clashing else stem
        for stem, path in zip(stems, paths, strict=True)
    ]
    return [
        name if chosen.count(name) == 1 else str(path.resolve().with_suffix(""))
        for name, path in zip(chosen, paths, strict=True)
    ]


def by_method(runs: Sequence[Run]) -> list[Method]:
    """Methods in the order of their first run. A run whose seed is alone keeps its name: the number may be no seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(without_seed(run.name), []).append(run)
    return [Method(name if len(group) > 1 else group[0].name, tuple(group)) for name, group in groups.items()]
