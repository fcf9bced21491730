"""Cost of everything except the model: a step of thousands of prompts through real TransferQueue, agent loops and
reward worker, with an engine that answers at once.

    python benchmarks/load_queue.py --model <folder> --prompts 1024 --prompts 4096

Costs are per rollout, so a quadratic cost shows as a growing column. The driver is our process: policy, controller and
checks for finished rollouts. The agent loops are ours, the reward worker is verl's, the queue is TransferQueue's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment


def main(
    model: Annotated[Path, typer.Option(help="Folder with a tokenizer and a config.json.")],
    recipe: str = "grpo",
    prompts: Annotated[list[int] | None, typer.Option(min=1, help="Prompts per step, repeatable.")] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts per prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per response.")] = 64,
) -> None:
    """Measure processor time and memory of the second of two steps."""
    export_environment("cpu")  # before verl is imported
    from queue_trainer import DRIVER, PARTS, one_step

    console = open_console()
    costs = [f"{part}, ms/rollout" for part in (DRIVER, *PARTS)]
    header = ("recipe", "prompts", "rollouts", "s/step", *costs, f"{DRIVER}, MiB", "queue, MiB")
    rows = []
    for count in prompts or [256, 512, 1024]:
        rows.append(one_step(recipe, model.resolve(), count, rollouts, tokens))
        console.print(f"{count:,} prompts: done")
    console.print(Table("Cost of a step", header, rows))


if __name__ == "__main__":
    typer.run(main)
