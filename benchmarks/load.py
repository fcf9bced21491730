"""Cost of the driver at thousands of prompts a step, without a model: controller, ledger, policy and state.

    python benchmarks/load.py --prompts 1024 --prompts 2048 --prompts 4096

Costs are per rollout, so a quadratic cost shows as a growing column. Times are processor times without the engine's
own, which is measured separately.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from model_free import policies

from verl_ext.controller import RolloutController
from verl_ext.lab.table import Table, open_console
from verl_ext.testing.engine import FastEngine, epochs, prompts, run_step

ROLLOUTS = 16  # per prompt
AT_ONCE = 64  # waves that finish between two checks for finished rollouts


class TimedEngine(FastEngine):
    """Measures its own processor time, in seconds."""

    seconds = 0.0

    def finish(self, count: int | None = None):
        started = time.process_time()
        try:
            return super().finish(count)
        finally:
            self.seconds += time.process_time() - started


def start(recipe: str, batch: int, folder: Path) -> RolloutController:
    """A run whose data is four batches of prompts, with success rates between 0.1 and 0.5."""
    rows = prompts(4 * batch)
    rates = np.random.default_rng(1).uniform(0.1, 0.5, len(rows)).tolist()
    policy = policies(folder, batch=batch, prompts=len(rows), rollouts=ROLLOUTS)[recipe]()
    policy.start_run(None, ["?"] * len(rows))
    engine = TimedEngine({row.id: rate for row, rate in zip(rows, rates, strict=True)})
    return RolloutController(policy, epochs(rows), len(rows), engine)


def microseconds_per_rollout(run: RolloutController, steps: int) -> float:
    """Processor time of the driver per rollout in the median step, in microseconds."""
    values = []
    for step in range(2, steps + 2):
        before, started = run.engine.seconds, time.process_time()
        run_step(run, step, at_once=AT_ONCE)
        run.metrics()
        own = time.process_time() - started - (run.engine.seconds - before)
        values.append(1e6 * own / run.ledger.step["rollouts/sampled"])
    return statistics.median(values)


def bytes_per_rollout(run: RolloutController) -> float:
    """Memory per rollout while all rollouts of a step are in memory, in bytes."""
    run.begin_step(1)
    waves = list(run.engine.waiting)
    tracemalloc.start()
    finished = run.engine.finish()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    run.engine.waiting = waves
    return size / sum(len(rollouts) for _, rollouts in finished)


def measure(recipe: str, batch: int, steps: int, folder: Path) -> list[str]:
    """The table row of one recipe and batch size."""
    memory = bytes_per_rollout(start(recipe, batch, folder))
    run = start(recipe, batch, folder)
    run_step(run, 1, at_once=AT_ONCE)
    driver = microseconds_per_rollout(run, steps)
    sampled = run.ledger.step["rollouts/sampled"]
    started = time.process_time()
    state = len(json.dumps(run.state_dict()))
    saving = time.process_time() - started
    cells = (f"{sampled:,}", f"{driver:.1f}", f"{driver * sampled / 1e6:.2f}", f"{memory:.0f}")
    return [recipe, f"{batch:,}", *cells, f"{state / 1e6:.1f}", f"{saving:.2f}"]


def main(
    recipes: Annotated[list[str] | None, typer.Argument(help="Recipes; default: grpo, pilot_commit, hora.")] = None,
    prompts: Annotated[list[int] | None, typer.Option(min=8, help="Prompts trained per step, repeatable.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 3,
) -> None:
    """Measure the driver's cost per rollout."""
    header = (
        "recipe",
        "prompts",
        "rollouts",
        "driver, µs/rollout",
        "s/step",
        "bytes/rollout",
        "state, MB",
        "JSON, s",
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes or ("grpo", "pilot_commit", "hora"):
            for batch in prompts or (1024, 2048, 4096):
                rows.append(measure(recipe, batch, steps, Path(folder)))
    title = f"{ROLLOUTS} rollouts per trained prompt, median of {steps} steps"
    open_console().print(Table(title, header, rows))


if __name__ == "__main__":
    typer.run(main)
