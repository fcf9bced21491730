"""Thousands of steps of every recipe through the controller, ledger and policy, with an engine that costs nothing.

    python benchmarks/long_run.py --steps 2000

No size may grow, and no step may become slower. A hundred further steps are compared with the first hundred of a second
run; the two runs take turns step by step, so that a change of the machine's speed affects both. Times are processor
times, on which other processes have little effect; they include the engine's.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from model_free import LongRun, policies

from verl_ext.lab.table import Table, open_console

HUNDRED = 100


def measure(recipe: str, steps: int, folder: Path) -> list[str]:
    """Table row of one recipe: sizes after the first hundred steps and after all; of the state, also the largest."""
    make = policies(folder)[recipe]
    with LongRun(make(), steps + HUNDRED) as run, LongRun(make(), steps + HUNDRED) as second:
        sizes = [run.sizes_after(HUNDRED) for _ in range(steps // HUNDRED)]
        times = [(second.step(), run.step()) for _ in range(HUNDRED)]
    first, last = sizes[0], sizes[-1]
    fresh, old = (statistics.median(column) for column in zip(*times, strict=True))
    largest = max(size.state_bytes for size in sizes[1:])
    return [
        recipe,
        f"{1000 * fresh:.2f}",
        f"{1000 * old:.2f}",
        f"{old / fresh:.2f}",
        f"{first.memory / 2**20:.1f} → {last.memory / 2**20:.1f}",
        f"{first.state_bytes / 1000:.0f} → {last.state_bytes / 1000:.0f} (≤ {largest / 1000:.0f})",
        f"{first.live} → {last.live}",
        f"{first.log_records} → {last.log_records}",
        f"{first.files} → {last.files}",
    ]


def main(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes; default: all.")] = None,
    steps: Annotated[int, typer.Option(min=2 * HUNDRED, help="Training steps.")] = 2000,
) -> None:
    """Compare times and sizes of the first hundred steps with those of the last."""
    header = ("recipe", "step, ms", "last, ms", "ratio", "memory, MiB", "state, kB", "live groups", "log", "files")
    with tempfile.TemporaryDirectory() as folder:
        names = recipes or list(policies(Path(folder)))
        # One process per recipe, to separate their memory.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            rows = list(pool.map(measure, names, [steps] * len(names), [Path(folder)] * len(names)))
    open_console().print(Table(f"{steps} steps: first hundred → last", header, rows))


if __name__ == "__main__":
    typer.run(main)
