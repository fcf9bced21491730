"""Kills and breaks real training runs, and prints what became of each: recovered, refused clearly, or lost."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from support.training import Task, make_task

from faults.kills import RECIPES, chain
from faults.running import CASES, FULL_DISK
from faults.verdict import LOST, OUTCOMES

Result = tuple[str, str]  # fault, outcome
Job = Callable[[], Iterator[Result]]
console = Console(width=200, highlight=False)


def jobs(task: Task, folder: Path, names: list[str], recipes: list[str], tries: int, seed: int) -> Iterator[Job]:
    """Each recipe's kills, one after the other, and each of the other faults once.

    Every other recipe saves at each second step, the others at each.
    """
    for number, recipe in enumerate(recipes):
        if share := tries // len(recipes) + (number < tries % len(recipes)):
            moment = random.Random(f"{seed} {recipe}")
            yield partial(kill, task, recipe, folder / recipe, share, 1 + number % 2, moment)
    for number, name in enumerate(names):
        yield partial(break_one, name, task, folder / f"fault_{number}")


def kill(task: Task, recipe: str, folder: Path, kills: int, save_every: int, moment: random.Random) -> Iterator[Result]:
    for number, each in enumerate(chain(task, recipe, folder, kills, save_every, moment), 1):
        console.print(f"{recipe} {number}/{kills}: step {each.step}, {each.phase}: {each.outcome} {each.why}")
        yield f"SIGKILL, {recipe}", each.outcome
        yield f"SIGKILL in {each.phase}, about", each.outcome


def break_one(name: str, task: Task, folder: Path) -> Iterator[Result]:
    outcome, why = CASES[name](task, folder)
    console.print(f"{name}: {outcome} {why}")
    yield name, outcome


def main(
    tries: Annotated[int, typer.Option(min=0, help="Kills, over all recipes.")] = 50,
    recipes: Annotated[str, typer.Option(help="To kill, separated by commas.")] = ",".join(RECIPES),
    faults: Annotated[str, typer.Option(help="A part of the names of other faults; '' for all, 'none' for none.")] = "",
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time; each takes 7 GiB.")] = 2,
    seed: int = 0,
) -> None:
    """Print the table; exits with 1 if anything was lost."""
    chosen = recipes.split(",")
    if unknown := set(chosen) - set(RECIPES):
        raise typer.BadParameter(f"--recipes has {min(unknown)}; use {', '.join(RECIPES)}")
    names = [name for name in CASES if faults in name]
    if FULL_DISK in names and os.geteuid() != 0:
        names.remove(FULL_DISK)
        console.print(f"{FULL_DISK}: not tried, as only root can mount a small one")
    results: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(parallel) as pool:
        folder = Path(name)
        task = make_task(folder)
        todo = [pool.submit(lambda job: list(job()), job) for job in jobs(task, folder, names, chosen, tries, seed)]
        for done in as_completed(todo):
            for fault, outcome in done.result():
                results[fault][outcome] += 1
    table = Table("fault", "tries", *OUTCOMES)
    for fault, count in sorted(results.items()):
        table.add_row(fault, str(count.total()), *(str(count[outcome]) for outcome in OUTCOMES))
    console.print(table)
    raise typer.Exit(int(any(count[LOST] for count in results.values())))


if __name__ == "__main__":
    typer.run(main)
