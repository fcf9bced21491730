"""Runs that differ only by their seed belong to one method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ext.lab.report.runs import Run, home

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
    """The names of the files without ending, and of the folders of event files, different from each other.

    Where two of a method are the same, all of that method get their folder's name before theirs, so that seeds of one
    folder stay together; where that does not help, the whole path; where that does not either, with its ending.
    """
    homes = [home(path) for path in paths]
    stems = [path.name for path in homes]
    clashing = {without_seed(stem) for stem in stems if stems.count(stem) > 1}
    chosen = [
        f"{path.parent.name}/{path.name}" if without_seed(path.name) in clashing else path.name
        for path in homes
    ]  # fmt: skip
    return [
        name if chosen.count(name) == 1 else str(whole) if homes.count(whole) == 1 else str(path.absolute())
        for name, whole, path in zip(chosen, homes, paths, strict=True)
    ]


def by_method(runs: Sequence[Run]) -> list[Method]:
    """Methods in the order of their first run. A run whose seed is alone keeps its name: the number may be no seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(without_seed(run.name), []).append(run)
    return [Method(name if len(group) > 1 else group[0].name, tuple(group)) for name, group in groups.items()]
