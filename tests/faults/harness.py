"""SIGKILL at random moments of real training runs: what was recovered, refused clearly, or lost.

Each try starts a run, kills everything of it at a random moment, starts the same command again, and compares what it
does with the checkpoint that it goes on from.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from support.training import Task, TrainingRun

from faults.verdict import compare
from verl_ext.driver.checkpoint import folder_to_resume, load_state

STEPS, SAVE_EVERY = 6, 2
COMMON = [
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={SAVE_EVERY}",
    f"trainer.test_freq={SAVE_EVERY}",
]
RECIPES = {
    "grpo": ["actor_rollout_ref.rollout.n=4"],
    "dapo": ["actor_rollout_ref.rollout.n=4", "rollout_policy.s=2"],
    "pilot_commit": [
        "rollout_policy.n_pilot=6",
        "rollout_policy.n_commit=2",
        "rollout_policy.p_solve=null",
        "rollout_policy.p_lower=0.15",
        "rollout_policy.p_upper=0.85",
    ],
    "hora": ["actor_rollout_ref.rollout.n=8", "rollout_policy.G0=4", "rollout_policy.shards=2"],
    "vip": ["actor_rollout_ref.rollout.n=8"],
    "knapsack": ["actor_rollout_ref.rollout.n=8"],
    "prefix_sampling": ["actor_rollout_ref.rollout.n=8"],
}
OUTCOMES = ("recovered", "refused clearly", "lost")


def try_once(task: Task, recipe: str, folder: Path, moment: random.Random) -> tuple[str, str, str]:
    """(the step that was being done, outcome, why)."""
    overrides = [*COMMON, *RECIPES[recipe], f"trainer.rollout_data_dir={folder}/rollouts"]
    step = moment.randrange(1, STEPS)
    first = TrainingRun(task, recipe, folder, *overrides)
    first.wait_for_step(step)
    started = time.monotonic()
    # Anywhere in the step that follows: generation, update, checkpoint, weight sync, validation.
    lasts = first.steps()[step]["timing_s/step"]
    time.sleep(moment.uniform(0, 1.2 * lasts))
    first.kill()
    when = f"{time.monotonic() - started:.1f} s after step {step}"
    before = first.steps()
    saved = folder_to_resume(first.checkpoints)
    state = None if saved is None else load_state(saved)
    second = TrainingRun(task, recipe, folder, *overrides)
    try:
        after = second.finish()
    except AssertionError as error:
        refusal = [line for line in second.log.splitlines() if line.startswith("error: ")]
        return when, "refused clearly" if refusal else "lost", refusal[-1] if refusal else str(error)[-300:]
    faults = compare(before, after, state, STEPS, inputs(folder / "rollouts"))
    return when, "lost" if faults else "recovered", "; ".join(faults)


def inputs(folder: Path) -> dict[int, list[str]]:
    """The texts of the prompts of every trained row, by step."""
    files = {int(path.stem): path for path in folder.glob("*.jsonl")}
    return {step: [json.loads(line)["input"] for line in path.read_text().splitlines()] for step, path in files.items()}


def make_task(folder: Path) -> Task:
    """96 prompts, and a model that gets some of them right; an epoch is 24 steps of uniform sampling."""
    data = [sys.executable, "-m", "verl_ext.data.reasoning_gym", "--out", f"{folder}/data"]
    subprocess.run([*data, "--train", "96", "--validation", "8"], check=True)
    warm_start = [sys.executable, "examples/quickstart/warm_start.py", "--data", f"{folder}/data"]
    subprocess.run([*warm_start, "--out", f"{folder}/model", "--steps", "150"], check=True)
    return Task(folder)


def main(
    tries: Annotated[int, typer.Option(min=1, help="Over all recipes, in turn.")] = 50,
    recipes: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(RECIPES),
    seed: int = 0,
) -> None:
    """Print the table; exits with 1 if anything was lost."""
    chosen, moment, console = recipes.split(","), random.Random(seed), Console(width=160)
    if unknown := set(chosen) - set(RECIPES):
        raise typer.BadParameter(f"--recipes has {min(unknown)}; use {', '.join(RECIPES)}")
    counts: dict[str, Counter[str]] = {recipe: Counter() for recipe in chosen}
    with tempfile.TemporaryDirectory() as name:
        task = make_task(Path(name))
        for number in range(tries):
            recipe = chosen[number % len(chosen)]
            when, outcome, why = try_once(task, recipe, Path(name) / f"try_{number}", moment)
            counts[recipe][outcome] += 1
            console.print(f"{number + 1}/{tries} {recipe}: killed {when}: {outcome} {why}")
    table = Table("fault", "tries", *OUTCOMES)
    for recipe, count in counts.items():
        table.add_row(f"SIGKILL, {recipe}", str(count.total()), *(str(count[outcome]) for outcome in OUTCOMES))
    console.print(table)
    raise typer.Exit(int(any(count["lost"] for count in counts.values())))


if __name__ == "__main__":
    typer.run(main)
