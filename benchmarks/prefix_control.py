"""Compares constants of the prefix controller: every combination on the same simulated re-rollouts.

    python benchmarks/prefix_control.py

The model is :class:`prefix_population.Population`. Parents are in buckets k = 1, 2, 6, 7 of 8. A prefix of ratio rho
moves the logit of success by gain rho^curvature, up from a success and down from a failure; gains differ between
prompts. Scenarios are all combinations of

- prefixes with a small effect (median gain 3), a large effect (6), or an effect mostly at their end (6, curvature 2);
- 2 or 12 groups per bucket and training step, all of which start from the same ratio;
- no drift; logits rising evenly by 0.8 over the run; logits jumping by 0.8 half way.

A rise helps easy groups leave the target and hard groups reach it, so both directions occur. Reported, as means over
scenarios, buckets and seeds:

- error: |expected child pass rate at the ratio in use - 0.5| in the final third of the run, without sampling noise;
- in zone: share of the final third in which the observed pass rate of the last 10 steps was within the dead zone of
  0.5. A wide zone is easier to hit, so do not compare this share between dead zones;
- turns: how often a ratio changed its direction in 100 steps.

The tables also show the standard deviation of the mean error over seeds, the mean error of the worst scenario, the
means by drift, and the mean over the whole run, which depends on the initial ratio.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from prefix_population import Children, Population, steer
from rich.progress import track

from recipe.prefix_sampling.prefix_control import PrefixControl
from verl_ext.lab.table import Table, open_console

N, BUCKETS, STEPS, WINDOW = 8, (1, 2, 6, 7), 150, 10
RESPONSES = {"weak": Population(N, 3.0), "strong": Population(N, 6.0), "late": Population(N, 6.0, curvature=2.0)}
GROUPS = (2, 12)
LIFT = 0.8
DRIFTS = {
    "none": np.zeros(STEPS),
    "slow": LIFT * np.linspace(0, 1, STEPS).round(1),  # ten stairs, so that few expected rates are computed
    "jump": LIFT * (np.arange(STEPS) >= STEPS // 2),
}
GRID = {"ema_alpha": (0.02, 0.05, 0.1, 0.2), "dead_zone": (0.03, 0.05, 0.075, 0.1), "step": (0.01, 0.02, 0.05)}
INITIAL_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7)
console = open_console()


@dataclass(frozen=True)
class Scenario:
    """One population, drift and set of random numbers, the same for every controller."""

    response: str
    groups: int
    drift: str
    seed: int
    children: dict[int, Children]


@dataclass(frozen=True)
class Result:
    """A controller's performance in one scenario; means over buckets."""

    response: str
    groups: int
    drift: str
    seed: int
    error: float
    whole_run_error: float
    in_zone: float
    turns: float


def scenarios(seeds: int) -> list[Scenario]:
    """All scenarios. Scenarios that differ only in drift share their prompts."""
    made = []
    for response, groups, seed in itertools.product(RESPONSES, GROUPS, range(seeds)):
        rng = np.random.default_rng(seed)
        children = {bucket: RESPONSES[response].children(bucket, (STEPS, groups), rng) for bucket in BUCKETS}
        made += [Scenario(response, groups, drift, seed, children) for drift in DRIFTS]
    return made


@functools.cache
def expected(response: str, bucket: int, ratio: float, shift: float) -> float:
    """Pass rate without sampling noise. Ratios lie on a lattice, so the cache answers most calls."""
    return RESPONSES[response].pass_rate(bucket, ratio, shift)


def simulate(scenario: Scenario, **constants: float | bool) -> Result:
    """Performance of one controller in one scenario."""
    control = PrefixControl(N, BUCKETS, **constants)
    shifts = DRIFTS[scenario.drift]
    ratios, observed = steer(control, scenario.children, shifts)
    rates = [
        [expected(scenario.response, *cell) for cell in zip(BUCKETS, row.round(4), [shift] * len(row), strict=True)]
        for row, shift in zip(ratios, shifts, strict=True)
    ]
    errors = np.abs(np.array(rates) - control.target)
    windows = np.lib.stride_tricks.sliding_window_view(observed, WINDOW, axis=0).mean(axis=-1)
    in_zone = np.abs(windows[-STEPS // 3 :] - control.target) <= control.dead_zone
    turned = sum(turns(column) for column in ratios.T) / len(BUCKETS) * 100 / STEPS
    labels = (scenario.response, scenario.groups, scenario.drift, scenario.seed)
    return Result(*labels, errors[-STEPS // 3 :].mean(), errors.mean(), in_zone.mean(), turned)


def turns(ratios: np.ndarray) -> int:
    """Number of changes of direction in a series of ratios."""
    directions = np.sign(np.diff(ratios))
    directions = directions[directions != 0]
    return int((directions[1:] != directions[:-1]).sum())


def summary(results: list[Result]) -> list[str]:
    """Cells of a table row."""

    def mean(**only: object) -> float:
        fitting = [r.error for r in results if all(getattr(r, name) == value for name, value in only.items())]
        return float(np.mean(fitting))

    cases = {(r.response, r.groups, r.drift) for r in results}
    worst = max(mean(response=response, groups=groups, drift=drift) for response, groups, drift in cases)
    by_seed = [mean(seed=seed) for seed in sorted({r.seed for r in results})]
    errors = [mean(), float(np.std(by_seed)), worst, *(mean(drift=drift) for drift in DRIFTS)]
    whole_run = np.mean([r.whole_run_error for r in results])
    in_zone, turned = (np.mean([getattr(r, name) for r in results]) for name in ("in_zone", "turns"))
    return [*(f"{error:.3f}" for error in errors), f"{whole_run:.3f}", f"{in_zone:.0%}", f"{turned:.0f}"]


HEADER = ("error", "± seeds", "worst", *DRIFTS, "whole run", "in zone", "turns")
"""Columns of :func:`summary`."""


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("outputs/benchmarks"),
    seeds: Annotated[int, typer.Option(min=1, help="Independent repetitions of each scenario.")] = 2,
) -> None:
    """Simulate every combination, print the tables and save the results."""
    cases = scenarios(seeds)
    runs: list[tuple[dict, list[Result]]] = []
    combinations = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    for constants in track(combinations, "constants", console=console, transient=True):
        runs.append((constants, [simulate(case, **constants) for case in cases]))
    runs.sort(key=lambda run: np.mean([result.error for result in run[1]]))
    default = PrefixControl(N, BUCKETS)
    rows = []
    for constants, results in runs:
        chosen = all(getattr(default, name) == value for name, value in constants.items())
        alpha, *others = constants.values()
        half_life = f"{math.log(0.5) / math.log1p(-alpha):.1f}"
        label = f"{alpha:g} (default)" if chosen else f"{alpha:g}"
        rows.append((label, half_life, *(f"{value:g}" for value in others), *summary(results)))
    header = ("alpha", "half-life", "dead zone", "step", *HEADER)
    console.print(Table("Constants, best first", header, rows))

    rows = []
    for adaptive, ratio in itertools.product((True, False), INITIAL_RATIOS):
        constants = {"initial_ratio": ratio, "adaptive": adaptive}
        results = [simulate(case, **constants) for case in cases]
        rows.append((f"{ratio:g}", "yes" if adaptive else "no", *summary(results)))
        runs.append((constants, results))
    header = ("initial ratio", "adaptive", *HEADER)
    console.print(Table("Initial ratio, other constants at their defaults", header, rows))
    out.mkdir(parents=True, exist_ok=True)
    saved = [{"constants": constants, "results": [asdict(result) for result in results]} for constants, results in runs]
    (out / "prefix_control.json").write_text(json.dumps(saved))


if __name__ == "__main__":
    typer.run(main)
