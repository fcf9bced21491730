"""Runs a policy without a model, calling it in the order of verl's trainer, and names the promises that it breaks."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl_ext.controller import RolloutController
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import MODES, Group, Prompt, Rollout, RolloutPolicy
from verl_ext.record import batch_state, request_state
from verl_ext.testing.engine import KeyedEngine, epochs

SYNC, COLOCATE, SEPARATE = MODES
AT_ONCE = 3  # waves that finish between two looks of the controller
ENDLESS = 20_000  # rollouts of a step; far more than any policy of a small batch needs

# The promises of a policy, as in docs/protocol.md.
STARTS = "a `start_run` of your own calls `super().start_run`, which sets `total_steps`"
ENDS = (
    "every step ends with a batch, whatever the order in which waves finish and whichever rollouts fail, and without a "
    "known last step"
)
BUDGET = "no step samples more rollouts, or trains more prompts, than `step_cost()` says"
USUAL = "some step samples `step_cost().usual` rollouts or more, and `usual` is at least `prompts * n`"
BOOKS = "every rollout is counted once: a policy uses each group once, and changes only its `trained` and `weight`"
KEPT = "no group stays in the buffer for ever"
ASKED = "a call of `take_batch()` that returns `[]` changes nothing"
BETWEEN = "`take_batch()` returns `[]` before the first step, and between a step's batch and the next `start_step`"
METRICS = "`metrics()` returns finite floats by name"
REPEATABLE = "the same results in the same order lead to the same requests"
STATE = "the state is JSON with a `version`, and `load_state_dict` refuses another version with ValueError"
RESUME = "a fresh policy with the saved state makes the requests that the saved policy would have made"
SHORT = "fewer prompts than asked for make a smaller batch"
PROMISES = (STARTS, ENDS, BUDGET, USUAL, BOOKS, KEPT, ASKED, BETWEEN, METRICS, REPEATABLE, STATE, RESUME, SHORT)


class BrokenPromise(AssertionError):
    """A policy breaks a promise of docs/protocol.md; the message names the policy, the promise and what happened."""

    def __init__(self, policy: RolloutPolicy, promise: str, found: str):
        super().__init__(f'{type(policy).__name__} breaks the promise "{promise}" (docs/protocol.md): {found}')
        self.promise = promise


@dataclass(frozen=True)
class Conditions:
    """What a policy meets in a run.

    Attributes:
        prompts: rows of the data.
        repeated: the epochs have the first ``repeated`` rows alone; None: all rows.
        steps: training steps.
        known_end: whether ``start_run`` gets the number of steps; ``verl-ext learn`` and ``verl-ext waste`` know none.
        rates: (lowest, highest) success rate of a prompt.
        failure_rate: probability that a rollout fails.
        lost_waves: probability that all rollouts of a wave fail.
        order: seed of a random order in which waves finish; None: older groups finish first.
        mode: trainer mode, whose order of calls the run has.
    """

    prompts: int = 64
    repeated: int | None = None
    steps: int = 8
    known_end: bool = True
    rates: tuple[float, float] = (0.2, 0.8)
    failure_rate: float = 0.0
    lost_waves: float = 0.0
    order: int | None = None
    mode: str = SYNC


class Step(NamedTuple):
    """One step as seen from outside of the policy.

    Attributes:
        number: from 1.
        requests: each [group id, rollouts, prefix], or [group id] of a cancelled group, in the order since the step
            before.
        batch: the groups trained on.
        metrics: of the controller.
    """

    number: int
    requests: list[list]
    batch: list[Group]
    metrics: dict[str, float]


class Saved(NamedTuple):
    """A checkpoint.

    Attributes:
        state: of the controller.
        versions: of the weights behind the rollouts in generation, by group. Here a resumed run generates these
            rollouts from the same weights, so that it can be compared with a run that was never stopped.
    """

    state: dict
    versions: dict[str, int]


class Run:
    """A run of ``make()`` under the conditions.

    Args:
        make: a fresh policy.
        conditions: the data, the engine, and the order of calls.
        saved: the steps after which a checkpoint is written.
        checkpoint: to resume from; None: a new run.

    Attributes:
        rows: the data.
        policy: the policy.
        controller: its controller.
        checkpoints: by step: the checkpoints of the steps in ``saved`` that are done.
    """

    def __init__(
        self,
        make: Callable[[], RolloutPolicy],
        conditions: Conditions,
        saved: Collection[int] = (),
        checkpoint: Saved | None = None,
    ):
        self.conditions, self.saved = conditions, saved
        self.checkpoints: dict[int, Saved] = {}
        self.rows = rows = [
            Prompt(f"p{row}", row, {"data_source": f"source{row % 2}"}) for row in range(conditions.prompts)
        ]
        rates = np.random.default_rng(1).uniform(*conditions.rates, len(rows)).tolist()
        self.engine = _Noted(dict(zip((row.id for row in rows), rates, strict=True)), conditions)
        self.policy = make()
        self.engine.reads_trajectories = self.policy.reads_trajectories
        total_steps = conditions.steps if conditions.known_end else None
        self.policy.start_run(total_steps, [f"What is {row.row} + 1?" for row in rows])
        if self.policy.total_steps != total_steps:
            found = f"total_steps is {self.policy.total_steps} after start_run({total_steps}, ...)"
            raise BrokenPromise(self.policy, STARTS, found)
        seen = 0 if checkpoint is None else checkpoint.state["prompts"]["seen_total"]  # verl restores its data loader
        drawn = rows[: conditions.repeated]
        data = itertools.islice(epochs(drawn), seen, None)
        self.controller = _Watched(self.policy, data, len(drawn), self.engine)
        self.first = 1
        if checkpoint is not None:
            self.controller.load_state_dict(checkpoint.state)
            self.first = checkpoint.state["step"] + 1
            self.engine.resume(self.controller, checkpoint)

    def steps(self) -> Iterator[Step]:
        """Train; yields each step.

        Raises:
            BrokenPromise: the policy breaks a promise that every step can show.
        """
        last = self.conditions.steps
        self._check_taken(self.first - 1)
        for number in range(self.first, last + 1):
            if self.controller.step != number:
                self.controller.begin_step(number)
            drain = self.conditions.mode == SYNC or number == last
            batch = self.controller.fill_batch(lambda: self.engine.finish(AT_ONCE), drain)
            self._check(number, batch)
            step = Step(number, list(self.engine.requests), batch, self.controller.metrics())
            self.engine.requests.clear()
            if number in self.saved:
                versions = {group.id: version for group, _, version in self.engine.waiting}
                self.checkpoints[number] = Saved(_as_json(self.policy, self.controller.state_dict()), versions)
            elif self.conditions.mode == SEPARATE and number < last:
                self.controller.begin_step(number + 1)  # while the actor is trained
            self.engine.version = number
            yield step

    def _check_taken(self, number: int) -> None:
        where = f"after the batch of step {number}" if number else "before the first step"
        with promised(self.policy, BETWEEN, Exception, where=f"{where}, "):
            taken = self.policy.take_batch()
        if taken:
            raise BrokenPromise(self.policy, BETWEEN, f"{where} it returned a batch")

    def _check(self, number: int, batch: list[Group]) -> None:
        self._check_taken(number)
        own = self.policy.metrics() or {}  # the controller refuses None
        bad = [name for name, value in own.items() if not (isinstance(value, float) and math.isfinite(value))]
        if bad:
            raise BrokenPromise(self.policy, METRICS, f"in step {number}, {bad[0]} is {own[bad[0]]!r}")
        for group in [*batch, *self.controller.live.values()]:
            if _facts(group.rollouts) != _facts(self.engine.handed_in.get(group.id, [])):
                raise BrokenPromise(self.policy, BOOKS, f"in step {number} the rollouts of group {group.id} changed")
        for group in batch:
            del self.engine.handed_in[group.id]


class _Noted(KeyedEngine):
    """Notes requests, and the rollouts that were handed in, by group."""

    def __init__(self, success_rates: Mapping[str, float], conditions: Conditions):
        super().__init__(success_rates, conditions.failure_rate, conditions.lost_waves, conditions.order)
        self.requests: list[list] = []
        self.handed_in: dict[str, list[Rollout]] = {}

    def resume(self, controller: RolloutController, checkpoint: Saved) -> None:
        """Generate the unfinished waves anew, from the weights that they began with."""
        self.handed_in = {group.id: list(group.rollouts) for group in controller.live.values()}
        controller.resubmit_unfinished()
        self.requests.clear()
        self.waiting = [(group, count, checkpoint.versions[group.id]) for group, count, _ in self.waiting]
        self.version = checkpoint.state["step"]

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        super().submit(requests)
        self.requests += [request_state(group, count) for group, count in requests]

    def release(self, groups: list[Group]) -> None:
        for group in groups:
            self.handed_in.pop(group.id, None)

    def cancel(self, groups: list[Group]) -> None:
        super().cancel(groups)
        self.requests += [[group.id] for group in groups]

    def wave(self, group: Group, size: int, version: int) -> list[Rollout]:
        new = super().wave(group, size, version)
        self.handed_in.setdefault(group.id, list(group.rollouts)).extend(new)
        return new


class _Watched(RolloutController):
    """The controller, whose refusals are broken promises of the policy."""

    def begin_step(self, step: int) -> None:
        with promised(self.policy, BOOKS, RuntimeError):
            super().begin_step(step)

    def finish_waves(self, waves: list[tuple[str, list[Rollout]]]) -> None:
        with promised(self.policy, BOOKS, RuntimeError):
            super().finish_waves(waves)
        if self.ledger.step["rollouts/sampled"] > ENDLESS:
            raise BrokenPromise(self.policy, ENDS, f"step {self.step} sampled more than {ENDLESS:,} rollouts")

    def take_batch(self) -> list[Group]:
        with promised(self.policy, BOOKS, RuntimeError):
            batch = super().take_batch()
            again = not batch and super().take_batch()  # under verl, the replay buffer asks often
        if again:
            found = f"in step {self.step} take_batch returned [], and a batch when it was called again at once"
            raise BrokenPromise(self.policy, ASKED, found)
        return batch

    def metrics(self) -> dict[str, float]:
        with promised(self.policy, BOOKS, RuntimeError):
            self.ledger.check(self.live.values())
        with promised(self.policy, METRICS, RuntimeError):
            return super().metrics()


@contextmanager
def promised(policy: RolloutPolicy, promise: str, *errors: type[Exception], where: str = "") -> Iterator[None]:
    """Within the block, errors of these kinds mean that the policy has broken the promise.

    Args:
        policy: the policy.
        promise: one of :data:`PROMISES`.
        errors: kinds of errors.
        where: the first words of what happened.
    """
    try:
        yield
    except BrokenPromise:
        raise
    except errors as error:
        kind = "" if isinstance(error, RuntimeError | CannotFillBatch) else f"{type(error).__name__}: "
        raise BrokenPromise(policy, promise, f"{where}{kind}{error}") from error


def _as_json(policy: RolloutPolicy, state: Mapping) -> dict:
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BrokenPromise(policy, STATE, str(error)) from error


def outcome(step: Step) -> list:
    """The groups of the batch with their rollouts."""
    return [*zip(batch_state(step.batch), (_facts(group.rollouts) for group in step.batch), strict=True)]


def _facts(rollouts: list[Rollout]) -> list:
    """The rollouts in the form of a checkpoint, in which failed rollouts can be compared, too."""
    return Group("", Prompt("", 0), rollouts).state_dict()["rollouts"]
