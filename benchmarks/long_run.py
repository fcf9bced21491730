"""Thousands of steps of every recipe through the controller, ledger and policy, with an engine that costs nothing.

    PYTHONPATH=.:tests python benchmarks/long_run.py --steps 2000

Nothing may grow, and no step may become slower. Times are of the processor, so other processes do not count; they
include the engine's.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from support.long_run import Sizes, policies, run

HUNDRED = 100


def measure(recipe: str, steps: int, folder: Path) -> list[Sizes]:
    """The sizes after every hundred steps."""
    return list(run(policies(folder)[recipe](), steps, HUNDRED))


def row(recipe: str, sizes: list[Sizes]) -> list[str]:
    """First hundred against last; the state is also compared with the largest on the way."""
    first, last = sizes[0], sizes[-1]
    largest = max(size.state_bytes for size in sizes[1:])
    return [
        recipe,
        f"{1000 * first.cpu_seconds:.2f}",
        f"{1000 * last.cpu_seconds:.2f}",
        f"{last.cpu_seconds / first.cpu_seconds:.2f}",
        f"{first.memory / 2**20:.1f} → {last.memory / 2**20:.1f}",
        f"{first.state_bytes / 1000:.0f} → {last.state_bytes / 1000:.0f} (≤ {largest / 1000:.0f})",
        f"{first.live} → {last.live}",
        f"{first.log_records} → {last.log_records}",
        f"{first.files} → {last.files}",
    ]


def main(
    recipes: Annotated[list[str] | None, typer.Argument(help="Which; all by default.")] = None,
    steps: Annotated[int, typer.Option(min=2 * HUNDRED)] = 2000,
) -> None:
    """Print the table: each value in or after the first hundred steps, and the last."""
    columns = ("recipe", "step, ms", "last, ms", "ratio", "memory, MiB", "state, kB", "live groups", "log", "files")
    table = Table(*columns, title=f"{steps} steps: first hundred → last")
    with tempfile.TemporaryDirectory() as folder:
        names = recipes or list(policies(Path(folder)))
        # A process each, so that memory is the recipe's own.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            runs = {name: pool.submit(measure, name, steps, Path(folder)) for name in names}
            for name, future in runs.items():
                table.add_row(*row(name, future.result()))
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
