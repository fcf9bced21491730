"""Seconds and memory of every stage of a large training step in the driver, on the real TransferQueue.

    python benchmarks/large_step.py --model <folder> --rows 12288 --tokens 4096

Once the rows are in the queue, verl's step runs: the policy's batch, padding rows, balance, old log-probs, advantages,
update, checkpoint, metrics, rollout logs and clearing. Only two things are left out: the agent loops, which
benchmarks/real_queue.py measures, and the work of the actor's workers. Ray gives verl's driver one thread for torch,
and so does this benchmark.

For each stage the table has seconds, processor seconds of driver and queue, which depend less on other work on the
machine, and the growth of the driver's resident memory at the stage's peak.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import typer

from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment

ROLLOUTS = 16  # per prompt


def main(
    model: Annotated[Path, typer.Option(help="Folder with a tokenizer and a config.json.")],
    recipe: str = "grpo",
    rows: Annotated[int, typer.Option(min=ROLLOUTS, help="Rows of the step, a multiple of 128.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per response.")] = 4096,
    freeze: Annotated[bool, typer.Option(help="Freeze the objects of imports, as the driver's fit does.")] = True,
    override: Annotated[list[str] | None, typer.Option(help="key=value, repeatable.")] = None,
) -> None:
    """Measure one step."""
    export_environment("cpu")  # before verl is imported
    import torch
    from queue_trainer import loaded_trainer
    from stages import MeasuredTrainer

    torch.set_num_threads(1)

    # A clip makes the driver read and write all advantages, as groups of different sizes do.
    further = ["rollout_driver.advantage_clip=5", *(override or ())]
    sizes = {"prompts": rows // ROLLOUTS, "rollouts": ROLLOUTS, "tokens": tokens, "steps": 1}
    with loaded_trainer(recipe, model.resolve(), *further, **sizes, kind=MeasuredTrainer) as trainer:
        if freeze:
            gc.freeze()
        batch = trainer.whole_step(1)
        meter = trainer.meter
    table = [
        [name, *(f"{part[name]:.1f}" for part in (meter.seconds, meter.driver, meter.queue)), f"{peak / 2**20:,.0f}"]
        for name, peak in meter.peaks.items()
    ]
    header = ("stage", "seconds", "processor: driver", "queue", "peak, MiB")
    console = open_console()
    console.print(Table(f"{len(batch):,} rows of {tokens:,} tokens", header, table))
    whole, saved = trainer.whole_queue / 1e6, trainer.saved_queue / 1e6
    console.print(f"queue on disk: {saved:,.1f} MB in the checkpoint, {whole:,.1f} MB with the trained rows")


if __name__ == "__main__":
    typer.run(main)
