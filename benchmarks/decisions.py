"""Tabulates decisions of the recipes in the runs of ``benchmarks/learning.py``, as the papers do, over seeds.

    python benchmarks/decisions.py outputs/benchmarks/learning

Recipes without runs in the folder are left out. Every number is a mean over steps for each seed, then mean and range
(least to largest) over the seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from verl_ext.first_run.process import metrics_of
from verl_ext.lab.table import Table, open_console

Step = dict[str, float]


def read_runs(folder: Path, recipe: str) -> list[list[Step]]:
    """The training steps of each seed's run in the folder."""
    return [list(metrics_of(file).values()) for file in sorted(folder.glob(f"{recipe}_*.jsonl"))]


def over_seeds(runs: list[list[Step]], of_run: Callable[[list[Step]], float], form: str = ".1%") -> str:
    """``mean (least to largest)``."""
    values = [value for run in runs if not np.isnan(value := of_run(run))]
    return f"{np.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})" if values else "not measured"


def mean_of(name: str, first: int = 1, missing: float | None = None) -> Callable[[list[Step]], float]:
    """Mean of a metric from step ``first`` on; a step without the metric counts as ``missing``, or not at all."""

    def of_run(run: list[Step]) -> float:
        values = [step.get(name, missing) for step in run[first - 1 :]]
        return float(np.mean([value for value in values if value is not None] or np.nan))

    return of_run


def hora(folder: Path) -> Table:
    """HORA's Figure 3: shares of prompts and of second-wave rollouts, by successes c among the pre-rollouts."""
    runs = read_runs(folder, "hora")
    rows = []
    counts = sorted({name for run in runs for step in run for name in step if name.startswith("hora/share_of_prompts")})
    for name in counts:
        names = name, name.replace("prompts", "rollouts")
        prompts, rollouts = (mean_of(each, missing=0.0) for each in names)  # no prompt of the step had c successes
        rows.append((name.rpartition("c")[2], over_seeds(runs, prompts), over_seeds(runs, rollouts)))
    header = ("c", "share of prompts", "share of second-wave rollouts")
    return Table(f"hora, {len(runs)} seeds", header, rows)


def vip(folder: Path, warm_up: int) -> Table:
    """Mean absolute error of predicted against realised success rates, from step ``warm_up`` + 1 on."""
    runs = read_runs(folder, "vip")
    metrics = (("Gaussian process", "mae", ".3f"), ("moving average", "mae_moving_average", ".3f"))
    metrics += (("correlation (Gaussian process)", "correlation", ".2f"),)
    rows = [
        (label, over_seeds(runs, mean_of(f"vip/prediction_{name}", warm_up + 1), form))
        for label, name, form in metrics
    ]  # fmt: skip
    return Table(f"vip, {len(runs)} seeds, after {warm_up} steps", ("predictor", "mean absolute error"), rows)


def knapsack(folder: Path, uniform_steps: int) -> Table:
    """Knapsack-RL's eq. 4 against uniform: share of rollouts, and of groups, with a gradient, after the first epoch."""
    rows = []
    for recipe in ("knapsack", "grpo"):
        runs = [run for run in read_runs(folder, recipe) if "rollouts/effective_ratio" in run[0]]
        names = ("rollouts/effective_ratio", "groups/effective_ratio")
        cells = (over_seeds(runs, mean_of(name, uniform_steps + 1)) for name in names)
        rows.append((f"{recipe}, {len(runs)} seeds", *cells))
    return Table(f"after {uniform_steps} steps", ("", "rollouts with a gradient", "groups"), rows)


def prefix_sampling(folder: Path) -> Table:
    """Prefix Sampling's §4.3, by the parent's passes: does the controller bring re-rollouts nearer to one half?"""
    labels = ("groups", "pass rate", "moving average at the end", "ratio at the end")
    rows: list[tuple[str, ...]] = []
    for name in ("prefix_ada", "prefix_fix"):
        runs = read_runs(folder, name)
        for k in sorted({int(metric[-1]) for run in runs for metric in run[-1] if "/child_pass_rate_k" in metric}):
            cells = [over_seeds(runs, partial(second_half, k=k, counted=counted), form) for counted, form in HALF]
            cells += [over_seeds(runs, lambda run, m=f"prefix_sampling/{m}_k{k}": run[-1][m], ".2f") for m in LAST]
            rows.append((f"{name}, {len(runs)} seeds", str(k), *cells))
    return Table("re-rollouts, groups and pass rate in the second half of the run", ("", "of 8", *labels), rows)


HALF, LAST = ((True, ".0f"), (False, ".3f")), ("pass_rate_ema", "ratio")


def second_half(run: list[Step], k: int, counted: bool) -> float:
    """Groups re-rolled from parents with ``k`` passes, or their mean pass rate, in the second half of the run.

    The metrics are counts since the start of the run, so the function takes differences.
    """
    middle, last = run[len(run) // 2 - 1], run[-1]
    names = {int(name.rpartition("_k")[2]): name for name in last if name.startswith(f"prefix_sampling/from_k{k}_to_k")}
    groups = {child: last[name] - middle.get(name, 0.0) for child, name in names.items()}
    total = sum(groups.values())
    return total if counted else sum(child / 8 * count for child, count in groups.items()) / total


DECIDING = "hora", "vip", "knapsack"


def overhead(folder: Path) -> Table:
    """Seconds spent deciding, and their share of a step."""
    rows = []
    for recipe in DECIDING:
        steps = [step for run in read_runs(folder, recipe) for step in run]
        if steps:
            seconds = np.array([step["allocation/seconds"] for step in steps])
            share = np.median(seconds / [step["timing_s/step"] for step in steps])
            rows.append((recipe, f"{1000 * np.median(seconds):.1f}", f"{1000 * seconds.max():.1f}", f"{share:.2%}"))
    return Table("deciding", ("", "median, ms", "largest, ms", "median share of a step"), rows)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs of benchmarks/learning.py.")],
    epoch: Annotated[int, typer.Option(min=1, help="Number of steps in the first epoch.")] = 8,
) -> None:
    """Print a table for every recipe with runs in the folder."""
    console = open_console()
    tables = {
        "hora": hora,
        "vip": partial(vip, warm_up=epoch),
        "knapsack": partial(knapsack, uniform_steps=epoch),
        "prefix_ada": prefix_sampling,
    }
    for run, table in tables.items():
        if any(folder.glob(f"{run}_*.jsonl")):
            console.print(table(folder))
    if any(any(folder.glob(f"{run}_*.jsonl")) for run in DECIDING):
        console.print(overhead(folder))


if __name__ == "__main__":
    typer.run(main)
