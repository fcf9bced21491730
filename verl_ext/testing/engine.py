"""Engines without a model, and a training step in the driver's order of calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from verl_ext.controller import RolloutController
from verl_ext.policy import Group, Prompt, Rollout
from verl_ext.trajectory import Trajectory

LENGTH = 20  # tokens of every trajectory
OUTCOMES = [Trajectory(np.full(LENGTH, outcome), np.full(LENGTH, True)) for outcome in (0, 1)]


class FastEngine:
    """Answers each rollout at once: correct with its prompt's success rate, failed with ``failure_rate``.

    A trajectory is LENGTH equal tokens: 1 for a correct response, 0 for a wrong one. A prefix with a share x of its
    tokens moves the success rate r to r + x (token - r). A rollout has the version of the weights that began it, so a
    rollout in generation across steps is stale. All trajectories with the same outcome are one object, and
    waves finish in the order of submission, so the engine takes little time beside the driver.
    """

    def __init__(self, success_rates: Mapping[str, float], seed: int = 0, failure_rate: float = 0.0):
        self.success_rates, self.failure_rate = success_rates, failure_rate
        self.rng = np.random.default_rng(seed)
        self.reads_trajectories = True  # as the policy's; without it, rollouts carry no trajectory
        self.waiting: list[tuple[Group, int, int]] = []  # group, rollouts, version of the weights at submission
        self.version = 0
        self.cancelled: set[str] = set()  # ids of groups whose waves are being cancelled

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        """Note the requests."""
        self.waiting.extend((group, count, self.version) for group, count in requests)

    def release(self, groups: list[Group]) -> None:
        """Nothing is kept of a group."""

    def cancel(self, groups: list[Group]) -> None:
        """These groups' waves finish next; the first half of their rollouts has finished by then."""
        known = {group.id for group, _, _ in self.waiting}
        restored = [group for group in groups if group.id not in known]
        self.waiting += [(group, group.outstanding, self.version) for group in restored]
        self.cancelled |= {group.id for group in groups}

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        """Group ids and rollouts of the ``count`` oldest waves, cancelled waves first; None: of all waves."""
        if self.cancelled:
            self.waiting.sort(key=lambda wave: wave[0].id not in self.cancelled)
        count = len(self.waiting) if count is None else count
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        waves = [(group.id, self.wave(group, size, version)) for group, size, version in done]
        self.cancelled -= {group.id for group, _, _ in done}
        return waves

    def wave(self, group: Group, size: int, version: int) -> list[Rollout]:
        """``size`` rollouts of the group."""
        rollouts = [self.rollout(group, version) for _ in range(size)]
        finished = size // 2 if group.id in self.cancelled else size
        return [*rollouts[:finished], *map(cut_off, rollouts[finished:])]

    def success_rate(self, group: Group) -> tuple[float, int]:
        """Success rate of a rollout of this group, and the tokens of its prefix."""
        rate, prefix_tokens = self.success_rates[group.prompt.id], 0
        if group.prefix is not None:
            prefix_tokens = len(group.prefix)
            rate += prefix_tokens / LENGTH * (int(group.prefix.tokens[0]) - rate)
        return rate, prefix_tokens

    def rollout(self, group: Group, version: int) -> Rollout:
        """One rollout, drawn from ``rng``."""
        draw, fails, tokens = self.rng.random(3).tolist()
        if fails < self.failure_rate:
            return Rollout(float("nan"), None, 0, version, failed=True)
        rate, prefix_tokens = self.success_rate(group)
        correct = draw < rate
        trajectory = OUTCOMES[correct] if self.reads_trajectories else None
        return Rollout(float(correct), correct, 1 + int(49 * tokens), version, prefix_tokens, trajectory=trajectory)


class KeyedEngine(FastEngine):
    """The rewards of a wave depend only on its group and on the group's earlier rollouts; older groups finish first.

    A wave that is generated anew therefore has the same rewards: a resumed run differs from an uninterrupted run only
    in the versions of the rollouts that were in generation.

    Args:
        success_rates: by prompt id.
        failure_rate: probability that a rollout fails.
        lost_waves: probability that all rollouts of a wave fail.
        order: seed of a random order of finishing; None: older groups finish first.
    """

    def __init__(
        self,
        success_rates: Mapping[str, float],
        failure_rate: float = 0.0,
        lost_waves: float = 0.0,
        order: int | None = None,
    ):
        super().__init__(success_rates, failure_rate=failure_rate)
        self.lost_waves = lost_waves
        self.order = None if order is None else np.random.default_rng(order)

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        """Group ids and rollouts of the ``count`` first waves; None: of all waves."""
        if self.order is None:
            self.waiting.sort(key=lambda wave: number_of(wave[0]))
        else:
            self.order.shuffle(self.waiting)
        return super().finish(count)

    def wave(self, group: Group, size: int, version: int) -> list[Rollout]:
        """``size`` rollouts of the group, the same in every call until the group has more rollouts."""
        self.rng = np.random.default_rng([number_of(group), len(group.rollouts)])
        if self.rng.random() < self.lost_waves:
            return [Rollout(float("nan"), None, 0, version, failed=True)] * size
        return super().wave(group, size, version)


def cut_off(rollout: Rollout) -> Rollout:
    """The rollout, cancelled when half of its tokens were generated."""
    tokens, version = rollout.tokens // 2, rollout.policy_version
    return Rollout(float("nan"), None, tokens, version, rollout.prefix_tokens, failed=True, cancelled=True)


def number_of(group: Group) -> int:
    """The controller numbers groups in the order of their first requests."""
    return int(group.id.rsplit("-", 1)[1])


def prompts(count: int) -> list[Prompt]:
    """Rows of a data set."""
    return [Prompt(f"p{index}", index) for index in range(count)]


def epochs(rows: list[Prompt], seed: int = 0) -> Iterator[Prompt]:
    """Endless shuffled epochs."""
    for epoch in itertools.count():
        yield from (rows[index] for index in np.random.default_rng([seed, epoch]).permutation(len(rows)))


def run_step(
    run: RolloutController,
    step: int,
    *,
    drain: bool = True,
    at_once: int | None = 3,
    engine: FastEngine | None = None,
) -> list[Group]:
    """One training step in the driver's order of calls; returns the batch.

    Args:
        run: the run, whose engine is a :class:`FastEngine`.
        step: number of the step, from 1.
        drain: wait for every rollout before the update.
        at_once: waves that finish between two looks of the controller; None: all.
        engine: the innermost engine, if ``run.engine`` wraps another engine.
    """
    source = cast(FastEngine, run.engine) if engine is None else engine
    source.version = step - 1
    run.begin_step(step)
    batch = run.fill_batch(lambda: source.finish(at_once), drain)
    run.ledger.check(run.live.values())
    return batch
