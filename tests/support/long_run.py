"""Thousands of steps of any recipe without a model, and what grows in their course."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from recipe.dynamic_sampling.policy import DynamicSampling
from recipe.grpo.policy import Uniform
from recipe.hora.policy import Hora
from recipe.knapsack.policy import Knapsack
from recipe.pilot_commit.policy import PilotCommit
from recipe.prefix_sampling.policy import PrefixSampling
from recipe.vip.policy import Vip
from support.engine import LENGTH, BernoulliEngine, epochs, prompts, run_step
from verl_ext.controller import RolloutController
from verl_ext.policy import Group, Rollout, RolloutPolicy
from verl_ext.trajectory import Trajectory

PROMPTS = 256  # an epoch of uniform sampling is 32 steps
BATCH = 8
OUTCOMES = [Trajectory([outcome] * LENGTH, [True] * LENGTH) for outcome in (0, 1)]


class FastEngine(BernoulliEngine):
    """Keeps no record of what it was asked for, and shares its trajectories."""

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        """In the order of submission: shuffling what waits at every look would cost more than the driver."""
        count = len(self.waiting) if count is None else count
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        return [(group.id, [self.rollout(group) for _ in range(n)]) for group, n in done]

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        self.waiting.extend(wave)

    def release(self, groups: list[Group]) -> None:
        pass

    def rollout(self, group: Group) -> Rollout:
        draw, fails, tokens = self.rng.random(3).tolist()
        if fails < self.failure_rate:
            return Rollout(float("nan"), None, 0, self.version, failed=True)
        rate, replayed = self.success_rates[group.prompt.id], 0
        if group.prefix is not None:
            replayed = len(group.prefix)
            rate += replayed / LENGTH * (int(group.prefix.tokens[0]) - rate)
        correct = draw < rate
        return Rollout(
            float(correct), correct, 1 + int(49 * tokens), self.version, replayed, trajectory=OUTCOMES[correct]
        )


def policies(
    folder: Path, batch: int = BATCH, prompts: int = PROMPTS, rollouts: int = 8
) -> dict[str, Callable[[], RolloutPolicy]]:
    """Every recipe as it comes, with ``rollouts`` per prompt; VIP on random features in ``folder``."""
    features = folder / f"features_{prompts}.npy"
    if not features.exists():
        np.save(features, np.random.default_rng(0).normal(size=(prompts, 16)).astype(np.float32))
    size = {"train_batch_size": batch}
    return {
        "grpo": lambda: Uniform(**size, n=rollouts),
        "dynamic_sampling": lambda: DynamicSampling(**size, n=rollouts),
        "pilot_commit": lambda: PilotCommit(**size, n_pilot=8, n_commit=max(rollouts - 8, 8)),
        "hora": lambda: Hora(**size, G=rollouts, G0=2),
        "vip": lambda: Vip(**size, n=rollouts, estimator_options={"features": str(features)}),
        "knapsack": lambda: Knapsack(**size, n=rollouts),
        "prefix_sampling": lambda: PrefixSampling(**size, n=rollouts),
    }


@dataclass(frozen=True)
class Sizes:
    """What may not grow.

    Attributes:
        state_bytes: of the state that goes into a checkpoint.
        live: groups.
        metrics: names that are logged.
        log_records: written since the last sizes.
        memory: resident bytes of the process.
        files: open files of the process.
    """

    state_bytes: int
    live: int
    metrics: int
    log_records: int
    memory: int
    files: int


class LongRun:
    """A run of so many steps; a context in which what it logs is counted.

    Success rates are between 0.1 and 0.5, so that no epoch has nothing to train on and few prompts are evicted, and
    one rollout in fifty fails.
    """

    def __init__(self, policy: RolloutPolicy, steps: int, prompt_count: int = PROMPTS):
        rows = prompts(prompt_count)
        rates = np.random.default_rng(1).uniform(0.1, 0.5, len(rows)).tolist()
        policy.start_run(steps, [f"What is {row.row} + 1?" for row in rows])
        engine = FastEngine({row.id: rate for row, rate in zip(rows, rates, strict=True)}, failure_rate=0.02)
        self.controller = RolloutController(policy, epochs(rows), len(rows), engine)
        self._log, self._names, self._records = _Records(), set(), 0

    def __enter__(self) -> LongRun:
        self._log.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._log.__exit__()

    def step(self) -> float:
        """The next step; returns its processor time, in seconds."""
        started = time.process_time()
        run_step(self.controller, self.controller.step + 1, at_once=64)
        self._names |= self.controller.metrics().keys()
        return time.process_time() - started

    def sizes_after(self, steps: int) -> Sizes:
        """After so many more steps."""
        for _ in range(steps):
            self.step()
        process, state = psutil.Process(), len(json.dumps(self.controller.state_dict()))
        written, self._records = self._log.count - self._records, self._log.count
        live, memory = len(self.controller.live), process.memory_info().rss
        return Sizes(state, live, len(self._names), written, memory, process.num_fds())


class _Records(logging.Handler):
    """Counts what our packages log."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1

    def __enter__(self) -> _Records:
        for name in ("verl_ext", "recipe"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_) -> None:
        for name in ("verl_ext", "recipe"):
            logging.getLogger(name).removeHandler(self)
