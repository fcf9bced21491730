"""Executes what a policy asks for, on any engine, and keeps the books.

Method-blind and engine-blind: under verl the engine is the agent loop and TransferQueue, elsewhere anything with the
two methods of :class:`Engine`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.ledger import Ledger, batch_metrics
from verl_ext.policy import (
    Action,
    Discard,
    Evict,
    Group,
    Prompt,
    Request,
    Rollout,
    RolloutPolicy,
    check_state_version,
)
from verl_ext.prompts import PromptStream
from verl_ext.trajectory import Trajectory

logger = logging.getLogger(__name__)
Decided = TypeVar("Decided")


class Engine(Protocol):
    """What generates."""

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        """Start generating this many more rollouts for each group, in this order of priority."""

    def release(self, groups: list[Group]) -> None:
        """Forget these groups; nothing of them will be trained on."""


class RolloutController:
    """One run's policy, live groups, prompt stream and ledger.

    A step is: :meth:`begin_step`; then :meth:`finish_waves` as often as waves finish; :meth:`take_batch` in between
    until it returns groups; :meth:`fill_batch` is those two. ``outstanding`` counts rollouts that are being generated.
    """

    VERSION = 3

    def __init__(self, policy: RolloutPolicy, rows: Iterable[Prompt], rows_per_epoch: int, engine: Engine):
        self.policy = policy
        self.engine = engine
        self.ledger = Ledger()
        self.live: dict[str, Group] = {}
        self.prompts = PromptStream(iter(rows), rows_per_epoch, self._is_live)
        self.step = 0
        self.decision_seconds = 0.0
        self._live_prompts: set[str] = set()
        self._groups_created = 0
        self._outstanding = 0  # kept: the sum over thousands of live groups would be taken at every look
        self._batch: list[Group] = []

    @property
    def outstanding(self) -> int:
        """Rollouts requested and not finished."""
        return self._outstanding

    @property
    def policy_name(self) -> str:
        return type(self.policy).__name__

    def begin_step(self, step: int) -> None:
        """Let the policy open training step ``step`` and submit what it asks for."""
        self.step = step
        self.decision_seconds = 0.0
        self._batch = []
        self.ledger.begin_step()
        self._execute(self._decide(self.policy.start_step, step, self.prompts.draw))

    def finish_waves(self, waves: list[tuple[str, list[Rollout]]]) -> None:
        """Hand in waves that have finished: (group id, its new rollouts), failed ones included."""
        groups = []
        for group_id, rollouts in waves:
            group = self.live[group_id]
            if len(rollouts) != group.outstanding:
                raise ValueError(
                    f"group {group_id} awaits {group.outstanding} rollouts, {len(rollouts)} were handed in"
                )
            group.rollouts.extend(rollouts)
            self._outstanding -= group.outstanding
            group.outstanding = 0
            self.ledger.sampled(rollouts)
            groups.append(group)
        sampled, failed = self.ledger.step["rollouts/sampled"], self.ledger.step["rollouts/failed"]
        if groups and sampled == failed and not self.outstanding:
            raise EveryRolloutFailed(
                f"step {self.step}: all {sampled} rollouts failed; the log of the agent-loop workers says why "
                "(often the reward function or the rollout engine)"
            )
        actions: list[Action] = []
        for group in groups:
            actions.extend(self._decide(self.policy.on_group, group))
        self._execute(actions)

    def take_batch(self) -> list[Group]:
        """The groups to train on now, or []. They are counted as trained and leave the live set."""
        groups = self._decide(self.policy.take_batch)
        prompts = {group.prompt.id for group in groups}
        if len(prompts) != len(groups):
            raise RuntimeError(f"{self.policy_name}.take_batch returned {len(groups)} groups of {len(prompts)} prompts")
        for group in groups:
            if not group.usable or group.outstanding:
                raise RuntimeError(f"{self.policy_name}.take_batch returned group {group.id}, which is not complete")
            self._remove(group)
            self.ledger.trained(group)
        self._batch = list(groups)
        return self._batch

    def check_progress(self) -> None:
        """Raise CannotFillBatch if nothing is being generated and the policy has no batch: it would wait for ever."""
        if self.outstanding == 0:
            raise CannotFillBatch(
                f"step {self.step}: {self.policy_name} has no batch to train on and asks for no more rollouts "
                f"({len(self.live)} groups are alive, {len(self.prompts.evicted)} prompts evicted of "
                f"{self.prompts.rows_per_epoch} rows); loosen its thresholds or give it more data"
            )

    def fill_batch(self, finish: Callable[[], list[tuple[str, list[Rollout]]]], drain: bool = True) -> list[Group]:
        """The step's batch, where nobody has to wait for the engine.

        Args:
            finish: gives the waves that finish next; asked only while some are outstanding.
            drain: also let all that is outstanding finish.
        """
        batch: list[Group] = []
        while True:
            batch = batch or self.take_batch()
            if batch and not (drain and self.outstanding):
                return batch
            self.check_progress()
            self.finish_waves(finish())

    def metrics(self) -> dict[str, float]:
        """Everything that is logged for the step whose batch was just taken. Checks the books."""
        self.ledger.check(self.live.values())
        return {
            **self.ledger.metrics(),
            **self.prompts.metrics(),
            **batch_metrics(self._batch, self.step),
            "groups/in_batch": float(len(self._batch)),
            "groups/live": float(len(self.live)),
            "allocation/seconds": self.decision_seconds,
            **self.policy.metrics(),
        }

    def state_dict(self) -> dict:
        """JSON-able state of the whole run, the position in the data excepted."""
        return {
            "version": self.VERSION,
            "step": self.step,
            "groups_created": self._groups_created,
            "live": [group.state_dict() for group in self.live.values()],
            "policy": {"class": self.policy_name, "state": self.policy.state_dict()},
            "ledger": self.ledger.state_dict(),
            "prompts": self.prompts.state_dict(),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Inverse of :meth:`state_dict`. Raises ValueError for another version or another policy's state."""
        check_state_version(state, self.VERSION, "RolloutController")
        check_written_by(state, self.policy_name)
        self.step = state["step"]
        self._groups_created = state["groups_created"]
        self.live = {group["id"]: Group.from_state_dict(group) for group in state["live"]}
        self._live_prompts = {group.prompt.id for group in self.live.values()}
        self._outstanding = sum(group.outstanding for group in self.live.values())
        self.policy.load_state_dict(state["policy"]["state"])
        self.ledger.load_state_dict(state["ledger"])
        self.prompts.load_state_dict(state["prompts"])
        self.ledger.check(self.live.values())

    def resubmit_unfinished(self) -> int:
        """After a restart: generate anew every wave that had not finished. Returns how many rollouts that is."""
        wave = [(group, group.outstanding) for group in self.live.values() if group.outstanding]
        if wave:
            self.engine.submit(wave)
        return sum(count for _, count in wave)

    def _execute(self, actions: list[Action]) -> None:
        """All requests of one call go to the engine together; a one-prompt submission would load one worker only."""
        wave: list[tuple[Group, int]] = []
        released: list[Group] = []
        for action in actions:
            match action:
                case Request(target=target, rollouts=count, prefix=prefix):
                    group = self._new_group(target, prefix) if isinstance(target, Prompt) else self._known(target)
                    group.outstanding += count
                    self._outstanding += count
                    wave.append((group, count))
                case Discard(group=group, reason=reason):
                    group = self._known(group)
                    self._remove(group)
                    self.ledger.discarded(group, reason)
                    released.append(group)
                case Evict(prompt=prompt):
                    self.prompts.evict(prompt)
        if released:
            self.engine.release(released)
        if wave:
            self.engine.submit(wave)

    def _new_group(self, prompt: Prompt, prefix: Trajectory | None) -> Group:
        if self._is_live(prompt.id):
            raise RuntimeError(f"{self.policy_name} requested a second live group of prompt {prompt.id}")
        self._groups_created += 1
        group = Group(f"{prompt.id}-{self._groups_created}", prompt, prefix=prefix)  # no "_": verl splits keys at it
        self.live[group.id] = group
        self._live_prompts.add(prompt.id)
        return group

    def _known(self, group: Group) -> Group:
        """The run's own object: a policy restored from a checkpoint may hold an equal copy."""
        if group.id not in self.live:
            raise RuntimeError(f"{self.policy_name} acts on group {group.id}, which is not alive")
        if self.live[group.id].outstanding:
            raise RuntimeError(f"{self.policy_name} acts on group {group.id}, which is still being generated")
        return self.live[group.id]

    def _remove(self, group: Group) -> None:
        del self.live[group.id]
        self._live_prompts.discard(group.prompt.id)

    def _is_live(self, prompt_id: str) -> bool:
        return prompt_id in self._live_prompts

    def _decide(self, function: Callable[..., list[Decided]], *arguments: object) -> list[Decided]:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.decision_seconds += time.perf_counter() - start


def check_written_by(state: Mapping, policy_name: str) -> None:
    """Raise ValueError unless the state of a run is one of this policy."""
    written_by = state["policy"]["class"]
    if written_by != policy_name:
        raise ValueError(
            f"the checkpoint was written by {written_by}, this run uses {policy_name}; "
            f"resume with the recipe of {written_by}, or start anew in another trainer.default_local_dir"
        )
