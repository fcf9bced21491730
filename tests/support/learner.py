"""A small world of the lab's learner, made in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from verl_ext.lab.learn.decoder import Decoder
from verl_ext.lab.learn.run import Files, LearningRun, Length
from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.learn.tasks import TASKS
from verl_ext.lab.learn.update import KEYS
from verl_ext.lab.learn.worlds import World, imitate
from verl_ext.lab.method import Method

LEVELS = {"words": [2, 3, 4], "sums": [1, 2], "tool": [2, 3]}
STEPS = {"words": 25, "sums": 80, "tool": 30}


@lru_cache
def trained(task: str) -> dict:
    """Weights of a decoder that is right now and then."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rng = np.random.default_rng(1)
    for _ in range(STEPS[task]):
        levels = rng.choice(LEVELS[task], size=64).tolist()
        imitate(model, optimizer, TASKS[task], [TASKS[task].draw(level, rng) for level in levels])
    return model.state_dict()


def trained_model(task: str) -> Decoder:
    """A fresh copy of the decoder."""
    model = Decoder()
    model.load_state_dict(trained(task))
    return model


def draw(task: str, count: int, seed: int = 2) -> list:
    """Problems of the task's levels."""
    rng = np.random.default_rng(seed)
    return [TASKS[task].draw(level, rng) for level in rng.choice(LEVELS[task], size=count).tolist()]


@dataclass(frozen=True)
class SmallSource:
    """A world of 48 prompts."""

    task: str = "words"

    def load(self) -> World:
        problems = draw(self.task, 48)
        rates = success_rates(trained_model(self.task), TASKS[self.task], problems, 1.0)
        limit = max(len(problem.reference) for problem in problems) + 4
        return World(
            self.task,
            TASKS[self.task],
            problems,
            draw(self.task, 64, 3),
            rates,
            limit,
            lambda: trained_model(self.task),
        )


def prepare(text: str, task: str = "words", length: Length | None = None, seed: int = 0, batch: int = 8) -> LearningRun:
    """A run in the small world."""
    length = length or Length(rollouts=600, test_every=100)
    return LearningRun(Method.parse(text, batch, KEYS), SmallSource(task).load(), length, seed)


def files(folder: Path, name: str = "run_0") -> Files:
    """The files of a run."""
    return Files(folder, name, {"name": name})
