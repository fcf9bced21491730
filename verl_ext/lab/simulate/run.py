"""A training run without a model: the driver's step with a simulated engine; success rates never change."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl_ext import checks
from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch
from verl_ext.lab.comparison import LabRun
from verl_ext.lab.method import Method, check_prompts
from verl_ext.lab.simulate.engine import PrefixEffect, SimulatedEngine
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel
from verl_ext.lab.simulate.population import draw_logits, stand_in_features
from verl_ext.policy import MODES, Prompt, RolloutPolicy
from verl_ext.resolvers import refusals

DATA_SEED = 0


@dataclass(frozen=True)
class World:
    """Everything a simulation needs besides a method and a seed.

    Args:
        population: see :func:`~verl_ext.lab.simulate.population.draw_logits`.
        prompts: rows of the data; None: the population's default.
        steps: training steps.
        mode: ``sync``: an update waits until all rollouts have finished; ``colocate_async``: an update interrupts them;
            ``separate_async``: generation goes on during an update, beginning with the requests of the next step.
        embedding_correlation: correlation of prompt embeddings with difficulty, for estimators over texts, in [0, 1].
        lengths, speed, prefixes: the models of response lengths, engines and prefixes.

    Raises:
        ValueError: naming the argument out of range.
    """

    population: str = "polaris_8b"
    prompts: int | None = None
    steps: int = 50
    mode: str = "sync"
    embedding_correlation: float = 0.5
    lengths: LengthModel = field(default_factory=LengthModel)
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    prefixes: PrefixEffect = field(default_factory=PrefixEffect)

    def __post_init__(self):
        checks.integer("steps", self.steps, 1)
        checks.choice("mode", self.mode, MODES)
        checks.number("embedding_correlation", self.embedding_correlation, 0, 1)


def simulate(
    method: Method, world: World, seed: int, on_step: Callable[[int, dict[str, float]], None] = lambda *_: None
) -> LabRun:
    """Run ``method`` in ``world``. No prompt's success rate changes: :mod:`verl_ext.lab.learn` has models that learn.

    As in training, the data is the same for every seed. The order of the data, rewards and lengths are drawn from
    ``seed``; all methods see the same order.

    Args:
        method: the method to run.
        world: the population, the number of steps and the models.
        seed: seed of all random numbers, including the policy's ``data.seed``.
        on_step: called with each step and its metrics.

    Raises:
        ValueError: the policy, the population or a model refuses its settings.
    """
    started = time.perf_counter()
    run = start(method, world, seed)
    records: dict[int, dict[str, float]] = {}

    ended = None
    for step in range(1, world.steps + 1):
        try:
            records[step] = _step(run, step, world)
        except CannotFillBatch as error:
            ended = str(error)
            break
        on_step(step, records[step])
    return LabRun(f"{method.name}_{seed}", records, duration=time.perf_counter() - started, ended=ended)


def start(method: Method, world: World, seed: int) -> RolloutController:
    """The run before its first step; arguments and errors as of :func:`simulate`."""
    logits = draw_logits(world.population, world.prompts, np.random.default_rng(DATA_SEED))
    check_prompts(method, logits.size)
    policy = start_policy(method, logits, seed, world.embedding_correlation, world.steps)
    with refusals(method.config.rollout_policy):
        policy.check_trainer_mode(world.mode)
    rng = np.random.default_rng([seed, 1])
    engine = SimulatedEngine(logits, world.lengths, world.speed, world.prefixes, rng, policy.reads_trajectories)
    return RolloutController(policy, epochs(logits.size, seed), logits.size, engine)


def start_policy(
    method: Method, logits: np.ndarray, seed: int, embedding_correlation: float, steps: int | None
) -> RolloutPolicy:
    """Make the method's policy and start its run; estimators over texts get stand-ins for embeddings.

    Args:
        method: the method to run.
        logits: (Q,) of success.
        seed: of the run.
        embedding_correlation: of the stand-ins with the logits.
        steps: of the whole run; None: not known.
    """
    with stand_ins(method, logits, seed, embedding_correlation) as features:
        policy = method.policy(seed, features)
        policy.start_run(steps, [""] * logits.size)
    return policy


@contextmanager
def stand_ins(method: Method, logits: np.ndarray, seed: int, embedding_correlation: float) -> Iterator[Path | None]:
    """Within the block, a file of stand-ins for embeddings; None for a method that reads no texts.

    The arguments are those of :func:`start_policy`.
    """
    with tempfile.TemporaryDirectory() as folder:
        features = None
        if method.reads_texts:
            features = Path(folder) / "features.npy"
            rng = np.random.default_rng([seed, 2])
            np.save(features, stand_in_features(logits, embedding_correlation, rng))
        yield features


def epochs(prompts: int, seed: int, seen: int = 0) -> Iterator[Prompt]:
    """Endless epochs, each in a new random order; the first ``seen`` prompts are left out."""
    rows = [Prompt(f"p{row}", row, {"data_source": "lab"}) for row in range(prompts)]
    for epoch in itertools.count(seen // prompts):
        order = np.random.default_rng([seed, 3, epoch]).permutation(prompts).tolist()
        for row in order[seen % prompts if epoch == seen // prompts else 0 :]:
            yield rows[row]


def _step(run: RolloutController, step: int, world: World) -> dict[str, float]:
    """One training step, in the order of the driver's replay buffer and trainer."""
    engine: SimulatedEngine = run.engine
    last = step == world.steps
    drain = last or world.mode == "sync"
    began = engine.clock
    if run.step < step:
        engine.version = step - 1
        run.begin_step(step)
    run.fill_batch(engine.finish, drain)
    metrics = run.metrics()
    generation, update_seconds = engine.clock - began, world.speed.update_time(int(metrics["tokens/trained"]))
    if world.mode == "separate_async" and not last:
        run.begin_step(step + 1)
        engine.clock += update_seconds
    engine.version = step
    return metrics | {
        "timing_s/gen": generation,
        "timing_s/update_actor": update_seconds,
        "timing_s/step": generation + update_seconds,
    }
