"""Simulates Pilot-Commit's tables and figures, HORA's Figure 3, and the conditions under which each recipe wins.

    python benchmarks/simulation.py table1
    python benchmarks/simulation.py table2
    python benchmarks/simulation.py table3
    python benchmarks/simulation.py concentration    (the fit of the populations to Table 3)
    python benchmarks/simulation.py figure4
    python benchmarks/simulation.py hora
    python benchmarks/simulation.py conditions
    python benchmarks/simulation.py discarding
    python benchmarks/simulation.py modes
    python benchmarks/simulation.py speed

The papers' runs are scaled down: an eighth of the batch (16 prompts), 125 steps instead of 500 or 1,000, and a number
of prompts with the same number of epochs. The noise scale is an eighth too, because a batch's noise is inversely
proportional to its size. The shared component is set so that GRPO with the larger n gains about one logit in the run.
Numbers are means and standard deviations over seeds.
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

from verl_ext.lab.comparison import MethodCost, compare, spread
from verl_ext.lab.simulate import LearningModel, Method, SimulatedRun, World, simulate
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel
from verl_ext.lab.simulate.run import ACCURACY, MODES
from verl_ext.lab.table import Table, open_console

BATCH, NOISE = 16, 200.0 / 8
LEARNING = LearningModel(shared=0.04, noise=NOISE)
ADAM = LearningModel(shared=0.01, noise=NOISE, optimizer="adam")
DEEPMATH = World(
    "deepmath_1_5b", 85_000 // 8 // 8, steps=125, test_freq=1, learning=LEARNING
)  # the paper: 1,000 steps of 128 prompts
POLARIS = World("polaris_8b", 53_000 // 8 // 4, steps=125, test_freq=1, learning=LEARNING)  # the paper: 500 steps
Seeds = Annotated[int, typer.Option(min=2, help="Runs of each method, with different seeds.")]
console = open_console()
app = typer.Typer(add_completion=False)


def pilot_commit(pilot: int, commit: int, **overrides: object) -> str:
    """Pilot-Commit with this split, as on the command line."""
    return " ".join(
        ["pilot_commit", f"n_pilot={pilot}", f"n_commit={commit}", *(f"{k}={v}" for k, v in overrides.items())]
    )


def run(methods: Sequence[str], world: World, seeds: int, batch: int = BATCH) -> dict[str, list[SimulatedRun]]:
    """Run each method with every seed."""
    chosen = [Method.parse(text, batch) for text in methods]
    jobs = list(itertools.product(chosen, range(seeds)))
    runs: dict[str, list[SimulatedRun]] = {method.name: [] for method in chosen}
    for method, seed in track(jobs, "runs", console=console, transient=True):
        runs[method.name].append(simulate(method, world, seed))
    return runs


def ratio(one: MethodCost, other: MethodCost) -> str:
    """Rollouts to the target, method ``one`` over method ``other``, seed by seed."""
    pairs = list(zip(one.to_target("rollouts"), other.to_target("rollouts"), strict=True))
    if any(value is None for pair in pairs for value in pair):
        return "-"
    return spread([first / second for first, second in pairs], ".2f")


@app.command()
def table1(seeds: Seeds = 3, optimizer: str = "sgd") -> None:
    """Table 1: rollouts to GRPO's final accuracy, and to half of GRPO's gain, beside the paper's ratios."""
    title = f"Table 1, optimizer={optimizer}"
    header = ("population", "n", "target", "GRPO/PC", "DAPO/PC", "paper GRPO/PC", "paper DAPO/PC")
    rows = []
    settings = (
        (DEEPMATH, 128, (32, 96), "1.5 (1.5B)", "4.0 (1.5B)"),
        (POLARIS, 64, (16, 48), "1.5, 1.5, 1.9 (4B, 8B, 14B)", "never, 2.6, 2.3"),
        (DEEPMATH, 16, (8, 8), "1.0 (1.5B)", "2.3 (1.5B)"),
        (POLARIS, 16, (8, 8), "1.4, 1.3, 1.0 (4B, 8B, 14B)", "3.3, 2.7, never"),
    )
    for world, n, split, *paper in settings:
        world = replace(world, learning=ADAM if optimizer == "adam" else LEARNING)
        runs = run([f"grpo n={n}"], world, seeds)
        curves = [member.records for member in next(iter(runs.values()))]
        start = curves[0][0][ACCURACY]
        end = min(records[world.steps][ACCURACY] for records in curves)  # reached by every GRPO seed
        runs |= run([f"dynamic_sampling n={n}", pilot_commit(*split)], replace(world, until=end), seeds)
        for share in (0.5, 1.0):
            _, (grpo, dynamic_sampling, pilot) = compare(runs, start + share * (end - start))
            target = f"{start:.1%} to {start + share * (end - start):.1%}"
            cells = (target, ratio(grpo, pilot), ratio(dynamic_sampling, pilot))
            rows.append((world.population, str(n), *cells, *(paper if share == 1 else ("", ""))))
    console.print(Table(title, header, rows))


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


def per_step(members: Sequence[SimulatedRun], metric: str, world: World) -> list[float]:
    """Mean over all steps but the first and the last, for each seed."""
    middle = range(2, world.steps)
    return [float(np.mean([member.records[step][metric] for step in middle])) for member in members]


@app.command()
def table3(seeds: Seeds = 3) -> None:
    """Table 3: Pilot-Commit with and without eviction, at an eighth of the paper's rollouts."""
    names = {pilot_commit(32, 96, p_solve="null"): ("33,379", "35.8 %"), pilot_commit(32, 96): ("25,676", "4.5 %")}
    runs = run(list(names), DEEPMATH, seeds)
    header = ("method", "rollouts/step x 8", "steps with a second round", "best accuracy", "evicted", "paper")
    header += ("second round",)
    rows = []
    _, found = compare(runs)
    for cost, members, paper in zip(found, runs.values(), names.values(), strict=True):
        steps = [[record for step, record in member.records.items() if step] for member in members]
        again = [second_rounds(member) for member in members]
        evicted = [seed[-1]["data/evicted_total"] / DEEPMATH.prompts for seed in steps]
        cells = (spread(cost.average("rollouts/sampled"), ",.0f", 8), spread(again, ".1f", 100, " %"))
        cells += (spread(cost.accuracy(), ".1f", 100, " %"), spread(evicted, ".0f", 100, " %"))
        rows.append((cost.name, *cells, *paper))
    console.print(Table("Table 3", header, rows))


def second_rounds(member: SimulatedRun) -> float:
    """Share of steps with a second round of pilots.

    Binding moves a step's first round into the step before, so every round after step 1 counts as a second round.
    """
    return float(np.mean([record["pilot_commit/rounds"] >= 1 for step, record in member.records.items() if step > 1]))


@app.command()
def concentration(values: list[float], seeds: Seeds = 3, mean: float = 0.45) -> None:
    """Steps with a second round, without eviction, for populations Beta(c mean, c (1 - mean)) with each value c."""
    rows = []
    for value in values:
        population = f"1:{value * mean:.4g}:{value * (1 - mean):.4g}"
        (members,) = run(
            [pilot_commit(32, 96, p_solve="null")], replace(DEEPMATH, population=population), seeds
        ).values()
        shares = spread([second_rounds(member) for member in members], ".1f", 100, " %")
        survivors = [[r["pilot_commit/pass_rate"] for step, r in m.records.items() if step] for m in members]
        rows.append(
            (f"{value:g}", population, shares, spread([float(np.mean(m)) for m in survivors], ".1f", 100, " %"))
        )
    console.print(
        Table("Table 3, no eviction: 35.8 %", ("c", "population", "second rounds", "pilots that survive"), rows)
    )


@app.command()
def figure4(seeds: Seeds = 3) -> None:
    """Figure 4: splits between pilots and commits, (a) at equal rollouts trained, (b) at equal rollouts sampled."""
    splits = [(4, 60), (8, 56), (16, 48), (32, 32), (48, 16)]
    world = replace(DEEPMATH, steps=100)
    runs = run(["grpo n=64", *(pilot_commit(*split) for split in splits)], world, seeds)
    target, found = compare(runs)
    rows = [
        (cost.name, spread(cost.to_target("rollouts")), ratio(found[0], cost), spread(cost.to_target("step")))
        for cost in found
    ]
    header = ("method", "rollouts", "times fewer than GRPO", "steps")
    console.print(Table(f"Figure 4a: to {target:.1%}", header, rows))
    splits = [(4, 84), (8, 72), (16, 48), (24, 24), (28, 12)]
    _, found = compare(run([pilot_commit(*split) for split in splits], world, seeds))
    rows = [
        (cost.name, spread(cost.accuracy(), ".1f", 100, " %"), spread(cost.average("rollouts/sampled")))
        for cost in found
    ]
    header = ("method", "accuracy at the end", "rollouts/step")
    console.print(Table(f"Figure 4b: after {world.steps} steps", header, rows))


@app.command()
def hora(seeds: Seeds = 3) -> None:
    """HORA's Figure 3: the second wave by successes, on a population with the paper's two shares of prompts."""
    world = World("math12k_7b", 2_000, steps=20, learning=LearningModel(shared=0, own=0))
    (members,) = run(["hora G=32 G0=8"], world, seeds, batch=100).values()
    rows = []
    for count, paper in ((0, ("15 %", "58 %")), (8, ("51 %", "12 %"))):
        shares = [
            [
                float(np.mean([r[f"hora/share_of_{kind}_c{count}"] for step, r in m.records.items() if step]))
                for m in members
            ]
            for kind in ("prompts", "rollouts")
        ]
        rows.append((str(count), *(spread(values, ".1f", 100, " %") for values in shares), *paper))
    header = ("successes of 8", "share of prompts", "of the second wave", "paper", "paper")
    console.print(Table("HORA, Figure 3", header, rows))


@app.command()
def conditions(seeds: Seeds = 3) -> None:
    """Compare every recipe with GRPO at n = 16, on populations and models that favour it or not."""
    other_cost = [
        "dynamic_sampling n=16",
        pilot_commit(8, 8),
        "prefix_sampling n=16",
    ]  # a step of these methods costs more or fewer rollouts
    same_cost = ["hora G=16 G0=4", "vip n=16", "knapsack n=16"]
    base, learning = replace(POLARIS, prompts=800), POLARIS.learning
    worlds = {
        "polaris_8b": base,
        "mostly solved: math12k_7b": replace(base, population="math12k_7b"),
        "mostly hopeless: 1:0.08:1.2": replace(base, population="1:0.08:1.2"),
        "all medium: 1:5:5": replace(base, population="1:5:5"),
        "200 prompts: 10 epochs": replace(base, prompts=200),
        "perfect embeddings": replace(base, embedding_correlation=1.0),
        "no noise": replace(base, learning=replace(learning, noise=0)),
        "noise x 10": replace(base, learning=replace(learning, noise=10 * NOISE)),
        "staleness 0.2": replace(base, learning=replace(learning, staleness=0.2)),
        "prefix_transfer 0.25": replace(base, learning=replace(learning, prefix_transfer=0.25)),
        "adam": replace(base, learning=ADAM),
    }
    columns = ("world", "target", "dynamic_sampling", "pilot_commit", "prefix_sampling", "hora", "vip", "knapsack")
    shown: list[tuple[str, ...]] = []
    tail: list[tuple[str, ...]] = []
    for name, world in worlds.items():
        runs, start, target = grpo_to_most_of_its_gain(world, seeds)
        runs |= run(other_cost, replace(world, until=target), seeds) | run(same_cost, world, seeds)
        _, found = compare(runs, target)
        cells = (ratio(found[0], cost) for cost in found[1:])
        shown.append((name, f"{start:.1%} to {target:.1%}", *cells))
        gains = [
            [gain(member, "val-aux/simulated/acc/best@32/mean") for member in members] for members in runs.values()
        ]
        relative = ([own / grpo for own, grpo in zip(each, gains[0], strict=True)] for each in gains[-len(same_cost) :])
        tail.append((name, *(spread(each, ".2f") for each in relative)))
    console.print(Table("times fewer rollouts than GRPO, to 70 % of GRPO's gain", columns, shown))
    console.print(Table("gain in pass@32 over GRPO's, at equal rollouts", ("world", *columns[5:]), tail))


def grpo_to_most_of_its_gain(world: World, seeds: int) -> tuple[dict[str, list[SimulatedRun]], float, float]:
    """GRPO's runs with n = 16, their first accuracy, and the accuracy after 70 % of their gain."""
    runs = run(["grpo n=16"], world, seeds)
    curves = [member.records for member in runs["grpo-n=16"]]
    start = curves[0][0][ACCURACY]
    return runs, start, start + 0.7 * (min(records[world.steps][ACCURACY] for records in curves) - start)


@app.command()
def discarding(seeds: Seeds = 3) -> None:
    """Compare Prefix Sampling with its baseline without prefixes, in the first world of ``conditions``."""
    world = replace(POLARIS, prompts=800)
    runs, start, target = grpo_to_most_of_its_gain(world, seeds)
    methods = ["prefix_sampling n=16", "prefix_sampling n=16 use_prefixes=false"]
    _, found = compare(runs | run(methods, replace(world, until=target), seeds), target)
    rows = [(cost.name, ratio(found[0], cost)) for cost in found]
    title = f"times fewer rollouts than GRPO, {world.population}, {start:.1%} to {target:.1%}"
    console.print(Table(title, ("method", "times fewer"), rows))


def gain(simulated: SimulatedRun, metric: str) -> float:
    """Change of a metric from before training to the end."""
    return simulated.records[max(simulated.records)][metric] - simulated.records[0][metric]


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
