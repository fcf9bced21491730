"""Compares the methods as docs/comparison.md says.

    python benchmarks/comparison.py run long_tailed n32 --processes 2
    python benchmarks/comparison.py run quickstart stack64 --task outputs/quickstart_small --processes 2
    python benchmarks/comparison.py world --task outputs/quickstart_small --out outputs/quickstart_mostly_solved
    python benchmarks/comparison.py report

``run`` tunes every method, and then runs the chosen settings on fresh seeds. It can be stopped and started again at any
time: runs that are kept in ``docs/comparison/`` are not repeated. The world ``quickstart`` is the quickstart's model
and data; ``world`` makes ``quickstart_mostly_solved``, the same model with other words. In these two worlds, tuning
runs are those of ``verl-ext learn``, and fresh seeds of the questions with ``stack`` in their names train on the real
stack.
``report`` reads the files and writes docs/comparison_results.md with its picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from comparison_results import write_page
from comparison_runs import (
    BUDGETS,
    FRESH,
    METHODS,
    REFERENCE,
    TUNING,
    Kept,
    Setting,
    choose,
    ranked,
    target_of,
)
from comparison_stack import mostly_solved, train
from rich.console import Console

from verl_ext.errors import option_errors
from verl_ext.lab.learn.hugging_face import FolderSource
from verl_ext.lab.learn.run import Length
from verl_ext.lab.learn.sweep import Job, Source, check, run_all, variants
from verl_ext.lab.learn.worlds import WORLDS, WorldSource
from verl_ext.lab.method import Method
from verl_ext.lab.report.accuracy import ROLLOUTS, accuracy_of

KEPT = Path(__file__).parent.parent / "docs" / "comparison"
LRS = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
STACK_LRS = (1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4)
LEAST_LR, MOST_LR = 1e-5, 5e-2  # the list of learning rates grows no further
NS = (4, 8, 16, 32, 64)
SECOND_ROUND = 3  # one setting in this many, and at least this many, run on all tuning seeds
TEST_EVERY = 500
QUICKSTARTS = ("quickstart", "quickstart_mostly_solved")  # worlds with the quickstart's model, for the real stack
console = Console()
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass(frozen=True)
class Question:
    """What is held fixed.

    Attributes:
        sizes: pairs of rollouts per prompt and prompts per step to choose from.
        methods: by name, as ``verl-ext learn`` reads them. A text with keys of its own sets the rollouts of a prompt,
            which it can write as ``{n}``.
        lrs: learning rates to choose from.
        task: of :mod:`verl_ext.lab.learn.tasks`.
        quickstart: whether the world is one of :data:`QUICKSTARTS`.
        on_stack: whether fresh seeds train on the real stack.
    """

    sizes: Sequence[tuple[int, int]]
    methods: Mapping[str, str]
    lrs: Sequence[float] = LRS
    task: str = "words"
    quickstart: bool = False
    on_stack: bool = False

    def variant(self, method: str, setting: Setting) -> Method:
        """A method with a setting, for the learner."""
        text = self.methods[method]
        ns = [setting.n] if text == method else []
        (variant,) = variants(text.format(n=setting.n), [setting.lr], ns, [setting.prompts])
        return variant.renamed(f"{method}-lr={setting.lr:g}-n={setting.n}-batch={setting.prompts}")


def plain(*methods: str) -> dict[str, str]:
    """Methods with their defaults, by their own names."""
    return dict(zip(methods, methods, strict=True))


PLAIN = plain(*METHODS)
ON_STACK = plain("grpo", "recall", "pods")
AGAIN = plain("grpo", "recall")
WITH_TOOL = {
    "grpo": "grpo",
    "prefix_sampling": "prefix_sampling",
    "without_prefixes": "prefix_sampling use_prefixes=false actor_rollout_ref.rollout.n={n}",
}
UNIFORM = {  # GRPO with the losses of VIP and of Knapsack-RL
    "uniform_rloo": "grpo n={n} algorithm.adv_estimator=rloo",
    "uniform_token_mean": "grpo n={n} actor_rollout_ref.actor.loss_agg_mode=token-mean "
    "rollout_driver.advantage_clip=5.0 prompt_weight=rollouts",
}
CONFIRMED = plain("grpo", "recall", "knapsack", "hora", "pods") | {
    "uniform_token_mean": UNIFORM["uniform_token_mean"],
}
QUICKSTARTS_PILOT_COMMIT = "pilot_commit n_pilot=4 n_commit=60 s=6 max_rounds=20 p_lower=0.25 p_upper=0.75"
ON_STACK_64 = {
    "grpo": "grpo",
    "dynamic_sampling": "dynamic_sampling",
    "pilot_commit": QUICKSTARTS_PILOT_COMMIT,
}
QUESTIONS = {
    "n32": Question([(32, 8)], PLAIN | UNIFORM),
    "n64": Question([(64, 8)], PLAIN | {"pilot_commit_quickstart": QUICKSTARTS_PILOT_COMMIT}),
    "step256": Question([(n, 256 // n) for n in NS], PLAIN),
    "confirm256": Question([(4, 64), (8, 32)], CONFIRMED, LRS[2:5]),
    "step1024": Question([(n, 1024 // n) for n in NS], PLAIN | {"uniform_token_mean": UNIFORM["uniform_token_mean"]}),
    "tool256": Question([(8, 32), (32, 8)], WITH_TOOL, task="tool"),
    "free": Question([(n, prompts) for n in NS[:3] for prompts in NS[1:]], CONFIRMED, LRS[1:5]),
    "stack64": Question([(64, 4)], ON_STACK_64, STACK_LRS, quickstart=True, on_stack=True),
    "stack256": Question([(n, 256 // n) for n in (4, 8, 16, 64)], ON_STACK, STACK_LRS, quickstart=True, on_stack=True),
    "confirm_stack64": Question([(64, 4)], ON_STACK_64, STACK_LRS[1:5], quickstart=True, on_stack=True),
    "confirm_stack256": Question([(4, 64), (8, 32)], AGAIN, STACK_LRS[2:], quickstart=True, on_stack=True),
    "lab256": Question([(4, 64), (8, 32)], AGAIN, STACK_LRS[2:5], quickstart=True),
}


class Experiment:
    """Makes the runs of a question in a world, and keeps them in a file. A kept run is not made again.

    Args:
        world: name of the world, and the first part of the file's name.
        question: one of :data:`QUESTIONS`.
        source: the world's model and tasks.
        scratch: folder for logs and states of runs.
        processes: number of runs at a time.
    """

    def __init__(self, world: str, question: str, source: Source, scratch: Path, processes: int):
        self.name, self.source, self.scratch, self.processes = f"{world}, {question}", source, scratch, processes
        self.question, self.tuning, self.fresh = QUESTIONS[question], TUNING[question], FRESH[question]
        self.length = Length(BUDGETS[question], TEST_EVERY)
        self.kept = Kept(KEPT / f"{world}-{question}.jsonl")

    def run(self, method: str, settings: Sequence[Setting], seeds: Sequence[int]) -> None:
        """Make the runs that are not kept yet."""
        lacking = [(setting, seed) for setting in settings for seed in seeds]
        lacking = [each for each in lacking if (method, *each) not in self.kept]
        make = self._on_stack if self.question.on_stack and seeds == self.fresh else self._in_lab
        for setting, seed, run in make(method, lacking):
            self.kept.add({"method": method, **setting._asdict(), "seed": seed, **run})

    def _in_lab(self, method: str, lacking: Sequence[tuple[Setting, int]]) -> Iterator[tuple[Setting, int, dict]]:
        """Runs of ``verl-ext learn``, several at a time."""
        jobs = [
            Job(self.question.variant(method, setting), self.source, self.length, seed, self.scratch)
            for setting, seed in lacking
        ]
        check(jobs)
        with console.status(f"{self.name}: {method}") as status:
            text = f"{self.name}: {method}, {len(jobs)} runs"
            runs = run_all(
                jobs, self.processes, lambda name, rollouts: status.update(f"{text}, {name}: {rollouts:,} rollouts")
            )
        for (setting, seed), run in zip(lacking, runs, strict=True):
            points = [(step, data) for step, data in run.records.items() if accuracy_of(data) is not None]
            yield (
                setting,
                seed,
                {
                    "ended": run.ended,
                    "steps": [step for step, _ in points],
                    "rollouts": [int(data.get(ROLLOUTS, 0)) for _, data in points],
                    "tokens": [int(data.get("tokens/sampled_total", 0)) for _, data in points],
                    "waves": [int(data.get("generation/waves_total", 0)) for _, data in points],
                    "accuracy": [round(accuracy_of(data) or 0.0, 4) for _, data in points],
                },
            )

    def _on_stack(self, method: str, lacking: Sequence[tuple[Setting, int]]) -> Iterator[tuple[Setting, int, dict]]:
        """Trainings with verl, one at a time."""
        assert isinstance(self.source, FolderSource)
        for setting, seed in lacking:
            text, folder = self.question.methods[method], self.scratch / f"{method}_{seed}"
            yield setting, seed, train(text, setting, seed, self.length.rollouts, self.source, folder)

    def tune(self, method: str, lrs: Sequence[float]) -> Setting:
        """The method's best setting on the tuning seeds; all settings run on the first seed, the best third on all."""
        settings = [Setting(lr, n, prompts) for n, prompts in self.question.sizes for lr in lrs]
        first = self.tuning[:1]
        self.run(method, settings, first)
        best = ranked(self.kept, method, settings, first, target_of(self.kept, first))
        self.run(method, best[: max(SECOND_ROUND, len(settings) // SECOND_ROUND)], self.tuning)
        return choose(self.kept, method, self.tuning)

    def tune_all(self, methods: Sequence[str]) -> dict[str, Setting]:
        """Each method's best setting. The list of learning rates grows until no method's best is at its end."""
        lrs = list(self.question.lrs)
        while True:
            chosen = {method: self.tune(method, lrs) for method in methods}
            longer = list(extended(lrs, [setting.lr for setting in chosen.values()]))
            if longer == lrs:
                return chosen
            lrs = longer
            console.print(f"{self.name}: a best learning rate is at the end of the list; now {lrs}")


def extended(lrs: Sequence[float], chosen: Sequence[float]) -> Iterator[float]:
    """The list of learning rates, continued by a factor of 2 at each end that holds a chosen one."""
    if lrs[0] in chosen and lrs[0] / 2 >= LEAST_LR:
        yield lrs[0] / 2
    yield from lrs
    if lrs[-1] in chosen and lrs[-1] * 2 <= MOST_LR:
        yield lrs[-1] * 2


@app.command()
def run(
    world: Annotated[
        str, typer.Argument(help=f"One of {', '.join(WORLDS)}, or with --task {' or '.join(QUICKSTARTS)}.")
    ],
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION", help=f"Some of {', '.join(QUESTIONS)}.")],
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help=f"Only these methods and {REFERENCE}, which sets the targets; by default all."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 1,
    scratch: Annotated[Path, typer.Option(help="Folder for logs and states of runs.")] = Path("outputs/comparison"),
    task: Annotated[Path | None, typer.Option(help="Folder of the quickstart, or of the command world.")] = None,
) -> None:
    """Tune the methods and run them on fresh seeds."""
    unknown = sorted(set(questions) - set(QUESTIONS))
    with_task = world in QUICKSTARTS
    if unknown or world not in (*WORLDS, *QUICKSTARTS):
        valid = f"a world of {', '.join((*WORLDS, *QUICKSTARTS))} and questions of {', '.join(QUESTIONS)}"
        raise typer.BadParameter(f"use {valid}")
    if any(QUESTIONS[name].quickstart != with_task for name in questions) or (task is None) == with_task:
        of_quickstart = ", ".join(name for name, question in QUESTIONS.items() if question.quickstart)
        worlds = " and ".join(QUICKSTARTS)
        raise typer.BadParameter(f"the worlds {worlds}, --task and the questions {of_quickstart} belong together")
    for name in questions:
        if not set(methods or ()) <= set(QUESTIONS[name].methods):
            raise typer.BadParameter(f"{name} has the methods {', '.join(QUESTIONS[name].methods)}")
    for name in questions:
        source = FolderSource(task / "model", task / "data") if task else WorldSource(world, QUESTIONS[name].task)
        source.load()
        experiment = Experiment(world, name, source, scratch / world / name, processes)
        chosen = experiment.tune_all(list(dict.fromkeys([REFERENCE, *(methods or experiment.question.methods)])))
        for method, setting in chosen.items():
            console.print(f"{experiment.name}: {method} with {json.dumps(setting._asdict())}")
        for method, setting in chosen.items():
            experiment.run(method, [setting], experiment.fresh)
        costs = {method: experiment.kept.final(method, chosen[method], experiment.fresh) for method in chosen}
        console.print(
            f"{experiment.name}: mean best accuracy", {m: round(float(np.mean(c)), 3) for m, c in costs.items()}
        )


@app.command("world")
def make_world(
    task: Annotated[Path, typer.Option(help="The quickstart's output folder, with model/.")],
    out: Annotated[Path, typer.Option(help="Folder to write, with model/ and data/.")],
) -> None:
    """Make the world quickstart_mostly_solved: the quickstart's model, with words of which it spells most."""
    with option_errors():
        for file, words in mostly_solved(task / "model", out).items():
            console.print(f"{file}: {words:,} words")


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="The page to write; its picture lies beside it.")] = KEPT.parent
    / "comparison_results.md",
) -> None:
    """Write the page with tables and a picture from the runs that are kept."""
    files = sorted(KEPT.glob("*.jsonl"))
    if not files:
        raise typer.BadParameter(f"{KEPT} holds no runs; begin with the command run.")
    kept = {}
    for file in files:
        world, question = file.stem.split("-")
        kept[world, question] = Kept(file)
    write_page(out, kept)
    console.print(f"{out}, reference {REFERENCE}")


if __name__ == "__main__":
    app()
