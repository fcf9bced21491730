"""Tabulates how often a Pilot-Commit step waits for its engines, by the share of prompts that survive.

    python benchmarks/generation_phases.py

A generation phase ends when all requested rollouts have finished, as in ``trainer_mode=sync``. Prompts either always
survive or never. The batches have the paper's sizes (b_t = 128, b_g = 384), the groups an eighth of theirs (2 pilots
and 6 commits). The table compares three sizes of a further round of pilots, for a step that lacks ``short`` survivors
at pass rate p:

- whole: b_g prompts, as in Algorithm 1 and the recipe.
- expected: short / p prompts, and at most b_g.
- two deviations: short / p plus two standard deviations of the prompts needed, and at most b_g.
"""

from __future__ import annotations

import logging
import math
from typing import Annotated

import numpy as np
import typer

from recipe.pilot_commit.policy import PilotCommit
from verl_ext.controller import RolloutController
from verl_ext.lab.table import Table, open_console
from verl_ext.policy import Action, Group, Rollout
from verl_ext.testing.engine import FastEngine, epochs, prompts

PASS_RATES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
DEVIATIONS = {"expected": 0.0, "two deviations": 2.0, "whole": math.inf}


class Rounds(PilotCommit):
    """Pilot-Commit whose rounds hold the expected need plus ``deviations`` standard deviations, at most b_g."""

    def __init__(self, pass_rate: float, deviations: float, **settings: int):
        super().__init__(**settings)
        self.pass_rate, self.deviations = pass_rate, deviations

    def _pilot_round(self, count: int) -> list[Action]:
        short = self.train_batch_size - len(self._committing) - len(self._ready)
        if math.isfinite(self.deviations):  # negative binomial: prompts until `short` survive
            deviation = math.sqrt(short * (1 - self.pass_rate))
            count = min(count, math.ceil((short + self.deviations * deviation) / self.pass_rate))
        return super()._pilot_round(count)


class Barriers(FastEngine):
    """Counts generation phases. For success rate 1 every second rollout of a prompt is correct, for rate 0 none is."""

    phases = 0

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        self.phases += 1
        waves, self.waiting = self.waiting, []
        return [
            (group.id, [self._answer(group, index, version) for index in range(number)])
            for group, number, version in waves
        ]

    def _answer(self, group: Group, index: int, version: int) -> Rollout:
        correct = bool(self.success_rates[group.prompt.id] and index % 2)
        return Rollout(float(correct), correct, 1, version)


def measure(pass_rate: float, deviations: float, batch: int, steps: int, seed: int = 0) -> tuple[float, float, float]:
    """(generation phases, sampled rollouts, mean delay in policy versions) per step, without the first ten steps."""
    rows = prompts(300 * batch)
    survive = np.random.default_rng(seed).random(len(rows)) < pass_rate
    policy = Rounds(pass_rate, deviations, train_batch_size=batch, n_pilot=2, n_commit=6, max_rounds=50, seed=seed)
    policy.start_run(None, [])
    engine = Barriers(dict(zip([row.id for row in rows], survive.astype(float), strict=True)))
    run = RolloutController(policy, epochs(rows, seed), len(rows), engine)
    measured = []
    for step in range(1, steps + 1):
        engine.version, engine.phases = step - 1, 0
        run.begin_step(step)
        run.fill_batch(engine.finish)
        metrics = run.metrics()
        measured.append((engine.phases, metrics["rollouts/sampled"], metrics["off_policy/delay_mean"]))
    return tuple(np.mean(measured[10:], axis=0).tolist())


def main(
    batch: Annotated[int, typer.Option(min=1, help="b_t, prompts per training step.")] = 128,
    steps: Annotated[int, typer.Option(min=11, help="Training steps; the first 10 are not counted.")] = 60,
) -> None:
    """Print one row per pass rate."""
    logging.disable(logging.WARNING)  # a step without enough survivors after all rounds
    rows = []
    for pass_rate in PASS_RATES:
        cells = (measure(pass_rate, deviations, batch, steps) for deviations in DEVIATIONS.values())
        texts = (f"{phases:.2f} / {rollouts:,.0f} / {delay:.2f}" for phases, rollouts, delay in cells)
        rows.append([f"{pass_rate:g}", *texts])
    title = "Generation phases / sampled rollouts / mean delay, per step, by the size of a further round"
    open_console().print(Table(title, ["pass rate", *DEVIATIONS], rows))


if __name__ == "__main__":
    typer.run(main)
