"""Runs of any recipe without a model, for benchmarks and tests: an engine, a training step, and bounded sizes."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from recipe.dynamic_sampling.policy import DynamicSampling
from recipe.greso.policy import Greso
from recipe.grpo.policy import Uniform
from recipe.hora.policy import Hora
from recipe.knapsack.policy import Knapsack
from recipe.mopps.policy import Mopps
from recipe.pilot_commit.policy import PilotCommit
from recipe.pods.policy import Pods
from recipe.prefix_sampling.policy import PrefixSampling
from recipe.reinforce_ada.policy import ReinforceAda
from recipe.speed_rl.policy import SpeedRL
from recipe.vip.policy import Vip
from verl_ext.controller import RolloutController
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy
from verl_ext.trajectory import Trajectory

LENGTH = 20  # tokens of every trajectory
PROMPTS = 256  # an epoch of uniform sampling is 32 steps
BATCH = 8
OUTCOMES = [Trajectory([outcome] * LENGTH, [True] * LENGTH) for outcome in (0, 1)]


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
        self.waiting: list[tuple[Group, int, int]] = []  # group, rollouts, version of the weights at submission
        self.version = 0

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        self.waiting.extend((group, count, self.version) for group, count in wave)

    def release(self, groups: list[Group]) -> None:
        pass

    def finish(self, count: int | None = None) -> list[tuple[str, list[Rollout]]]:
        """Group ids and rollouts of the ``count`` oldest waves; None: of all waves."""
        count = len(self.waiting) if count is None else count
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        return [(group.id, [self.rollout(group, version) for _ in range(n)]) for group, n, version in done]

    def success_rate(self, group: Group) -> tuple[float, int]:
        """Success rate of a rollout of this group, and the tokens of its prefix."""
        rate, prefix_tokens = self.success_rates[group.prompt.id], 0
        if group.prefix is not None:
            prefix_tokens = len(group.prefix)
            rate += prefix_tokens / LENGTH * (int(group.prefix.tokens[0]) - rate)
        return rate, prefix_tokens

    def rollout(self, group: Group, version: int) -> Rollout:
        draw, fails, tokens = self.rng.random(3).tolist()
        if fails < self.failure_rate:
            return Rollout(float("nan"), None, 0, version, failed=True)
        rate, prefix_tokens = self.success_rate(group)
        correct = draw < rate
        return Rollout(
            float(correct), correct, 1 + int(49 * tokens), version, prefix_tokens, trajectory=OUTCOMES[correct]
        )


def prompts(count: int) -> list[Prompt]:
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
        at_once: waves that finish between two looks of the controller; None: all.
        engine: the innermost engine, if ``run.engine`` wraps another engine.
    """
    engine = run.engine if engine is None else engine
    engine.version = step - 1
    run.begin_step(step)
    batch = run.fill_batch(lambda: engine.finish(at_once), drain)
    run.ledger.check(run.live.values())
    return batch


def policies(
    folder: Path, batch: int = BATCH, prompts: int = PROMPTS, rollouts: int = 8
) -> dict[str, Callable[[], RolloutPolicy]]:
    """Recipe → constructor of its policy, with ``rollouts`` per prompt; VIP's random features go to ``folder``."""
    features = folder / f"features_{prompts}.npy"
    if not features.exists():
        np.save(features, np.random.default_rng(0).normal(size=(prompts, 16)).astype(np.float32))
    size = {"train_batch_size": batch}
    return {
        "grpo": lambda: Uniform(**size, n=rollouts),
        "dynamic_sampling": lambda: DynamicSampling(**size, n=rollouts),
        "greso": lambda: Greso(**size, n=rollouts),
        "mopps": lambda: Mopps(**size, n=rollouts),
        "pilot_commit": lambda: PilotCommit(**size, n_pilot=8, n_commit=max(rollouts - 8, 8)),
        "speed_rl": lambda: SpeedRL(**size, n_init=4, n_cont=max(rollouts - 4, 1)),
        "hora": lambda: Hora(**size, G=rollouts, G0=2),
        "vip": lambda: Vip(**size, n=rollouts, estimator_options={"features": str(features)}),
        "knapsack": lambda: Knapsack(**size, n=rollouts),
        "pods": lambda: Pods(**size, n=rollouts, m=max(2, rollouts // 2)),
        "reinforce_ada": lambda: ReinforceAda(**size, n=4, M=max(4, rollouts // 2)),
        "prefix_sampling": lambda: PrefixSampling(**size, n=rollouts),
    }


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run; none may grow with its steps.

    Attributes:
        state_bytes: bytes of the controller's state as JSON, as in a checkpoint.
        live: groups in memory.
        metrics: distinct metric names so far.
        log_records: log records since the last measurement.
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
    """A run of ``steps`` steps; as a context manager, counts the log records of ``verl_ext`` and ``recipe``.

    Success rates lie between 0.1 and 0.5, so every epoch has effective groups and few prompts are evicted. One
    rollout in fifty fails.
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
        """Run the next step; returns its processor time in seconds."""
        started = time.process_time()
        run_step(self.controller, self.controller.step + 1, at_once=64)
        self._names |= self.controller.metrics().keys()
        return time.process_time() - started

    def sizes_after(self, steps: int) -> Sizes:
        """The sizes after ``steps`` more steps."""
        for _ in range(steps):
            self.step()
        process, state = psutil.Process(), len(json.dumps(self.controller.state_dict()))
        written, self._records = self._log.count - self._records, self._log.count
        live, memory = len(self.controller.live), process.memory_info().rss
        return Sizes(state, live, len(self._names), written, memory, process.num_fds())


class _Records(logging.Handler):
    """Counts the log records of ``verl_ext`` and ``recipe``."""

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
