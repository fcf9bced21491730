"""A step of thousands of prompts through real TransferQueue, agent loops and reward worker, with an engine that answers
at once: what everything but the model costs.

    python benchmarks/load_queue.py --model <folder> --prompts 1024 --prompts 4096

Per rollout, so that whatever is quadratic shows as a column that grows. The driver is our process: policy, controller,
and looking at TransferQueue. The agent loops, the reward worker and the queue itself are verl's and TransferQueue's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.launch import export_environment


def main(
    model: Annotated[Path, typer.Option(help="A folder with a tokenizer and a config.json.")],
    recipe: str = "grpo",
    prompts: Annotated[list[int] | None, typer.Option(min=1, help="A step, repeatable.")] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Of every response.")] = 64,
) -> None:
    """Print the table."""
    export_environment("cpu")  # before verl is imported
    from queue_trainer import DRIVER, PARTS, one_step

    console = Console(width=160)
    costs = [f"{part}, ms/rollout" for part in (DRIVER, *PARTS)]
    table = Table("recipe", "prompts", "rollouts", "s/step", *costs, f"{DRIVER}, MiB", "queue, MiB")
    for count in prompts or [256, 512, 1024]:
        table.add_row(*one_step(recipe, model.resolve(), count, rollouts, tokens))
        console.print(f"{count:,} prompts: done")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
