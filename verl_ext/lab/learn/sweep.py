"""Runs of several methods, settings and seeds, side by side in processes."""

from __future__ import annotations

import inspect
import itertools
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, lru_cache
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.data.schema import sha256
from verl_ext.lab.comparison import LabRun
from verl_ext.lab.learn.run import MADE, Files, LearningRun, Length, learn
from verl_ext.lab.learn.update import KEYS, Training
from verl_ext.lab.learn.worlds import World, WorldSource, _digest
from verl_ext.lab.method import Method, check_names, check_prompts
from verl_ext.lab.simulate.population import logit
from verl_ext.lab.simulate.run import stand_ins, start_policy
from verl_ext.resolvers import REFERENCE, register_resolvers

LR = "actor_rollout_ref.actor.optim.lr"
N = "actor_rollout_ref.rollout.n"
PROMPTS = 8  # of a training step
LOOK = 0.2  # seconds between two looks at the processes
OnProgress = Callable[[str, int], None]


class Source(Protocol):
    """Where a world comes from; small enough to be sent to a process."""

    def load(self) -> World:
        """The world; every call gives an equal one."""


@dataclass(frozen=True)
class Job:
    """One run: a method with all settings, in a world, with a seed."""

    method: Method
    source: Source
    length: Length
    seed: int
    out: Path

    @cached_property
    def files(self) -> Files:
        """The run's files, with the settings that tell it from another run of the same name.

        ``code`` is a hash of the file with the policy's class. A change in a file imported there goes unnoticed.
        Another version of torch makes another model and other prompts in a world of the same name.
        """
        config = OmegaConf.to_container(self.method.config, resolve=False)
        code = sha256(Path(inspect.getfile(self.method.policy_class)))
        settings = {
            "method": config,
            "world": repr(self.source),
            MADE: _digest() if isinstance(self.source, WorldSource) else None,
            "length": repr(self.length),
            "seed": self.seed,
            "code": code,
        }
        return Files(self.out, f"{self.method.name}_{self.seed}", settings)

    def prepare(self) -> LearningRun:
        """The run, before its first step."""
        return LearningRun(self.method, _world(self.source), self.length, self.seed)


def variants(text: str, lrs: Sequence[float], ns: Sequence[int], batch_sizes: Sequence[int]) -> list[Method]:
    """The method in every combination of learning rate, rollouts per prompt and prompts per step.

    With an empty list, the method keeps its own value; without a number of prompts of its own, it has
    :data:`PROMPTS` per step. A value is part of the name if its list has several values. ``settings_for`` of the policy
    says how it divides ``n`` rollouts.

    Raises:
        ValueError: no such method, it sets a swept value itself, or the policy or the learner refuses its settings.
    """
    found = []
    for lr, n, size in itertools.product(lrs or [None], ns or [None], batch_sizes or [None]):
        method = Method.parse(text, size or PROMPTS, KEYS)
        parts = []
        if lr is not None:
            method = _with(method, text, {LR: lr})
            parts += [f"lr={lr:g}"] * (len(lrs) > 1)
        if n is not None:
            method = _with(method, text, _for_n(method, text, n))
            parts += [f"n={n}"] * (len(ns) > 1)
        if size is not None and method.train_batch_size != size:
            own = next((word.split("=")[0] for word in text.split() if "train_batch_size=" in word), "train_batch_size")
            raise ValueError(f"method={text!r} sets {own}, and --batch-size too; leave one out.")
        Training.of(method.config)
        with stand_ins(method, np.zeros(2), 0, 0.5) as features:  # no run needs the text model
            method.policy(0, features)
        parts += [f"batch={size}"] * (len(batch_sizes) > 1)
        found.append(method.renamed("-".join([method.name, *parts])))
    return found


def _for_n(method: Method, text: str, n: int) -> dict[str, Any]:
    """Keys with which the method has ``n`` rollouts per trained prompt on average."""
    settings = method.policy_class.settings_for(method.train_batch_size, n, 0)
    if settings is None and N not in REFERENCE.findall(OmegaConf.to_yaml(method.config.rollout_policy)):
        name = f"{method.policy_class.__name__}.settings_for"
        valid = f"{name} returns None, and its rollout_policy does not refer to {N}"
        raise ValueError(f"method={text!r} cannot be run with --n: {valid}.")
    return {N: n} | {f"rollout_policy.{key}": value for key, value in (settings or {}).items() if key != "seed"}


def _with(method: Method, text: str, settings: dict[str, Any]) -> Method:
    """The method with these keys, none of which its text sets."""
    own = {word.split("=")[0] for word in text.split()}
    for key in settings:
        if {key, key.removeprefix("rollout_policy.")} & own:
            raise ValueError(f"method={text!r} sets {key}, and so does an option of the sweep; leave one out.")
    return method.with_keys(settings)


@lru_cache(maxsize=1)
def _world(source: Source) -> World:
    return source.load()


def check(jobs: Sequence[Job]) -> None:
    """Refuse, before anything runs, jobs that cannot run.

    Raises:
        ValueError: two jobs have one name, a run of other settings has the name, a world has too few prompts, or a
            policy refuses the world.
    """
    for seed in {job.seed for job in jobs}:
        check_names([job.method for job in jobs if job.seed == seed])
    for job in jobs:
        job.files.check()
    for job in {job.method.name: job for job in jobs}.values():
        world = _world(job.source)
        check_prompts(job.method, len(world.train))
        start_policy(job.method, logit(world.rates), job.seed, job.length.embedding_correlation, None)


def run_all(jobs: Sequence[Job], processes: int, on_progress: OnProgress) -> list[LabRun]:
    """Run the jobs that have not finished, ``processes`` at a time; returns all runs in the order of the jobs.

    Args:
        jobs: checked.
        processes: 1: in this process.
        on_progress: called with a run's name and the number of rollouts that it has sampled.
    """
    left = [job for job in jobs if not job.files.finished()]
    if processes == 1 or len(left) < 2:
        _start_process()
        for job in left:
            _run(job, on_progress)
    else:
        _run_in_processes(left, processes, on_progress)
    return [job.files.read() for job in jobs]


def _run_in_processes(jobs: Sequence[Job], processes: int, on_progress: OnProgress) -> None:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    queue = context.SimpleQueue()
    with ProcessPoolExecutor(processes, context, _start_in_pool, (queue,)) as pool:
        left: set[Future[None]] = {pool.submit(_run_in_pool, job) for job in jobs}
        try:
            while left:
                done, left = wait(left, timeout=LOOK, return_when=FIRST_COMPLETED)
                while not queue.empty():
                    on_progress(*queue.get())
                for future in done:
                    future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_messages: SimpleQueue  # of a process of the pool, to the process that shows the progress of all runs


def _start_in_pool(messages: SimpleQueue) -> None:
    global _messages
    _messages = messages
    _start_process()


def _run_in_pool(job: Job) -> None:
    _run(job, lambda *message: _messages.put(message))


def _start_process() -> None:
    torch.set_num_threads(1)
    register_resolvers()  # configurations arrive from another process, with interpolations
    logging.getLogger("recipe").setLevel(logging.ERROR)  # recipes warn at each short step; groups/in_batch logs it too


def _run(job: Job, on_progress: OnProgress) -> None:
    learn(job.prepare(), job.files, lambda sampled, _: on_progress(job.files.name, sampled))
