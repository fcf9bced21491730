"""Worlds of the lab: a warm-started model, and prompts with the wanted distribution of exact success probabilities."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from verl_ext import checks
from verl_ext.allocation.heuristics import proportional
from verl_ext.files import written_whole
from verl_ext.lab.learn import tasks
from verl_ext.lab.learn.decoder import MOST_RESPONSE, Decoder
from verl_ext.lab.learn.sampler import log_probs, padded, success_rates
from verl_ext.lab.learn.tasks import TASKS, Problem, Task
from verl_ext.trajectory import Trajectory

SEED = 0  # of warm starts and data, which all runs share
HELD_OUT = 512
ROOM = 4  # tokens of a response beyond the longest correct response

CLASSES = {"solved": (0.95, 1.0), "learnable": (0.02, 0.8), "medium": (0.2, 0.8), "hopeless": (0.0, 0.001)}
"""Bounds of a prompt's exact success probability under the warm-started model."""
BATCH, STEPS, PEAK, WARM_UP, EVERY = 128, 3000, 2e-3, 50, 20  # of the warm start
EASY, DECAY = 3, 0.3  # levels with equally many examples, and the further levels' factor from one to the next
SOLVED = 0.5  # the warm start ends when this share of a pool with equally many prompts of all levels is solved
POOL = 32  # prompts of a level
CHUNK, PATIENCE, MOST_CHUNKS = 2048, 4, 100  # draws in a chunk; chunks until each class has a prompt; most chunks


class Mix(NamedTuple):
    """A world's data.

    Attributes:
        prompts: number of training prompts.
        shares: of each class in :data:`CLASSES`; they sum to 1.
    """

    prompts: int
    shares: Mapping[str, float]


TAIL = {"solved": 0.4, "learnable": 0.25, "hopeless": 0.35}
WORLDS = {
    "long_tailed": Mix(4096, TAIL),
    "mostly_solved": Mix(4096, {"solved": 0.8, "learnable": 0.15, "hopeless": 0.05}),
    "mostly_hopeless": Mix(4096, {"solved": 0.05, "learnable": 0.2, "hopeless": 0.75}),
    "all_medium": Mix(4096, {"medium": 1.0}),
    "few_prompts": Mix(256, TAIL),
}


@dataclass(frozen=True)
class World:
    """What a run learns in.

    Attributes:
        name: names the validation metric.
        task: the environment.
        train: training problems, by row.
        held_out: problems that measure the accuracy.
        rates: (rows,) success probabilities of the training problems under the warm-started model.
        limit: most tokens of a response.
        make_model: a fresh copy of the warm-started model.
    """

    name: str
    task: Task
    train: Sequence[Problem]
    held_out: Sequence[Problem]
    rates: np.ndarray
    limit: int
    make_model: Callable[[], Any]


@dataclass(frozen=True)
class WorldSource:
    """A world by name; made at the first use, and kept in a folder.

    Args:
        name: a key of :data:`WORLDS`.
        task: a key of :data:`~verl_ext.lab.learn.tasks.TASKS`.
        prompts: number of training prompts; None: the world's own.
        cache: folder of finished warm starts.

    Raises:
        InvalidValue: no such world or task, or no prompts.
    """

    name: str = "long_tailed"
    task: str = "words"
    prompts: int | None = None
    cache: Path = Path("~/.cache/verl_ext")

    def __post_init__(self) -> None:
        checks.choice("world", self.name, tuple(WORLDS))
        checks.choice("task", self.task, tuple(TASKS))
        if self.prompts is not None:
            checks.integer("prompts", self.prompts, 1)

    @property
    def size(self) -> int:
        """Number of training prompts."""
        return WORLDS[self.name].prompts if self.prompts is None else self.prompts

    def load(self, on_step: Callable[[int, float], None] = lambda *_: None) -> World:
        """The world; ``on_step`` gets the steps of the warm start, and the share of prompts solved.

        Raises:
            ValueError: the warm-started model leaves a class without prompts.
        """
        task, made = TASKS[self.task], _digest()
        model = Decoder()
        weights = self._cached(f"{self.task}-{made}", lambda: warm_start(task, on_step).state_dict())
        model.load_state_dict(weights)
        key = f"{self.task}-{self.name}-{self.size}-{made}"
        data = self._cached(key, lambda: _packed(*draw_problems(model, task, WORLDS[self.name].shares, self.size)))
        train, held_out = ([_unpacked(row) for row in data[split]] for split in ("train", "held_out"))
        longest = max(len(problem.reference) for problem in (*train, *held_out))

        def make_model() -> Decoder:
            fresh = Decoder()
            fresh.load_state_dict(weights)
            return fresh

        name = f"{self.task}_{self.name}"
        limit = min(longest + ROOM, MOST_RESPONSE)
        return World(name, task, train, held_out, np.array(data["rates"]), limit, make_model)

    def _cached(self, key: str, make: Callable[[], Any]) -> Any:
        file = self.cache.expanduser() / f"learn-{key}.pt"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = make()
            with written_whole(file) as unfinished:
                torch.save(made, unfinished)
        return torch.load(file, weights_only=True)


def warm_start(task: Task, on_step: Callable[[int, float], None] = lambda *_: None) -> Decoder:
    """A decoder trained on correct responses until it solves the share :data:`SOLVED` of a pool of all levels.

    Easy levels get equally many examples and further levels fewer and fewer, so the model is sure of the easy levels,
    ignorant of the hardest, and uncertain in between. The global random state is neither read nor changed.

    Raises:
        ValueError: the model does not get there.
    """
    rng = np.random.default_rng([SEED, 0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Decoder()
    levels = list(task.levels)
    weights = np.array([DECAY ** max(0, place - EASY + 1) for place in range(len(levels))])
    pool = [task.draw(level, rng) for level in levels for _ in range(POOL)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        if step % EVERY == 0:
            solved = float((success_rates(model, task, pool, 1.0) >= CLASSES["solved"][0]).mean())
            on_step(step, solved)
            if solved >= SOLVED:
                return model
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min((step + 1) / WARM_UP, 1.0)
        drawn = rng.choice(levels, size=BATCH, p=weights / weights.sum())
        imitate(model, optimizer, task, [task.draw(int(level), rng) for level in drawn])
    raise ValueError(f"task={task.name}: the warm start solves {solved:.0%} of its pool after {STEPS} steps.")


def imitate(model: Decoder, optimizer: torch.optim.Optimizer, task: Task, problems: Sequence[Problem]) -> None:
    """One step toward the problems' correct responses."""
    tokens = [problem.reference.tokens for problem in problems]
    scores = log_probs(model, [problem.prompt for problem in problems], tokens, 1.0, task.pad)
    by_policy = padded([problem.reference.generated.tolist() for problem in problems], 0)
    optimizer.zero_grad()
    (-(scores * by_policy).sum() / by_policy.sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def draw_problems(
    model: Decoder, task: Task, shares: Mapping[str, float], prompts: int
) -> tuple[list[Problem], list[Problem], list[float]]:
    """Training problems, held-out problems, and the training problems' success probabilities.

    Problems are drawn from all levels at random and kept while their class lacks problems; no two are equal.

    Raises:
        ValueError: a class is not filled.
    """
    rng = np.random.default_rng([SEED, 1])
    wanted = dict(zip(shares, proportional(list(shares.values()), prompts, lower=0, upper=prompts), strict=True))
    held = dict(zip(shares, proportional(list(shares.values()), HELD_OUT, lower=0, upper=HELD_OUT), strict=True))
    found: dict[str, list[tuple[Problem, float]]] = {name: [] for name in shares}
    seen: set[tuple[tuple[int, ...], int]] = set()
    levels = list(task.levels)
    for chunk in itertools.count():
        lacking = [name for name in shares if len(found[name]) < wanted[name] + held[name]]
        if not lacking:
            break
        if chunk == MOST_CHUNKS or (chunk == PATIENCE and not all(found[name] for name in lacking)):
            raise ValueError(
                f"task={task.name}: too few prompts are {' or '.join(lacking)} for the warm-started model."
            )
        drawn = [task.draw(int(level), rng) for level in rng.choice(levels, size=CHUNK)]
        rates = success_rates(model, task, drawn, 1.0)
        useful = set()
        for problem, rate in zip(drawn, rates.tolist(), strict=True):
            for name in lacking:
                low, high = CLASSES[name]
                if low <= rate <= high and (problem.prompt, problem.shift) not in seen:
                    seen.add((problem.prompt, problem.shift))
                    found[name].append((problem, rate))
                    useful.add(problem.level)
        levels = [level for level in levels if level in useful] or levels
    held_out = [problem for name in shares for problem, _ in found[name][: held[name]]]
    train = [pair for name in shares for pair in found[name][held[name] : held[name] + wanted[name]]]
    return [problem for problem, _ in train], held_out, [rate for _, rate in train]


def _digest() -> str:
    """Changes with the code that makes worlds, and with torch's version, so that no cached file is of other code."""
    code = "".join(inspect.getsource(module) for module in (tasks, inspect.getmodule(Decoder)))
    code += inspect.getsource(inspect.getmodule(Mix))
    return hashlib.sha256(f"{torch.__version__}{code}".encode()).hexdigest()[:12]


def _packed(train: Sequence[Problem], held_out: Sequence[Problem], rates: list[float]) -> dict[str, Any]:
    def pack(problem: Problem) -> list[Any]:
        reference = problem.reference
        return [
            list(problem.prompt),
            reference.tokens.tolist(),
            reference.generated.tolist(),
            problem.level,
            problem.shift,
        ]

    return {"train": list(map(pack, train)), "held_out": list(map(pack, held_out)), "rates": rates}


def _unpacked(row: list[Any]) -> Problem:
    prompt, tokens, by_policy, *further = row
    return Problem(tuple(prompt), Trajectory(np.array(tokens), np.array(by_policy)), *further)
