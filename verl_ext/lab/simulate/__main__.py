"""Simulate recipes on a population of prompts before spending on them.

python -m verl_ext.lab.simulate grpo dynamic_sampling pilot_commit
python -m verl_ext.lab.simulate "grpo n=16" "pilot_commit n_pilot=8 n_commit=8" --population prompts.parquet --seeds 5
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TextIO

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from verl_ext.lab.report.runs import find_runs, read_run
from verl_ext.lab.simulate import LearningModel, Method, Simulated, World, simulate
from verl_ext.lab.simulate.fitting import fit_shared
from verl_ext.lab.simulate.hardware import Hardware
from verl_ext.lab.simulate.lengths import LengthModel
from verl_ext.lab.simulate.outcomes import cost_table, outcomes, waste_table
from verl_ext.lab.simulate.population import draw_logits
from verl_ext.lab.simulate.prefix_effect import PrefixEffect
from verl_ext.lab.simulate.run import DATA_SEED


def option(text: str, panel: str, **bounds: float) -> typer.models.OptionInfo:
    """One of a model's parameters."""
    return typer.Option(help=text, rich_help_panel=panel, **bounds)


def main(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Recipes, or .yaml files with a rollout_policy, the first of them the one to compare with; with "
            'overrides in quotes: "grpo n=16". A key without dots is one of rollout_policy. A name of its own: '
            '"mine:grpo n=16".',
        ),
    ],
    population: Annotated[
        str,
        typer.Option(
            help="A preset, weight:alpha:beta,... of a Beta mixture, or a .parquet or .jsonl file with "
            "success_rate, or successes and trials, of each prompt."
        ),
    ] = "polaris_8b",
    prompts: Annotated[int | None, typer.Option(min=1, help="Rows of the data; default 10,000 or the file's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="data.train_batch_size, unless a method says.")] = 128,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 3,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="Accuracy to reach; default: the best that every run reached.")
    ] = None,
    stop_at_target: Annotated[bool, typer.Option(help="End a run once it is there; needs --target.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the logs, <method>_<seed>.jsonl.")] = Path("outputs/simulation"),
    mode: Annotated[str, typer.Option(help="sync, colocate_async or separate_async: docs/modes.md.")] = "sync",
    test_freq: Annotated[int, typer.Option(min=1, help="Steps between validations.")] = 5,
    embedding_correlation: Annotated[
        float, typer.Option(min=0, max=1, help="What embeddings know of a prompt's difficulty (vip).")
    ] = 0.5,
    shared: Annotated[float, option("Logits that every prompt gains per unit of signal.", "Learning", min=0)] = 0.02,
    own: Annotated[float, option("Logits that a trained prompt gains beside.", "Learning", min=0)] = 0.1,
    noise: Annotated[float, option("Gradient noise of a rollout.", "Learning", min=0)] = 200.0,
    staleness: Annotated[
        float, option("Share of a group's effect lost per version of delay.", "Learning", min=0, max=1)
    ] = 0.0,
    advantage: Annotated[str, option("grpo or rloo.", "Learning")] = "grpo",
    prefix_transfer: Annotated[float, option("What a re-rollout's signal counts.", "Learning", min=0, max=1)] = 1.0,
    optimizer: Annotated[str, option("sgd or adam.", "Learning")] = "sgd",
    fit: Annotated[Path | None, option("Log of a run whose validations --shared is fitted to.", "Learning")] = None,
    median_tokens: Annotated[float, option("Of a correct response.", "Response lengths")] = 800.0,
    length_spread: Annotated[float, option("Of the logarithm.", "Response lengths", min=0)] = 0.8,
    max_tokens: Annotated[int, option("Where a response is cut off.", "Response lengths", min=1)] = 4096,
    wrong_factor: Annotated[float, option("How much longer wrong ones are.", "Response lengths")] = 1.5,
    engines: Annotated[int, option("Inference engines.", "Hardware", min=1)] = 8,
    slots: Annotated[int, option("Responses that an engine generates at once.", "Hardware", min=1)] = 128,
    token_seconds: Annotated[float, option("Of one token of one response.", "Hardware")] = 0.02,
    update_seconds: Annotated[float, option("Of an update, whatever its size.", "Hardware", min=0)] = 20.0,
    update_token_seconds: Annotated[float, option("Of an update, per token trained.", "Hardware", min=0)] = 1e-5,
    prefix_gain: Annotated[float, option("Median gain of a whole trajectory.", "Prefixes")] = 4.0,
    prefix_gain_spread: Annotated[float, option("Of its logarithm.", "Prefixes", min=0)] = 0.5,
    prefix_curvature: Annotated[float, option("Above 1: the end says more.", "Prefixes")] = 1.0,
) -> None:
    """Simulate methods, and say what each needs to reach the same accuracy."""
    console = Console()
    logging.getLogger("recipe").setLevel(logging.ERROR)  # a warning per short step; groups/in_batch logs them
    if stop_at_target and target is None:
        raise typer.BadParameter("--stop-at-target needs --target")
    try:
        world = World(
            population=population,
            prompts=prompts,
            steps=steps,
            mode=mode,
            test_freq=test_freq,
            embedding_correlation=embedding_correlation,
            until=target if stop_at_target else None,
            learning=LearningModel(shared, own, noise, staleness, advantage, prefix_transfer, optimizer),
            lengths=LengthModel(median_tokens, length_spread, max_tokens, wrong_factor),
            hardware=Hardware(engines, slots, token_seconds, update_seconds, update_token_seconds),
            prefixes=PrefixEffect(prefix_gain, prefix_gain_spread, prefix_curvature),
        )
        chosen = [Method.parse(text, batch_size) for text in methods]
        if fit is not None:
            world = _fitted(world, fit, console)
        runs = run_all(chosen, world, seeds, out, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found_target, found = outcomes(runs, target)
    console.print(cost_table(found_target, found))
    console.print(waste_table(found))
    for outcome in found:
        for reason in outcome.ended:
            console.print(Text(f"{outcome.name} ended early: {reason}"))
    rollouts = sum(run.rollouts for members in runs.values() for run in members)
    seconds = sum(run.seconds for members in runs.values() for run in members)
    console.print(Text(f"{rollouts:,} rollouts in {seconds:.0f} s. Plots: python -m verl_ext.lab.report {out}"))


def run_all(methods: list[Method], world: World, seeds: int, out: Path, console: Console) -> dict[str, list[Simulated]]:
    """Every method with every seed; each run's log is ``out/<method>_<seed>.jsonl``, in the format of verl's logger.

    Raises:
        ValueError: two methods of one name, or what :func:`simulate` refuses.
    """
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"methods: {', '.join(names)} need different names; give one as name:recipe.")
    out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs: dict[str, list[Simulated]] = {name: [] for name in names}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("steps", total=len(methods) * seeds * world.steps)
        for number, (method, seed) in enumerate((m, s) for m in methods for s in range(seeds)):
            progress.update(task, description=f"{method.name}, seed {seed}", completed=number * world.steps)
            with (out / f"{method.name}_{seed}.jsonl").open("w", encoding="utf-8") as log:
                runs[method.name].append(simulate(method, world, seed, _logger(log, progress, task)))
    return runs


def _logger(log: TextIO, progress: Progress, task: TaskID) -> Callable[[int, dict[str, float]], None]:
    """Writes a line per step."""

    def on_step(step: int, data: dict[str, float]) -> None:
        log.write(json.dumps({"step": step, "data": data}) + "\n")
        progress.advance(task, 1 if step else 0)

    return on_step


def _fitted(world: World, log: Path, console: Console) -> World:
    """``world`` with its shared component from a recorded run."""
    found = find_runs([str(log)])
    if len(found) != 1:
        raise ValueError(f"fit={log} holds {len(found)} runs; name the log of one.")
    (files,) = found
    logits = draw_logits(world.population, world.prompts, np.random.default_rng(DATA_SEED))
    fit = fit_shared(read_run(files), logits, world.learning)
    console.print(
        f"--shared {fit.learning.shared:.4g} from {fit.validations} validations of {log.name}, "
        f"root mean square error {fit.error:.3f}; the validation set is {fit.offset:+.2f} logits from the population"
    )
    return replace(world, learning=fit.learning)


if __name__ == "__main__":
    typer.run(main)
