"""Simulates Pilot-Commit's Tables 2 and 3, HORA's Figure 3, and the trainer modes.

    python benchmarks/simulation.py table2
    python benchmarks/simulation.py table3
    python benchmarks/simulation.py concentration    (the fit of the populations to Table 3)
    python benchmarks/simulation.py hora
    python benchmarks/simulation.py modes
    python benchmarks/simulation.py speed

Table 3 is scaled down: an eighth of the batch (16 prompts), 125 steps instead of 1,000, and a number of prompts with
the same number of epochs. Numbers are means and standard deviations over seeds.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

from verl_ext.lab.comparison import LabRun, MethodCost, spread
from verl_ext.lab.simulate import Method, World, simulate
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel
from verl_ext.lab.table import Table, open_console
from verl_ext.policy import MODES

BATCH = 16
CONCENTRATIONS = 0.7, 0.6, 0.52, 0.5, 0.485, 0.45, 0.44, 0.43, 0.42  # of docs/simulation_results.md
DEEPMATH = World("deepmath_1_5b", 85_000 // 8 // 8, steps=125)  # the paper: 1,000 steps of 128 prompts
Seeds = Annotated[int, typer.Option(min=2, help="Runs of each method, with different seeds.")]
console = open_console()
app = typer.Typer(add_completion=False)


def pilot_commit(pilot: int, commit: int, **overrides: object) -> str:
    """Pilot-Commit with this split, as on the command line."""
    return " ".join(
        ["pilot_commit", f"n_pilot={pilot}", f"n_commit={commit}", *(f"{k}={v}" for k, v in overrides.items())]
    )


def run(methods: Sequence[str], world: World, seeds: int, batch: int = BATCH) -> dict[str, list[LabRun]]:
    """Run each method with every seed."""
    chosen = [Method.parse(text, batch) for text in methods]
    jobs = list(itertools.product(chosen, range(seeds)))
    runs: dict[str, list[LabRun]] = {method.name: [] for method in chosen}
    for method, seed in track(jobs, "runs", console=console, transient=True):
        runs[method.name].append(simulate(method, world, seed))
    return runs


@app.command()
def table2(seeds: Seeds = 3) -> None:
    """Table 2: generation seconds per step, and the effect of barriers, binding and shards on them."""
    # 64 engines. Two numbers of the paper, GRPO's 106 s and 174 s for DAPO's 16,384 further rollouts, give 12 slots and
    # 6.5 ms per token. Pilot-Commit's time is a prediction.
    scarce, ample = EngineSpeed(64, 12, 0.0065, 90.0, 1.3e-6), EngineSpeed(64, 96, 0.0147, 90.0, 1.3e-6)
    world = World("polaris_8b", 8_000, steps=5)
    methods = {
        "grpo n=64": "106",
        pilot_commit(16, 48): "138",
        "dynamic_sampling n=64": "280",
        pilot_commit(16, 48, bind="false", max_delay=0): "",
        "dynamic_sampling n=64 s=1": "",
        "hora G=64 G0=16 shards=1": "",
        "hora G=64 G0=16 shards=4": "",
        "hora G=64 G0=16 shards=16": "",
    }
    rows = []
    found = [run(list(methods), replace(world, speed=speed), seeds, batch=128) for speed in (scarce, ample)]
    firsts = [per_step(members["grpo-n=64"], "timing_s/gen", world) for members in found]
    for name, paper in zip(found[0], methods.values(), strict=True):
        times = [per_step(members[name], "timing_s/gen", world) for members in found]
        cells = [
            [spread(t, ".0f"), f"{np.mean(t) / np.mean(first):.2f}"] for t, first in zip(times, firsts, strict=True)
        ]
        rollouts = spread(per_step(found[0][name], "rollouts/sampled", world))
        rows.append((name, rollouts, *cells[0], paper, *cells[1]))
    header = ("method", "rollouts", "generation, s", "to GRPO's", "paper, s", "6,144 slots, s", "to GRPO's")
    console.print(Table("Table 2: a step; the first and the last are left out", header, rows))


def per_step(members: Sequence[LabRun], metric: str, world: World) -> list[float]:
    """Mean over all steps but the first and the last, for each seed."""
    middle = range(2, world.steps)
    return [float(np.mean([member.records[step][metric] for step in middle])) for member in members]


@app.command()
def table3(seeds: Seeds = 3) -> None:
    """Table 3: Pilot-Commit with and without eviction, at an eighth of the paper's rollouts."""
    names = {pilot_commit(32, 96, p_solve="null"): ("33,379", "35.8 %"), pilot_commit(32, 96): ("25,676", "4.5 %")}
    runs = run(list(names), DEEPMATH, seeds)
    header = ("method", "rollouts/step x 8", "steps with a second round", "evicted", "paper", "second round")
    rows = []
    for (name, members), paper in zip(runs.items(), names.values(), strict=True):
        cost, steps = MethodCost(name, members), [list(member.records.values()) for member in members]
        again = [second_rounds(member) for member in members]
        evicted = [seed[-1]["data/evicted_total"] / DEEPMATH.prompts for seed in steps]
        cells = (spread(cost.average("rollouts/sampled"), ",.0f", 8), spread(again, ".1f", 100, " %"))
        cells += (spread(evicted, ".0f", 100, " %"),)
        rows.append((cost.name, *cells, *paper))
    console.print(Table("Table 3", header, rows))


def second_rounds(member: LabRun) -> float:
    """Share of steps with a second round of pilots.

    Binding moves a step's first round into the step before, so every round after step 1 counts as a second round.
    """
    return float(np.mean([record["pilot_commit/rounds"] >= 1 for step, record in member.records.items() if step > 1]))


@app.command()
def concentration(
    values: Annotated[list[float] | None, typer.Argument()] = None, seeds: Seeds = 3, mean: float = 0.45
) -> None:
    """Steps with a second round, without eviction, for populations Beta(c mean, c (1 - mean)) with each value c."""
    rows = []
    for value in values or CONCENTRATIONS:
        population = f"1:{value * mean:.4g}:{value * (1 - mean):.4g}"
        (members,) = run(
            [pilot_commit(32, 96, p_solve="null")], replace(DEEPMATH, population=population), seeds
        ).values()
        shares = spread([second_rounds(member) for member in members], ".1f", 100, " %")
        survivors = [[record["pilot_commit/pass_rate"] for record in member.records.values()] for member in members]
        rows.append(
            (f"{value:g}", population, shares, spread([float(np.mean(m)) for m in survivors], ".1f", 100, " %"))
        )
    console.print(
        Table("Table 3, no eviction: 35.8 %", ("c", "population", "second rounds", "pilots that survive"), rows)
    )


@app.command()
def hora(seeds: Seeds = 3) -> None:
    """HORA's Figure 3: the second wave by successes, on a population with the paper's two shares of prompts."""
    world = World("math12k_7b", 2_000, steps=20)
    (members,) = run(["hora G=32 G0=8"], world, seeds, batch=100).values()
    rows = []
    for count, paper in ((0, ("15 %", "58 %")), (8, ("51 %", "12 %"))):
        shares = [
            [
                float(np.mean([record[f"hora/share_of_{kind}_c{count}"] for record in m.records.values()]))
                for m in members
            ]
            for kind in ("prompts", "rollouts")
        ]
        rows.append((str(count), *(spread(values, ".1f", 100, " %") for values in shares), *paper))
    header = ("successes of 8", "share of prompts", "of the second wave", "paper", "paper")
    console.print(Table("HORA, Figure 3", header, rows))


@app.command()
def modes(seeds: Seeds = 3) -> None:
    """Compare trainer modes on 8 devices: all take turns, or half generate and half train (separate_async)."""
    columns = ("responses", "update", "method", *(f"{mode}: s/step, engines busy, delay" for mode in MODES))
    rows: list[tuple[str, ...]] = []
    for tail, update in itertools.product((0.3, 1.0), (2e-5, 1e-4)):
        for text in ("grpo n=8", pilot_commit(4, 4)):
            cells = []
            for mode in MODES:
                ours = EngineSpeed(8, 64, 0.02, 5.0, update)
                if mode == "separate_async":
                    ours = EngineSpeed(4, 64, 0.02, 5.0, 2 * update)
                lengths = LengthModel(500, tail, 8192)
                world = World("polaris_8b", 8_000, steps=12, mode=mode, lengths=lengths, speed=ours)
                (members,) = run([text], world, seeds, batch=128).values()
                seconds, tokens = (per_step(members, name, world) for name in ("timing_s/step", "tokens/sampled"))
                tokens_per_second = ours.engines * ours.slots / ours.seconds_per_token
                busy = [count / (tokens_per_second * time) for count, time in zip(tokens, seconds, strict=True)]
                delay = np.mean(per_step(members, "off_policy/delay_mean", world))
                cells.append(f"{spread(seconds, '.0f')}, {np.mean(busy):.0%}, {delay:.1f}")
            length = "alike" if tail < 1 else "long-tailed"
            rows.append((length, "short" if update < 1e-4 else "long", text, *cells))
    console.print(Table("128 prompts x 8, 8 devices; the first and the last step are left out", columns, rows))


@app.command()
def speed(prompts: int = 100_000, steps: int = 30, batch: int = 512) -> None:
    """Measure the simulator: rollouts per second of one core."""
    world = World("polaris_8b", prompts, steps=steps)
    rows = []
    for text in (
        "grpo n=8",
        "dynamic_sampling n=8",
        pilot_commit(2, 6),
        "hora G=8 G0=2",
        "knapsack n=8",
        "prefix_sampling n=8",
    ):
        started = time.process_time()
        simulated = simulate(Method.parse(text, batch), world, 0)
        seconds = time.process_time() - started
        rows.append((text, f"{simulated.rollouts:,}", f"{seconds:.1f}", f"{simulated.rollouts / seconds:,.0f}"))
    header = ("method", "rollouts", "CPU seconds", "rollouts/s")
    console.print(Table(f"{prompts:,} prompts, {batch} a step", header, rows))


if __name__ == "__main__":
    logging.getLogger("recipe").setLevel(logging.ERROR)
    app()
