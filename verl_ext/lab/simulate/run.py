"""A training run without a model: the driver's step, with a simulated engine and a simulated update."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from verl_ext import checks
from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch
from verl_ext.lab.comparison import LabRun
from verl_ext.lab.method import Method
from verl_ext.lab.simulate.engine import PrefixEffect, SimulatedEngine
from verl_ext.lab.simulate.engine_speed import EngineSpeed, LengthModel
from verl_ext.lab.simulate.learning import Ability, LearningModel
from verl_ext.lab.simulate.population import draw_logits, stand_in_features
from verl_ext.policy import MODES, Prompt, RolloutPolicy

ACCURACY = "val-core/simulated/acc/mean@1"
PASS_AT = (8, 32)
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
        test_freq: steps between validations. The run also validates before the first step and after the last.
        embedding_correlation: correlation of prompt embeddings with difficulty, for estimators over texts, in [0, 1].
        until: accuracy at which a run ends early; None: never.
        learning, lengths, speed, prefixes: the models of learning, response lengths, engines and prefixes.

    Raises:
        ValueError: naming the argument out of range.
    """

    population: str = "polaris_8b"
    prompts: int | None = None
    steps: int = 200
    mode: str = "sync"
    test_freq: int = 5
    embedding_correlation: float = 0.5
    until: float | None = None
    learning: LearningModel = field(default_factory=LearningModel)
    lengths: LengthModel = field(default_factory=LengthModel)
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    prefixes: PrefixEffect = field(default_factory=PrefixEffect)

    def __post_init__(self):
        checks.integer("steps", self.steps, 1)
        checks.integer("test_freq", self.test_freq, 1)
        checks.choice("mode", self.mode, MODES)
        checks.number("embedding_correlation", self.embedding_correlation, 0, 1)
        if self.until is not None:
            checks.number("until", self.until, 0, 1)


class SimulatedRun(LabRun):
    """A simulated run; it may end early, at the accuracy ``until``."""


def simulate(
    method: Method, world: World, seed: int, on_step: Callable[[int, dict[str, float]], None] = lambda *_: None
) -> SimulatedRun:
    """Run ``method`` in ``world``.

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
    logits = draw_logits(world.population, world.prompts, np.random.default_rng(DATA_SEED))
    if logits.size < method.train_batch_size:
        raise ValueError(f"prompts={logits.size}: a training step needs {method.train_batch_size} different prompts.")
    policy = start_policy(method, logits, seed, world.embedding_correlation, world.steps)
    ability = Ability(logits)
    rng = np.random.default_rng([seed, 1])
    engine = SimulatedEngine(ability, world.lengths, world.speed, world.prefixes, rng, policy.reads_trajectories)
    run = RolloutController(policy, epochs(logits.size, seed), logits.size, engine)
    records: dict[int, dict[str, float]] = {}

    def note(step: int, record: dict[str, float]) -> None:
        records[step] = record
        on_step(step, record)

    note(0, _validation(ability))
    ended = None
    for step in range(1, world.steps + 1):
        try:
            record = _step(run, step, world)
        except CannotFillBatch as error:
            ended = str(error)
            break
        if step % world.test_freq == 0 or step == world.steps:
            record |= _validation(ability)
        note(step, record)
        if world.until is not None and record.get(ACCURACY, 0.0) >= world.until:
            break
    return SimulatedRun(f"{method.name}_{seed}", records, duration=time.perf_counter() - started, ended=ended)


def start_policy(
    method: Method, logits: np.ndarray, seed: int, embedding_correlation: float, steps: int | None
) -> RolloutPolicy:
    """Make the method's policy and start its run; estimators over texts get stand-ins for embeddings.

    Args:
        method: the method to run.
        logits: (Q,) of success before training.
        seed: of the run.
        embedding_correlation: of the stand-ins with the logits.
        steps: of the whole run; None: not known.
    """
    with tempfile.TemporaryDirectory() as folder:
        features = None
        if method.reads_texts:
            features = Path(folder) / "features.npy"
            rng = np.random.default_rng([seed, 2])
            np.save(features, stand_in_features(logits, embedding_correlation, rng))
        policy = method.policy(seed, features)
        policy.start_run(steps, [""] * logits.size)
    return policy


def epochs(prompts: int, seed: int, seen: int = 0) -> Iterator[Prompt]:
    """Endless epochs, each in a new random order, from row ``seen`` of this order on."""
    rows = [Prompt(f"p{row}", row) for row in range(prompts)]
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
    batch = run.fill_batch(engine.finish, drain)
    metrics = run.metrics()
    generation, update_seconds = engine.clock - began, world.speed.update_time(int(metrics["tokens/trained"]))
    if world.mode == "separate_async" and not last:
        run.begin_step(step + 1)
        engine.clock += update_seconds
    engine.version = step
    update = world.learning.update_of(batch, step, run.policy.prompt_weight, run.policy.baseline)
    engine.ability.learn(batch, update)
    return metrics | {
        "timing_s/gen": generation,
        "timing_s/update_actor": update_seconds,
        "timing_s/step": generation + update_seconds,
        "simulation/signal": update.signal,
        "simulation/noise": update.noise,
        "simulation/shared_logit": engine.ability.shared,
        "simulation/own_logit_mean": float(engine.ability.own.mean()),
    }


def _validation(ability: Ability) -> dict[str, float]:
    """Expected accuracy and pass@k on prompts as difficult as the data's but never trained on."""
    rates = ability.held_out_rates()
    values = {f"val-aux/simulated/acc/best@{k}/mean": float(np.mean(1 - (1 - rates) ** k)) for k in PASS_AT}
    return {ACCURACY: float(rates.mean()), **values}
