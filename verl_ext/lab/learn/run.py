"""A training run on the small learner: the driver's step, with a real model in one process."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from verl_ext import checks
from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch, RunError
from verl_ext.files import write_text, written_whole
from verl_ext.lab.comparison import LabRun
from verl_ext.lab.learn.engine import LearnerEngine
from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.learn.update import Learner, Training, rows_of
from verl_ext.lab.learn.worlds import World
from verl_ext.lab.method import Method, check_prompts
from verl_ext.lab.report.accuracy import ROLLOUTS
from verl_ext.lab.report.runs import first_data, read_run
from verl_ext.lab.simulate.population import logit
from verl_ext.lab.simulate.run import epochs, start_policy

OnStep = Callable[[int, Mapping[str, float]], None]
MADE = "model of the world"
LEVEL = re.compile(r"val-aux/.+/acc/level_-?\d+")
"""Metrics in the first line of every log of this module. No other command's log has them there."""


class AlreadyRunning(RunError):
    """Another process writes the files of a run."""


@dataclass(frozen=True)
class Length:
    """How long runs are, and how often they are measured.

    Args:
        rollouts: a run ends with the step that reaches this number of sampled rollouts.
        test_every: rollouts between two measurements of the accuracy, which is also measured before the first step and
            after the last.
        embedding_correlation: correlation of prompt embeddings with difficulty, for estimators over texts.

    Raises:
        InvalidValue: naming the argument out of range.
    """

    rollouts: int = 20_000
    test_every: int = 500
    embedding_correlation: float = 0.5

    def __post_init__(self) -> None:
        checks.integer("rollouts", self.rollouts, 1)
        checks.integer("test_every", self.test_every, 1)
        checks.number("embedding_correlation", self.embedding_correlation, 0, 1)


class LearningRun:
    """One run of a method in a world.

    Args:
        method: parsed with :data:`~verl_ext.lab.learn.update.KEYS`.
        world: where it learns.
        length: how long.
        seed: of all random numbers, including the policy's ``data.seed``. The data is the same for all seeds.

    Raises:
        ValueError: the policy or the learner refuses its settings, or the world has too few prompts for a step.
    """

    def __init__(self, method: Method, world: World, length: Length, seed: int):
        config = method.config.copy()
        OmegaConf.update(config, "data.max_response_length", world.limit)
        training, prompts = Training.of(config), len(world.train)
        check_prompts(method, prompts)
        policy = start_policy(method, logit(world.rates), seed, length.embedding_correlation, None)
        self.world, self.length, self.seed = world, length, seed
        self.temperature = training.temperature
        self.model = world.make_model()
        self.learner = Learner(self.model, training, world.task.pad)
        self.generator = torch.Generator().manual_seed(seed)
        self.engine = LearnerEngine(
            self.model,
            world.task,
            world.train,
            world.limit,
            training.temperature,
            self.generator,
            policy.reads_trajectories,
        )
        self.controller = RolloutController(policy, epochs(prompts, seed), prompts, self.engine)
        self.sampled = 0
        self.duration = 0.0

    @property
    def done(self) -> bool:
        """Whether the rollouts are used up."""
        return self.sampled >= self.length.rollouts

    def step(self) -> dict[str, float]:
        """One training step; returns its metrics.

        Raises:
            CannotFillBatch: the step has nothing to train on.
        """
        began, waves = time.perf_counter(), self.engine.waves
        number = self.controller.step + 1
        self.controller.begin_step(number)
        batch = self.controller.fill_batch(self.engine.finish)
        metrics = self.controller.metrics()
        generated = time.perf_counter()
        taken, policy = [self.engine.take(group) for group in batch], self.controller.policy
        rows = rows_of(taken, self.learner.training, policy.prompt_weight, policy.baseline)
        metrics |= self.learner.update(rows)
        self.engine.version = number
        updated = time.perf_counter()
        before, self.sampled = self.sampled, int(metrics[ROLLOUTS])
        if self.done or before // self.length.test_every < self.sampled // self.length.test_every:
            metrics |= self.validation()
            metrics["timing_s/testing"] = time.perf_counter() - updated
        self.duration += time.perf_counter() - began
        return metrics | {
            "generation/waves": float(self.engine.waves - waves),
            "generation/waves_total": float(self.engine.waves),
            "timing_s/gen": generated - began,
            "timing_s/update_actor": updated - generated,
            "timing_s/step": updated - began,  # as in verl, without the validation
        }

    def validation(self) -> dict[str, float]:
        """Mean success probability on held-out problems, and of each level: exact, without sampling."""
        world = self.world
        rates = success_rates(self.model, world.task, world.held_out, self.temperature)
        levels = np.array([problem.level for problem in world.held_out])
        values = {f"val-aux/{world.name}/acc/level_{at}": float(rates[levels == at].mean()) for at in np.unique(levels)}
        return {f"val-core/{world.name}/acc/mean@1": float(rates.mean()), **values}

    def state_dict(self) -> dict[str, Any]:
        """Everything from which :meth:`load_state_dict` continues, bit by bit.

        Raises:
            RuntimeError: the policy's state is not JSON, so a training could not save it either.
        """
        try:
            controller = json.loads(json.dumps(self.controller.state_dict(), allow_nan=False))
        except (TypeError, ValueError) as error:
            name = type(self.controller.policy).__name__
            raise RuntimeError(f"The state of {name} is not JSON ({error}); see {name}.state_dict.") from error
        return {
            "model": self.model.state_dict(),
            "learner": self.learner.state_dict(),
            "generator": self.generator.get_state(),
            "engine": self.engine.state_dict(),
            "controller": controller,
            "sampled": self.sampled,
            "duration": self.duration,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`, for a run that has not begun."""
        self.model.load_state_dict(state["model"])
        self.learner.load_state_dict(state["learner"])
        self.generator.set_state(state["generator"])
        self.engine.load_state_dict(state["engine"])
        self.controller.load_state_dict(state["controller"])
        prompts = self.controller.prompts
        prompts.rows = epochs(prompts.rows_per_epoch, self.seed, prompts.seen_total)
        self.sampled, self.duration = state["sampled"], state["duration"]


@dataclass(frozen=True)
class Files:
    """The files of one run in a folder.

    Attributes:
        folder: of all runs of a command.
        name: ``<method>_<seed>``.
        settings: what the run depends on; a run under this name with other settings is another run.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """Metrics in the format of verl's file logger."""
        return self.folder / f"{self.name}.jsonl"

    @property
    def result(self) -> Path:
        """Written when the run has finished."""
        return self.folder / f"{self.name}.json"

    @property
    def state(self) -> Path:
        """State of an unfinished run."""
        return self.folder / f"{self.name}.state.pt"

    def check(self) -> None:
        """Raise ValueError if the folder holds a run of this name with other settings, or a log of another command."""
        for file, read in ((self.result, self._read_result), (self.state, self._read_state)):
            if file.exists():
                self._compare(read()["settings"], file)
        # A log of this command without both files is of a run that was killed before it saved its state.
        begun = self.result.exists() or self.state.exists()
        if not begun and self.log.exists() and not any(map(LEVEL.fullmatch, first_data(self.log))):
            raise ValueError(f"{self.log} is no log of verl-ext learn; choose another --out.")

    def finished(self) -> bool:
        """Whether the run has finished."""
        return self.result.exists()

    def load(self) -> dict[str, Any] | None:
        """The saved state, with the log cut back to it; None: no state is saved, or its log is lost: begin anew."""
        if not self.state.exists() or not self.log.exists():
            return None
        state = self._read_state()
        if self.log.stat().st_size < state["logged"]:
            return None
        os.truncate(self.log, state["logged"])
        return state["run"]

    def save(self, run: LearningRun) -> None:
        """Save the state, whole or not at all."""
        with written_whole(self.state) as unfinished:
            logged = self.log.stat().st_size
            torch.save({"settings": dict(self.settings), "logged": logged, "run": run.state_dict()}, unfinished)

    def finish(self, run: LearningRun, ended: str | None) -> None:
        """Note the end of the run, and drop the state."""
        result = {"settings": dict(self.settings), "duration": run.duration, "ended": ended}
        write_text(self.result, json.dumps(result, indent=2))
        self.state.unlink(missing_ok=True)

    def read(self) -> LabRun:
        """The finished run."""
        result = self._read_result()
        run = read_run([self.log])
        return LabRun(**vars(run) | {"name": self.name}, duration=result["duration"], ended=result["ended"])

    def _read_result(self) -> dict[str, Any]:
        return json.loads(self.result.read_text(encoding="utf-8"))

    def _read_state(self) -> dict[str, Any]:
        return torch.load(self.state, weights_only=True)

    def _compare(self, settings: Mapping[str, Any], file: Path) -> None:
        mine = json.loads(json.dumps(dict(self.settings)))
        settings = {key: mine.get(key) for key in ("code", MADE)} | settings  # earlier versions did not note these
        differ = sorted(key for key in {*mine, *settings} if mine.get(key) != settings.get(key))
        if differ:
            raise ValueError(f"{file} is of a run with another {', '.join(differ)}; choose another --out or remove it.")


def learn(run: LearningRun, files: Files, on_step: OnStep = lambda *_: None) -> None:
    """Run to the end, from the saved state if there is one; log every step, and save the state at each measurement.

    Args:
        run: a run that has not begun.
        files: where it is logged.
        on_step: called after each step with the number of rollouts sampled so far and the step's metrics.

    Raises:
        ValueError: the folder holds a run of this name with other settings, or a log of another command.
        AlreadyRunning: another process writes these files.
    """
    files.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(files.folder / f".{files.name}.lock", timeout=0):
            _learn(run, files, on_step)
    except Timeout as error:
        said = f"another verl-ext learn runs {files.name} in {files.folder}: wait for its end, or choose another --out"
        raise AlreadyRunning(said) from error


def _learn(run: LearningRun, files: Files, on_step: OnStep) -> None:
    files.check()
    if files.finished():
        return
    state, ended = files.load(), None
    if state is not None:
        run.load_state_dict(state)
    # Measured before the log is opened: a kill meanwhile would leave an empty log, which the next start refuses.
    first = run.validation() if state is None else None
    with files.log.open("w" if state is None else "a", encoding="utf-8") as log:

        def note(step: int, metrics: Mapping[str, float]) -> None:
            log.write(json.dumps({"step": step, "data": metrics}) + "\n")
            log.flush()

        if first is not None:
            note(0, first)
        while not run.done:
            try:
                metrics = run.step()
            except CannotFillBatch as error:
                ended = str(error)
                waves = {"generation/waves_total": float(run.engine.waves)}
                note(run.controller.step, run.controller.ledger.metrics() | waves | run.validation())
                break
            note(run.controller.step, metrics)
            if any(name.startswith("val-core/") for name in metrics):
                files.save(run)
            on_step(run.sampled, metrics)
    files.finish(run, ended)
