"""Cost of everything except the model: steps through real TransferQueue, agent loops and reward worker, with an engine
that answers at once.

    python benchmarks/real_queue.py load --model <folder> --prompts 1024 --prompts 4096
    python benchmarks/real_queue.py long-run --model <folder> --steps 2000

``load`` measures steps of thousands of prompts. Costs are per rollout, so a quadratic cost shows as a growing column.
``long-run`` measures thousands of steps. No process may grow, and no step may become slower.

The driver is our process: policy, controller and checks for finished rollouts. The agent loops are ours, the reward
worker is verl's, the queue is TransferQueue's. benchmarks/load.py and benchmarks/long_run.py measure the driver and the
policies alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment

HUNDRED = 100
Model = Annotated[Path, typer.Option(help="Folder with a tokenizer and a config.json.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens per response.")]
app = typer.Typer(add_completion=False, help=__doc__)
console = open_console()


@app.command()
def load(
    model: Model,
    recipe: str = "grpo",
    prompts: Annotated[list[int] | None, typer.Option(min=1, help="Prompts per step, repeatable.")] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts per prompt.")] = 16,
    tokens: Tokens = 64,
) -> None:
    """Measure processor time and memory of the second of two steps."""
    export_environment("cpu")  # before verl is imported
    from queue_trainer import DRIVER, PARTS, looks

    rows = []
    for count in prompts or [256, 512, 1024]:
        before, after = looks(recipe, model.resolve(), count, rollouts, tokens, steps=1)
        used = [after.usage[part].seconds - before.usage[part].seconds for part in (DRIVER, *PARTS)]
        row = (
            recipe,
            f"{count:,}",
            f"{after.sampled:,}",
            f"{after.clock - before.clock:.0f}",
            *(f"{1e3 * seconds / after.sampled:.2f}" for seconds in used),
            *(f"{after.usage[part].memory / 2**20:,.0f}" for part in (DRIVER, "queue")),
        )
        rows.append(row)
        console.print(f"{count:,} prompts: done")
    costs = [f"{part}, ms/rollout" for part in (DRIVER, *PARTS)]
    header = ("recipe", "prompts", "rollouts", "s/step", *costs, f"{DRIVER}, MiB", "queue, MiB")
    console.print(Table("Cost of a step", header, rows))


@app.command()
def long_run(
    model: Model,
    recipe: str = "grpo",
    steps: Annotated[int, typer.Option(min=2 * HUNDRED, help="Training steps.")] = 2000,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 4,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts per prompt.")] = 4,
    tokens: Tokens = 64,
) -> None:
    """Compare times and sizes of the first hundred steps with those of the last."""
    export_environment("cpu")  # before verl is imported
    from queue_trainer import DRIVER, PARTS, looks

    usages = []
    for look in looks(recipe, model.resolve(), prompts, rollouts, tokens, steps, HUNDRED):
        console.print(f"{HUNDRED * len(usages):,} steps: done; {look.rows} rows in the queue")
        usages.append(look.usage)
    rows = []
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
    app()
