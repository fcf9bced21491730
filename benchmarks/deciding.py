"""Waiting time of a training step of 512 prompts for decisions, for each recipe that predicts success rates.

    python benchmarks/deciding.py

The policies immediately receive the rollouts that they request; each prompt has its own success rate. The benchmark
measures the calls for which a training step waits: ``start_step``, every ``on_group``, and ``take_batch``. Between two
steps it sleeps for ``--update`` seconds, which is shorter than any update of 512 prompts. The table has wall time,
processor time of the deciding thread (which depends less on other processes), and processor time of a thread that works
during the update (the Gaussian process).
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

from recipe.hora.policy import Hora
from recipe.knapsack.policy import Knapsack
from recipe.vip.policy import Vip
from verl_ext.lab.table import Table, open_console
from verl_ext.policy import Group, Prompt, Request, Rollout, RolloutPolicy

WIDTH = 384  # dimensions of a MiniLM embedding


def policies(batch: int, features: Path) -> dict[str, RolloutPolicy]:
    """Policies with the recipes' defaults; VIP reads features from a file, so no embedding model is needed."""
    return {
        "hora": Hora(train_batch_size=batch, G=32, G0=8, warm_up_component=None),
        "vip": Vip(train_batch_size=batch, n=8, estimator_options={"features": str(features)}),
        "knapsack": Knapsack(train_batch_size=batch, n=8),
    }


def clocks() -> np.ndarray:
    """Wall time, processor time of this thread, and processor time of this process's other threads, in seconds."""
    thread = time.thread_time()
    return np.array([time.perf_counter(), thread, time.process_time() - thread])


class Stopwatch:
    """Sums the wall time and this thread's processor time of the calls made through it, in seconds."""

    def __init__(self) -> None:
        self.seconds = np.zeros(2)

    def __call__(self, call: Callable, *arguments):
        start = clocks()
        result = call(*arguments)
        self.seconds += (clocks() - start)[:2]
        return result


def train_step(policy: RolloutPolicy, step: int, prompts: list[Prompt], rates: np.ndarray, rng) -> np.ndarray:
    """(2,) seconds that the policy takes for a step on these prompts: wall time, and this thread's processor time."""
    watch = Stopwatch()
    actions = deque(watch(policy.start_step, step, lambda count: prompts[:count]))
    groups: dict[str, Group] = {}
    while actions:
        action = actions.popleft()
        assert isinstance(action, Request), f"{action} is no request, and every rollout here is usable"
        prompt = action.target.prompt if isinstance(action.target, Group) else action.target
        group = groups.setdefault(prompt.id, Group(prompt.id, prompt))
        correct = rng.random(action.rollouts) < rates[prompt.row]
        group.rollouts += [Rollout(float(value), bool(value), 1, step) for value in correct]
        actions += watch(policy.on_group, group)
    assert len(watch(policy.take_batch)) == len(prompts)
    return watch.seconds


def measure(policy: RolloutPolicy, size: int, batch: int, steps: int, update: float) -> tuple[np.ndarray, float]:
    """(steps, 2) seconds of :func:`train_step`, and other threads' seconds per step; the first steps are left out."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 0.5, size)
    rows = [Prompt(f"prompt {row}", row) for row in range(size)]
    policy.start_run(None, [row.id for row in rows])
    first_epoch = -(-size // batch) if isinstance(policy, Knapsack) else 2  # uniform
    times = []
    for step in track(range(1, first_epoch + steps + 1), type(policy).__name__, transient=True):
        if step == first_epoch + 1:
            beside = clocks()[2]
        first = (step - 1) * batch
        times.append(train_step(policy, step, [rows[row % size] for row in range(first, first + batch)], rates, rng))
        time.sleep(update if step >= first_epoch else 0)
    return np.array(times[first_epoch:]), (clocks()[2] - beside) / steps


def main(
    batch: Annotated[int, typer.Option(min=4, help="Prompts per step.")] = 512,
    size: Annotated[int, typer.Option(min=4, help="Prompts in the data; DAPO-Math has 17,000.")] = 17_000,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured steps.")] = 20,
    update: Annotated[float, typer.Option(min=0.0, help="Seconds between the decisions of two steps.")] = 1.0,
) -> None:
    """Print the table."""
    console = open_console()
    header = ("recipe", "a step waits, median", "least to largest", "processor, median", "of another thread")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        features = Path(folder) / "features.npy"
        np.save(features, np.random.default_rng(1).normal(size=(size, WIDTH)).astype(np.float32))
        for name, policy in policies(batch, features).items():
            times, beside = measure(policy, size, batch, steps, update)
            (wall, thread), wall_times = 1000 * np.median(times, axis=0), 1000 * times[:, 0]
            spread = f"{wall_times.min():.0f} to {wall_times.max():.0f}"
            rows.append((name, f"{wall:.0f}", spread, f"{thread:.0f}", f"{1000 * beside:.0f}"))
    console.print(f"machine: {platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    console.print(Table(f"milliseconds, {batch} prompts of {size:,}", header, rows))


if __name__ == "__main__":
    typer.run(main)
