"""Thousands of steps through real TransferQueue, agent loops and reward worker, with an engine that answers at once.

    python benchmarks/long_queue.py --model <folder> --steps 2000

No process may grow, and no step may become slower. benchmarks/long_run.py measures each recipe's policy in the same
way; this benchmark measures the trainer, its replay buffer, and the processes of verl and TransferQueue.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment

HUNDRED = 100


def main(
    model: Annotated[Path, typer.Option(help="Folder with a tokenizer and a config.json.")],
    recipe: str = "grpo",
    steps: Annotated[int, typer.Option(min=2 * HUNDRED, help="Training steps.")] = 2000,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 4,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per prompt.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per response.")] = 64,
) -> None:
    """Compare times and sizes of the first hundred steps with those of the last."""
    export_environment("cpu")  # before verl is imported
    from queue_trainer import DRIVER, PARTS, many_steps

    console = open_console()
    looks = []
    for look in many_steps(recipe, model.resolve(), prompts, rollouts, tokens, steps, HUNDRED):
        console.print(f"{HUNDRED * len(looks):,} steps: done; {look[1]} rows in the queue")
        looks.append(look)
    rows = []
    usages = [usage for usage, _ in looks]
    for part in (DRIVER, *PARTS):
        seconds = [usage[part].seconds for usage in usages]
        first, last = seconds[1] - seconds[0], seconds[-1] - seconds[-2]
        begin, end = usages[1][part], usages[-1][part]
        row = (
            part,
            f"{1e3 * first / HUNDRED:.1f}",
            f"{1e3 * last / HUNDRED:.1f}",
            f"{last / first:.2f}",
            f"{begin.memory / 2**20:.1f} → {end.memory / 2**20:.1f}",
            f"{begin.files} → {end.files}",
        )
        rows.append(row)
    header = ("process", "step, ms", "last, ms", "ratio", "memory, MiB", "open files")
    console.print(Table(f"{recipe}, {steps} steps", header, rows))


if __name__ == "__main__":
    typer.run(main)
