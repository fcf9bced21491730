"""Compares what methods cost on a simulated population of prompts, before anything is spent on training.

verl-ext simulate grpo dynamic_sampling pilot_commit
verl-ext simulate "grpo n=16" "pilot_commit n_pilot=8 n_commit=8" --population prompts.parquet --seeds 5
"""

from __future__ import annotations

import glob
import json
import logging
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl_ext.errors import option_errors
from verl_ext.files import check_folder
from verl_ext.lab.comparison import LabRun, MethodCost, Methods, print_comparison, step_table
from verl_ext.lab.method import check_names
from verl_ext.lab.report.runs import first_data
from verl_ext.lab.simulate import Method, World, simulate
from verl_ext.lab.simulate.engine import PrefixEffect
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel
from verl_ext.lab.simulate.population import PRESETS
from verl_ext.lab.simulate.run import start
from verl_ext.lab.table import open_console

MARK = "simulation/seed"
"""Metric of every step of a simulated run; no training logs it, so only simulated logs are ever removed."""


def option(text: str, panel: str, **bounds: float) -> typer.models.OptionInfo:
    """An option for a parameter of a model; ``panel`` is its heading in ``--help``."""
    return typer.Option(help=text, rich_help_panel=panel, **bounds)


def main(
    methods: Methods,
    population: Annotated[
        str,
        typer.Option(
            help=f"Difficulty of the prompts: {', '.join(PRESETS)}, a Beta mixture weight:alpha:beta,..., or a "
            ".parquet or .jsonl file with success_rate, or successes and trials, of each prompt, or the "
            "prompts.parquet of verl-ext waste."
        ),
    ] = "polaris_8b",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts in the data. Default: 10,000, or all of the file.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 50,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per step, unless a method sets it.")] = 128,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with different seeds.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the logs, <method>_<seed>.jsonl.")] = Path("outputs/simulation"),
    mode: Annotated[str, typer.Option(help="Trainer mode: sync, colocate_async or separate_async.")] = "sync",
    embedding_correlation: Annotated[
        float, typer.Option(min=0, max=1, help="Correlation of prompt embeddings with difficulty.")
    ] = 0.5,
    median_tokens: Annotated[float, option("Median length of a correct response.", "Response lengths")] = 800.0,
    length_spread: Annotated[
        float, option("Standard deviation of log(response length).", "Response lengths", min=0)
    ] = 0.8,
    max_tokens: Annotated[int, option("Length at which a response is cut off.", "Response lengths", min=1)] = 4096,
    wrong_factor: Annotated[
        float, option("Median length of wrong responses / of correct responses.", "Response lengths")
    ] = 1.5,
    engines: Annotated[int, option("Number of inference engines.", "Speed", min=1)] = 8,
    slots: Annotated[int, option("Responses generated at a time by one engine.", "Speed", min=1)] = 128,
    token_seconds: Annotated[float, option("Seconds per token of one response.", "Speed")] = 0.02,
    update_seconds: Annotated[float, option("Fixed seconds of an update.", "Speed", min=0)] = 20.0,
    update_token_seconds: Annotated[float, option("Seconds of an update per trained token.", "Speed", min=0)] = 1e-5,
    prefix_gain: Annotated[float, option("Median gain in logits from a whole successful prefix.", "Prefixes")] = 4.0,
    prefix_gain_spread: Annotated[float, option("Standard deviation of log(prefix gain).", "Prefixes", min=0)] = 0.5,
    prefix_curvature: Annotated[float, option("Above 1, the end of a prefix matters more.", "Prefixes")] = 1.0,
) -> None:
    """Simulate methods on a population of prompts, and compare the cost of a step and where rollouts go."""
    console = open_console()
    # Recipes warn of each short step; its size is in the logs as groups/in_batch.
    logging.getLogger("recipe").setLevel(logging.ERROR)
    with option_errors():
        check_folder(out)
        world = World(
            population=population,
            prompts=prompts,
            steps=steps,
            mode=mode,
            embedding_correlation=embedding_correlation,
            lengths=LengthModel(median_tokens, length_spread, max_tokens, wrong_factor),
            speed=EngineSpeed(engines, slots, token_seconds, update_seconds, update_token_seconds),
            prefixes=PrefixEffect(prefix_gain, prefix_gain_spread, prefix_curvature),
        )
        chosen = [Method.parse(text, batch_size) for text in methods]
        check_names(chosen)
        for method in chosen:
            start(method, world, 0)
        earlier = _earlier_logs(chosen, out)
    out.mkdir(parents=True, exist_ok=True)
    for log in earlier:  # a rerun with fewer seeds would leave those of the earlier command beside its own
        log.unlink()
    runs = run_all(chosen, world, seeds, out, console)
    costs = [MethodCost(name, members) for name, members in runs.items()]
    print_comparison(step_table(costs), costs, out, console)


def run_all(methods: list[Method], world: World, seeds: int, out: Path, console: Console) -> dict[str, list[LabRun]]:
    """Run every method with every seed, and log each run to ``out/<method>_<seed>.jsonl`` as verl's file logger does.

    The methods have different names, and the folder exists.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    runs: dict[str, list[LabRun]] = {method.name: [] for method in methods}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("steps", total=len(methods) * seeds * world.steps)
        for number, (method, seed) in enumerate((m, s) for m in methods for s in range(seeds)):
            progress.update(task, description=f"{method.name}, seed {seed}", completed=number * world.steps)
            path = out / f"{method.name}_{seed}.jsonl"
            try:
                with path.open("w", encoding="utf-8") as log:

                    def on_step(step: int, data: dict[str, float], seed: int = seed, log: TextIO = log) -> None:
                        log.write(json.dumps({"step": step, "data": {MARK: seed, **data}}) + "\n")
                        progress.advance(task)

                    run = simulate(method, world, seed, on_step)
            finally:
                if not path.stat().st_size:  # an empty log says nothing, and a later command would refuse to replace it
                    path.unlink()
            runs[method.name].append(run)
    return runs


def _earlier_logs(methods: list[Method], out: Path) -> list[Path]:
    """Logs that earlier simulations of the methods have left in ``out``.

    Raises:
        ValueError: a file has the name of such a log, and is not the log of a simulation.
    """
    found = [
        log
        for method in methods
        for log in sorted(out.glob(f"{glob.escape(method.name)}_*.jsonl"))
        if log.stem.removeprefix(f"{method.name}_").isdecimal()
    ]
    for log in found:
        if MARK not in first_data(log):
            raise ValueError(f"{log} is no log of a simulation; choose another --out.")
    return found
