"""Runs of any recipe without a model, for benchmarks and tests: policies of a small size, and bounded sizes."""

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
from recipe.greso.policy import Greso
from recipe.grpo.policy import Uniform
from recipe.hora.policy import Hora
from recipe.knapsack.policy import Knapsack
from recipe.mopps.policy import Mopps
from recipe.pilot_commit.policy import PilotCommit
from recipe.pods.policy import Pods
from recipe.prefix_sampling.policy import PrefixSampling
from recipe.recall.policy import Recall
from recipe.reinforce_ada.policy import ReinforceAda
from recipe.speed_rl.policy import SpeedRL
from recipe.vip.policy import Vip
from verl_ext.controller import RolloutController
from verl_ext.policy import RolloutPolicy
from verl_ext.testing.engine import FastEngine, epochs, prompts, run_step

PROMPTS = 256  # an epoch of uniform sampling is 32 steps
BATCH = 8


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
        "recall": lambda: Recall(**size, n=rollouts),
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

    def __init__(self, policy: RolloutPolicy, steps: int):
        rows = prompts(PROMPTS)
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
