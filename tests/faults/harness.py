"""Kills and breaks real training runs, and prints what became of each: recovered, refused clearly, or lost."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from support.training import Task

from faults.kills import RECIPES, chain
from faults.running import CASES
from faults.verdict import LOST, OUTCOMES

Results = dict[str, Counter[str]]
console = Console(width=200, highlight=False)


def kill_all(task: Task, folder: Path, recipes: list[str], tries: int, parallel: int, seed: int, results: Results):
    """``tries`` kills, spread over the recipes; every other recipe saves at each step, the others at each second."""

    def kill(number: int, recipe: str) -> None:
        share = tries // len(recipes) + (number < tries % len(recipes))
        moment = random.Random(f"{seed} {recipe}")
        for attempt, kill in enumerate(chain(task, recipe, folder / recipe, share, 1 + number % 2, moment), 1):
            results[f"SIGKILL, {recipe}"][kill.outcome] += 1
            results[f"SIGKILL in {kill.phase} (about)"][kill.outcome] += 1
            console.print(f"{recipe} {attempt}/{share}: step {kill.step}, {kill.phase}: {kill.outcome} {kill.why}")

    with ThreadPoolExecutor(parallel) as pool:
        for done in as_completed([pool.submit(kill, *each) for each in enumerate(recipes) if each[0] < tries]):
            done.result()


def break_all(task: Task, folder: Path, names: list[str], results: Results) -> None:
    """Each fault once, one after the other."""
    for number, name in enumerate(names):
        outcome, why = CASES[name](task, folder / str(number))
        results[name][outcome] += 1
        console.print(f"{name}: {outcome} {why}")


def make_task(folder: Path) -> Task:
    """96 prompts, and a model that gets some of them right; an epoch is 24 steps of uniform sampling."""
    data = [sys.executable, "-m", "verl_ext.data.reasoning_gym", "--out", f"{folder}/data"]
    subprocess.run([*data, "--train", "96", "--validation", "8"], check=True)
    warm_start = [sys.executable, "examples/quickstart/warm_start.py", "--data", f"{folder}/data"]
    subprocess.run([*warm_start, "--out", f"{folder}/model", "--steps", "150"], check=True)
    return Task(folder)


def main(
    tries: Annotated[int, typer.Option(min=0, help="Kills, over all recipes.")] = 50,
    recipes: Annotated[str, typer.Option(help="To kill, separated by commas.")] = ",".join(RECIPES),
    faults: Annotated[str, typer.Option(help="A part of the names of other faults; '' for all, 'none' for none.")] = "",
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time, of those that are killed.")] = 2,
    seed: int = 0,
) -> None:
    """Print the table; exits with 1 if anything was lost."""
    chosen = recipes.split(",")
    if unknown := set(chosen) - set(RECIPES):
        raise typer.BadParameter(f"--recipes has {min(unknown)}; use {', '.join(RECIPES)}")
    names = [name for name in CASES if faults in name]
    results: Results = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder)
        break_all(task, folder / "faults", names, results)
        kill_all(task, folder / "kills", chosen, tries, parallel, seed, results)
    table = Table("fault", "tries", *OUTCOMES)
    for fault, count in sorted(results.items()):
        table.add_row(fault, str(count.total()), *(str(count[outcome]) for outcome in OUTCOMES))
    console.print(table)
    raise typer.Exit(int(any(count[LOST] for count in results.values())))


if __name__ == "__main__":
    typer.run(main)
