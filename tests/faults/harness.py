"""Kills and breaks real training runs, and prints the outcome of each: recovered, refused clearly, or lost."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from support.configs import RECIPES
from support.training import Task, make_task

from faults.kills import chain
from faults.running import CASES
from faults.runs import NotTried, stop_all
from faults.verdict import LOST, OUTCOMES

Result = tuple[str, str]  # fault, outcome
Job = Callable[[], Iterator[Result]]
INTERRUPTED = 130
console = Console(width=200, highlight=False, markup=False)


def jobs(
    task: Task, folder: Path, names: list[str], recipes: list[str], tries: int, seed: int
) -> Iterator[tuple[str, Job]]:
    """Each recipe's kills, one after the other, and each of the other faults once, by name.

    The first recipe saves a checkpoint at every step, the second at every second step, and so on in turn.
    """
    for number, recipe in enumerate(recipes):
        if share := tries // len(recipes) + (number < tries % len(recipes)):
            moment = random.Random(f"{seed} {recipe}")
            yield f"SIGKILL, {recipe}", partial(kill, task, recipe, folder / recipe, share, 1 + number % 2, moment)
    for number, name in enumerate(names):
        yield name, partial(break_one, name, task, folder / f"fault_{number}")


def kill(task: Task, recipe: str, folder: Path, kills: int, save_every: int, moment: random.Random) -> Iterator[Result]:
    for number, each in enumerate(chain(task, recipe, folder, kills, save_every, moment), 1):
        console.print(f"{recipe} {number}/{kills}: step {each.step}, {each.phase}: {each.outcome} {each.why}")
        yield f"SIGKILL, {recipe}", each.outcome
        yield f"SIGKILL in {each.phase}, about", each.outcome


def break_one(name: str, task: Task, folder: Path) -> Iterator[Result]:
    outcome, why = CASES[name](task, folder)
    console.print(f"{name}: {outcome} {why}")
    yield name, outcome


def do(name: str, job: Job, results: list[Result]) -> None:
    """Append the results of a job as they arrive. A job that raises an error is lost; the other jobs continue."""
    try:
        for result in job():
            results.append(result)
    except NotTried as reason:
        console.print(f"{name}: not tried, {reason}")
    except Exception as error:
        console.print(f"{name}: {LOST}, {type(error).__name__}: {str(error)[-1000:]}")
        results.append((name, LOST))


def give_up(todo: list[Future]) -> None:
    """End the running jobs and start no others, so that their folders can be removed."""
    for job in todo:
        job.cancel()
    while not all(job.done() for job in todo):
        stop_all()
        time.sleep(0.5)


def table(results: list[Result]) -> Table:
    """Number of outcomes of each kind for each fault, in markdown."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for fault, outcome in results:
        counts[fault][outcome] += 1
    rows = Table("fault", "tries", *OUTCOMES, box=box.MARKDOWN)
    for fault, count in sorted(counts.items()):
        rows.add_row(fault, str(count.total()), *(str(count[outcome]) for outcome in OUTCOMES))
    return rows


def main(
    tries: Annotated[int, typer.Option(min=0, help="Kills, over all recipes.")] = 50,
    recipes: Annotated[str, typer.Option(help="Recipes to kill, separated by commas.")] = ",".join(RECIPES),
    faults: Annotated[
        str, typer.Option(help="Other faults with this text in their name; '' for all, 'none' for none.")
    ] = "",
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time; each takes 7 GiB.")] = 2,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="File for the table, in markdown.")] = None,
) -> None:
    """Print the table; exits with 1 if a run was lost. After an interruption, the table has the finished jobs."""
    chosen = recipes.split(",")
    if unknown := set(chosen) - set(RECIPES):
        raise typer.BadParameter(f"--recipes has {min(unknown)}; use {', '.join(RECIPES)}")
    names = [name for name in CASES if faults in name]
    results: list[Result] = []
    interrupted = False
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(parallel) as pool:
        folder = Path(name)
        task = make_task(folder)
        todo = [pool.submit(do, *job, results) for job in jobs(task, folder, names, chosen, tries, seed)]
        try:
            wait(todo)
        except KeyboardInterrupt:
            interrupted, results = True, list(results)  # ends from now on are results of the interruption
            give_up(todo)
    console.print(table(results))
    if out is not None:
        with out.open("w", encoding="utf-8") as file:
            Console(file=file, width=200).print(table(results))
    lost = any(outcome == LOST for _, outcome in results)
    raise typer.Exit(INTERRUPTED if interrupted else int(lost))


if __name__ == "__main__":
    typer.run(main)
