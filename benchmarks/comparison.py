"""Compares all methods in the lab as docs/comparison.md says.

    python benchmarks/comparison.py run long_tailed n32 --processes 2
    python benchmarks/comparison.py report

``run`` tunes every method, and then runs the chosen settings on fresh seeds. It can be stopped and started again at any
time: runs that are kept in ``docs/comparison/`` are not repeated. ``report`` reads these files and writes
docs/comparison_results.md with its picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from comparison_results import METHODS, REFERENCE, Kept, Setting, choose, ranked, target_of, write_page
from rich.console import Console

from verl_ext.lab.learn.run import Length
from verl_ext.lab.learn.sweep import Job, check, run_all, variants
from verl_ext.lab.learn.worlds import WORLDS, WorldSource
from verl_ext.lab.report.summary import ROLLOUTS, accuracy_of

KEPT = Path(__file__).parent.parent / "docs" / "comparison"
LRS = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
LEAST_LR, MOST_LR = 1e-5, 5e-2  # the list of learning rates grows no further
NS = (4, 8, 16, 32, 64)
TUNING, FRESH = (100, 101, 102), tuple(range(12))
SECOND_ROUND = 3  # of the settings, one in this many is run on all tuning seeds, and at least this many
QUESTIONS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "n32": ([(32, 8)], 20_000),
    "n64": ([(64, 8)], 40_000),
    "step256": ([(n, 256 // n) for n in NS], 20_000),
    "step1024": ([(n, 1024 // n) for n in NS], 80_000),
    "free": ([(n, prompts) for n in NS for prompts in NS], 20_000),
}
"""By name: the pairs of rollouts per prompt and prompts per step to choose from, and the rollouts of a run."""
TEST_EVERY = 500
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


class Experiment:
    """One question in one world: its runs so far, and the way to more of them."""

    def __init__(self, world: str, question: str, scratch: Path, processes: int):
        self.world, self.question, self.scratch, self.processes = world, question, scratch, processes
        self.sizes, rollouts = QUESTIONS[question]
        self.length = Length(rollouts, TEST_EVERY)
        self.kept = Kept(KEPT / f"{world}-{question}.jsonl")

    def run(self, method: str, settings: Sequence[Setting], seeds: Sequence[int]) -> None:
        """Make the runs that are not kept yet."""
        source = WorldSource(self.world)
        lacking = [(setting, seed) for setting in settings for seed in seeds]
        lacking = [each for each in lacking if (method, *each) not in self.kept]
        jobs = []
        for setting, seed in lacking:
            (variant,) = variants(method, [setting.lr], [setting.n], [setting.prompts])
            name = f"{method}-lr={setting.lr:g}-n={setting.n}-batch={setting.prompts}"
            jobs.append(Job(variant.renamed(name), source, self.length, seed, self.scratch))
        check(jobs)
        with console.status(f"{self.world}, {self.question}: {method}") as status:
            text = f"{self.world}, {self.question}: {method}, {len(jobs)} runs"
            runs = run_all(
                jobs, self.processes, lambda name, rollouts: status.update(f"{text}, {name}: {rollouts:,} rollouts")
            )
        for (setting, seed), run in zip(lacking, runs, strict=True):
            points = [(step, data) for step, data in run.records.items() if accuracy_of(data) is not None]
            self.kept.add(
                {
                    "method": method,
                    **setting._asdict(),
                    "seed": seed,
                    "ended": run.ended,
                    "steps": [step for step, _ in points],
                    "rollouts": [int(data.get(ROLLOUTS, 0)) for _, data in points],
                    "tokens": [int(data.get("tokens/sampled_total", 0)) for _, data in points],
                    "waves": [int(data.get("generation/waves_total", 0)) for _, data in points],
                    "accuracy": [round(accuracy_of(data) or 0.0, 4) for _, data in points],
                }
            )

    def tune(self, method: str, lrs: Sequence[float]) -> Setting:
        """The method's best setting on the tuning seeds; all settings run on the first seed, the best third on all."""
        settings = [Setting(lr, n, prompts) for n, prompts in self.sizes for lr in lrs]
        self.run(method, settings, TUNING[:1])
        best = ranked(self.kept, method, settings, TUNING[:1], target_of(self.kept, TUNING[:1]))
        second = best[: max(SECOND_ROUND, len(settings) // SECOND_ROUND)]
        self.run(method, second, TUNING)
        return choose(self.kept, method, TUNING)

    def tune_all(self, methods: Sequence[str] = METHODS) -> dict[str, Setting]:
        """Each method's best setting. The list of learning rates grows until no method's best is at its end."""
        lrs = list(LRS)
        while True:
            chosen = {method: self.tune(method, lrs) for method in methods}
            longer = list(extended(lrs, [setting.lr for setting in chosen.values()]))
            if longer == lrs:
                return chosen
            lrs = longer
            console.print(f"{self.world}, {self.question}: a best learning rate is at the end of the list; now {lrs}")


def extended(lrs: Sequence[float], chosen: Sequence[float]) -> Iterator[float]:
    """The list of learning rates, continued by a factor of 2 at each end that holds a chosen one."""
    if lrs[0] in chosen and lrs[0] / 2 >= LEAST_LR:
        yield lrs[0] / 2
    yield from lrs
    if lrs[-1] in chosen and lrs[-1] * 2 <= MOST_LR:
        yield lrs[-1] * 2


@app.command()
def run(
    world: Annotated[str, typer.Argument(help=f"One of {', '.join(WORLDS)}.")],
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION", help=f"Some of {', '.join(QUESTIONS)}.")],
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only these methods; by default all.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 1,
    scratch: Annotated[Path, typer.Option(help="Folder for logs and states of runs.")] = Path("outputs/comparison"),
) -> None:
    """Tune the methods and run them on fresh seeds."""
    unknown = sorted(set(questions) - set(QUESTIONS))
    if set(methods or ()) - set(METHODS):
        raise typer.BadParameter(f"use methods of {', '.join(METHODS)}")
    if world not in WORLDS or unknown:
        raise typer.BadParameter(f"use a world of {', '.join(WORLDS)} and questions of {', '.join(QUESTIONS)}")
    WorldSource(world).load()
    for question in questions:
        experiment = Experiment(world, question, scratch / world / question, processes)
        chosen = experiment.tune_all(methods or METHODS)
        for method, setting in chosen.items():
            console.print(f"{world}, {question}: {method} with {json.dumps(setting._asdict())}")
            experiment.run(method, [setting], FRESH)
        costs = {method: experiment.kept.final(method, setting, FRESH) for method, setting in chosen.items()}
        console.print(
            f"{world}, {question}: mean best accuracy", {m: round(float(np.mean(c)), 3) for m, c in costs.items()}
        )


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="The page to write; its picture lies beside it.")] = KEPT.parent
    / "comparison_results.md",
) -> None:
    """Write the page with tables and a picture from the runs that are kept."""
    files = sorted(KEPT.glob("*.jsonl"))
    if not files:
        raise typer.BadParameter(f"{KEPT} holds no runs; begin with the command run.")
    write_page(out, {tuple(file.stem.split("-")): Kept(file) for file in files}, TUNING, FRESH)
    console.print(f"{out}, reference {REFERENCE}")


if __name__ == "__main__":
    app()
