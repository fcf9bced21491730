"""Compares methods on a small learner that really learns.

verl-ext learn grpo pilot_commit dynamic_sampling
verl-ext learn grpo "pilot_commit s=6" --lr 3e-4,1e-3 --n 8,32 --seeds 4 --processes 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl_ext.errors import option_errors
from verl_ext.files import check_folder
from verl_ext.lab.comparison import LabRun, Methods, compare, cost_table, print_comparison
from verl_ext.lab.learn.run import AlreadyRunning, Length
from verl_ext.lab.learn.sweep import LR, Job, Source, check, run_all, variants
from verl_ext.lab.learn.tasks import TASKS
from verl_ext.lab.learn.worlds import WORLDS, WorldSource
from verl_ext.lab.table import open_console

SWEPT = "Several, separated by commas, make a sweep."


def main(
    methods: Methods,
    world: Annotated[str, typer.Option(help=f"Distribution of the prompts: {', '.join(WORLDS)}.")] = "long_tailed",
    task: Annotated[str, typer.Option(help=f"What the model learns: {', '.join(TASKS)}.")] = "words",
    model: Annotated[
        Path | None, typer.Option(help="A model in Hugging Face format, in place of the lab's; needs --data.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the model's train.parquet and validation.parquet, in place of --world."),
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Training prompts; by default 4,096, 256 in few_prompts, or the whole file."),
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of a run, pilots included.")] = 20_000,
    test_every: Annotated[int, typer.Option(min=1, help="Rollouts between two measurements.")] = 500,
    lr: Annotated[str, typer.Option(help=f"Learning rate (0.001; required with --model). {SWEPT}")] = "",
    n: Annotated[str, typer.Option(help=f"Rollouts per trained prompt (the recipe's). {SWEPT}")] = "",
    batch_size: Annotated[str, typer.Option(help=f"Prompts per step (8, or the method's). {SWEPT}")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method and setting.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 1,
    target: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Accuracy to reach (the best one reached by every run that learned)."),
    ] = None,
    embedding_correlation: Annotated[
        float, typer.Option(min=0, max=1, help="Correlation of prompt embeddings with difficulty.")
    ] = 0.5,
    out: Annotated[Path, typer.Option(help="Folder for the logs, <method>_<seed>.jsonl.")] = Path("outputs/learn"),
) -> None:
    """Train a small model with each method, and compare the cost of reaching the same accuracy.

    The same command goes on where it was interrupted, and leaves out finished runs.
    """
    console = open_console()
    with option_errors():
        check_folder(out)
        source = _source(world, task, model, data, prompts, bool(lr) or all(f"{LR}=" in text for text in methods))
        length = Length(rollouts, test_every, embedding_correlation)
        sizes = _numbers("--batch-size", batch_size, int)
        settings = [
            method
            for text in methods
            for method in variants(text, _numbers("--lr", lr, float), _numbers("--n", n, int), sizes)
        ]
        chosen = range(first_seed, first_seed + seeds)
        jobs = [Job(method, source, length, seed, out) for method in settings for seed in chosen]
        if isinstance(source, WorldSource):
            _warm_up(source, console)
        check(jobs)
    try:
        runs = _run(jobs, processes, console)
    except AlreadyRunning as error:
        raise typer.BadParameter(str(error)) from error
    by_method: dict[str, list[LabRun]] = {}
    for job, run in zip(jobs, runs, strict=True):
        by_method.setdefault(job.method.name, []).append(run)
    found, costs = compare(by_method, target)
    print_comparison(cost_table(found, costs), costs, out, console)


def _source(world: str, task: str, model: Path | None, data: Path | None, prompts: int | None, has_lr: bool) -> Source:
    if (model is None) != (data is None):
        raise ValueError("--model and --data belong together: give both or neither.")
    if model is None or data is None:
        return WorldSource(world, task, prompts)
    if not has_lr:
        raise ValueError("--lr is missing: 0.001 is for the lab's model; use that of yours, 5e-5 for the quickstart's.")
    from verl_ext.lab.learn.hugging_face import FolderSource

    return FolderSource(model, data, prompts)


def _numbers(option: str, text: str, kind: Callable[[str], float]) -> list:
    """The numbers in a list separated by commas."""
    try:
        found = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [0]
    if any(number <= 0 for number in found) or len(set(found)) < len(found):
        wanted = "different numbers above 0" if kind is float else "different integers of at least 1"
        raise ValueError(f"{option}={text} is not valid: use {wanted}, separated by commas.")
    return found


def _warm_up(source: WorldSource, console: Console) -> None:
    """Make the world, or find it made."""
    with console.status(f"Warm start of the task {source.task}") as status:
        source.load(lambda step, solved: status.update(f"Warm start, step {step}: {solved:.0%} of the levels solved"))


def _run(jobs: Sequence[Job], processes: int, console: Console) -> list[LabRun]:
    """Run the jobs; one progress bar shows them all, with the name of the run that reported last."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    sampled = {job.files.name: job.length.rollouts if job.files.finished() else 0 for job in jobs}
    most = {job.files.name: job.length.rollouts for job in jobs}
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("rollouts", total=sum(most.values()), completed=sum(sampled.values()))

        def on_progress(name: str, rollouts: int) -> None:
            sampled[name] = min(rollouts, most[name])
            progress.update(bar, description=name, completed=sum(sampled.values()))

        return run_all(jobs, processes, on_progress)
