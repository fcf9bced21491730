"""A training run without a model: the driver's step, with drawn outcomes in place of generation and update."""

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
from verl_ext.lab.method import Method
from verl_ext.lab.simulate.engine import SimulatedEngine
from verl_ext.lab.simulate.hardware import Hardware
from verl_ext.lab.simulate.learning import Ability, LearningModel, Update
from verl_ext.lab.simulate.lengths import LengthModel
from verl_ext.lab.simulate.population import draw_logits, stand_in_features
from verl_ext.lab.simulate.prefix_effect import PrefixEffect
from verl_ext.policy import Prompt, RolloutPolicy

MODES = ("sync", "colocate_async", "separate_async")
ACCURACY = "val-core/simulated/acc/mean@1"
PASS_AT = (8, 32)
DATA_SEED = 0


@dataclass(frozen=True)
class World:
    """All that a simulation needs besides a method and a seed.

    Args:
        population: see :func:`~verl_ext.lab.simulate.population.draw_logits`.
        prompts: rows of the data; None: as many as the population says.
        steps: training steps.
        mode: ``sync``: an update waits for all that is in generation; ``colocate_async``: it interrupts it;
            ``separate_async``: generation goes on, with what the next step asks for first.
        test_freq: steps between validations; there is one before the first step and one after the last.
        embedding_correlation: what embeddings know of a prompt's difficulty, for estimators over texts.
        until: accuracy at which a run ends early; None: it never does.
        learning, lengths, hardware, prefixes: the models.

    Raises:
        ValueError: naming the argument that is out of range.
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
    hardware: Hardware = field(default_factory=Hardware)
    prefixes: PrefixEffect = field(default_factory=PrefixEffect)

    def __post_init__(self):
        checks.integer("steps", self.steps, 1)
        checks.integer("test_freq", self.test_freq, 1)
        checks.choice("mode", self.mode, MODES)
        checks.number("embedding_correlation", self.embedding_correlation, 0, 1)
        if self.until is not None:
            checks.number("until", self.until, 0, 1)


@dataclass(frozen=True)
class Simulated:
    """What came of a run.

    Attributes:
        records: metrics by step, in training's names; step 0 is the validation before training.
        seconds: that the simulation took.
        ended: why it ended before its last step; None: it did not.
    """

    records: dict[int, dict[str, float]]
    seconds: float
    ended: str | None = None

    @property
    def rollouts(self) -> int:
        """Rollouts sampled in all."""
        return int(max((record.get("rollouts/sampled_total", 0.0) for record in self.records.values()), default=0))


def simulate(
    method: Method, world: World, seed: int, on_step: Callable[[int, dict[str, float]], None] = lambda *_: None
) -> Simulated:
    """Run ``method`` in ``world``.

    The data is the same for every seed, as it is in training; its order, outcomes and lengths are drawn from ``seed``,
    the order alike for every method.

    Args:
        method: what to run.
        world: where.
        seed: of everything that is drawn, the policy's own ``data.seed`` included.
        on_step: called with each step and its metrics.

    Raises:
        ValueError: what the policy, the population or the models refuse.
    """
    started = time.perf_counter()
    logits = draw_logits(world.population, world.prompts, np.random.default_rng(DATA_SEED))
    if logits.size < method.train_batch_size:
        raise ValueError(f"prompts={logits.size}: a training step needs {method.train_batch_size} different ones.")
    policy = _policy(method, logits, world, seed)
    ability = Ability(logits)
    rng = np.random.default_rng([seed, 1])
    engine = SimulatedEngine(
        ability, world.lengths, world.hardware, world.prefixes, rng, trajectories=policy.reads_trajectories
    )
    run = RolloutController(policy, _epochs(logits.size, seed), logits.size, engine)
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
    return Simulated(records, time.perf_counter() - started, ended)


def _policy(method: Method, logits: np.ndarray, world: World, seed: int) -> RolloutPolicy:
    """The method's policy, its run started."""
    with tempfile.TemporaryDirectory() as folder:
        features = None
        if method.reads_texts:
            features = Path(folder) / "features.npy"
            rng = np.random.default_rng([seed, 2])
            np.save(features, stand_in_features(logits, world.embedding_correlation, rng))
        policy = method.policy(seed, features)
        policy.start_run(world.steps, [""] * logits.size)
    return policy


def _epochs(prompts: int, seed: int) -> Iterator[Prompt]:
    """Endless epochs, each in an order of its own."""
    rows = [Prompt(f"p{row}", row) for row in range(prompts)]
    for epoch in itertools.count():
        for row in np.random.default_rng([seed, 3, epoch]).permutation(prompts).tolist():
            yield rows[row]


def _step(run: RolloutController, step: int, world: World) -> dict[str, float]:
    """One training step, as the driver's replay buffer and trainers do it."""
    engine: SimulatedEngine = run.engine
    last = step == world.steps
    drain = last or world.mode == "sync"
    began = engine.clock
    if run.step < step:
        engine.version = step - 1
        run.begin_step(step)
    batch = run.fill_batch(engine.finish, drain)
    metrics = run.metrics()
    times = _times(engine.clock - began, metrics, world.hardware)
    if world.mode == "separate_async" and not last:
        run.begin_step(step + 1)
        engine.clock += times["timing_s/update_actor"]
    engine.version = step
    update = world.learning.update_of(batch, step, run.policy.prompt_weight)
    engine.ability.learn(batch, update)
    return metrics | times | _learned(update, engine.ability)


def _times(generation: float, metrics: dict[str, float], hardware: Hardware) -> dict[str, float]:
    """In verl's names."""
    update = hardware.update_time(int(metrics["tokens/trained"]))
    return {"timing_s/gen": generation, "timing_s/update_actor": update, "timing_s/step": generation + update}


def _learned(update: Update, ability: Ability) -> dict[str, float]:
    return {
        "simulation/signal": update.signal,
        "simulation/noise": update.noise,
        "simulation/shared_logit": ability.shared,
        "simulation/own_logit_mean": float(ability.own.mean()),
    }


def _validation(ability: Ability) -> dict[str, float]:
    """Expected accuracy and pass@k on prompts that are as difficult as the data and were never trained on."""
    rates = ability.held_out_rates()
    values = {f"val-aux/simulated/acc/best@{k}/mean": float(np.mean(1 - (1 - rates) ** k)) for k in PASS_AT}
    return {ACCURACY: float(rates.mean()), **values}
