"""A generator without a model: each prompt succeeds with its own probability. For tests of policies and the books."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from verl_ext.controller import RolloutController
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy
from verl_ext.trajectory import Trajectory

LENGTH = 20  # tokens of every trajectory


class BernoulliEngine:
    """Finishes waves in a random order when told to; some rollouts fail.

    A trajectory is LENGTH tokens that say how it ended (1 or 0). Starting from part of one pulls the success rate
    towards that end, by that part.
    """

    def __init__(self, success_rates: Mapping[str, float], seed: int = 0, failure_rate: float = 0.0):
        self.success_rates, self.failure_rate = success_rates, failure_rate
        self.rng = np.random.default_rng(seed)
        self.waiting: list[tuple[Group, int]] = []
        self.submitted: list[list[tuple[str, int]]] = []
        self.released: list[str] = []
        self.version = 0

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        self.waiting.extend(wave)
        self.submitted.append([(group.prompt.id, count) for group, count in wave])

    def release(self, groups: list[Group]) -> None:
        self.released.extend(group.id for group in groups)

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        """The rollouts of ``count`` waves (None: all) out of those submitted, in random order."""
        self.rng.shuffle(self.waiting)
        done, self.waiting = self.waiting[:count], self.waiting[len(self.waiting) if count is None else count :]
        return [(group.id, [self.rollout(group) for _ in range(n)]) for group, n in done]

    def rollout(self, group: Group) -> Rollout:
        if self.rng.random() < self.failure_rate:
            return Rollout(float("nan"), None, 0, self.version, failed=True)
        rate, replayed = self.success_rates[group.prompt.id], 0
        if group.prefix is not None:
            replayed = len(group.prefix)
            rate += replayed / LENGTH * (int(group.prefix.tokens[0]) - rate)
        correct = bool(self.rng.random() < rate)
        return Rollout(
            float(correct),
            correct,
            int(self.rng.integers(1, 50)),
            self.version,
            prefix_tokens=replayed,
            components={"format": float(self.rng.random() < min(1.0, 0.3 * (1 + self.version)))},
            trajectory=Trajectory([int(correct)] * LENGTH, [True] * LENGTH),
        )


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", index) for index in range(count)]


def epochs(rows: list[Prompt], seed: int = 0) -> Iterator[Prompt]:
    """Endless shuffled epochs."""
    for epoch in itertools.count():
        yield from (rows[index] for index in np.random.default_rng([seed, epoch]).permutation(len(rows)))


def controller(
    policy: RolloutPolicy, success_rates: list[float], *, total_steps: int | None = None, **engine
) -> RolloutController:
    rows = prompts(len(success_rates))
    policy.start_run(total_steps, [f"What is {row.row} + 1?" for row in rows])
    bernoulli = BernoulliEngine({row.id: rate for row, rate in zip(rows, success_rates, strict=True)}, **engine)
    return RolloutController(policy, epochs(rows), len(rows), bernoulli)


def run_step(
    run: RolloutController,
    step: int,
    *,
    drain: bool = True,
    at_once: int | None = 3,
    engine: BernoulliEngine | None = None,
) -> list[Group]:
    """One training step as the driver does it; returns the batch. ``engine``: where it is not the controller's own."""
    engine = run.engine if engine is None else engine
    engine.version = step - 1
    run.begin_step(step)
    batch = run.fill_batch(lambda: engine.finish(at_once), drain)
    run.ledger.check(run.live.values())
    return batch
