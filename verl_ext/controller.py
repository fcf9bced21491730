"""Executes the requests of a policy on any engine, and counts every rollout.

The controller knows neither methods nor engines. Under verl the engine is the agent loop with TransferQueue; elsewhere
any object with the methods of :class:`Engine` will do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import numpy as np

from verl_ext import checks
from verl_ext.errors import CannotFillBatch, EveryRolloutFailed
from verl_ext.ledger import Ledger, batch_metrics
from verl_ext.policy import (
    DRIVER_SECTIONS,
    VERL_SECTIONS,
    Action,
    Cancel,
    Discard,
    Evict,
    Group,
    Prompt,
    PutBack,
    Request,
    Rollout,
    RolloutPolicy,
    check_attributes,
    check_state_version,
)
from verl_ext.prompts import PromptStream
from verl_ext.trajectory import Trajectory

logger = logging.getLogger(__name__)
Decided = TypeVar("Decided")
WHY_ROLLOUTS_FAIL = "the log of the agent-loop workers says why (often the reward function or the rollout engine)"


class Engine(Protocol):
    """Generates rollouts."""

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        """Start generating this many more rollouts for each group, in this order of priority."""

    def release(self, groups: list[Group]) -> None:
        """Drop these groups; none of their rollouts will be trained on."""

    def cancel(self, groups: list[Group]) -> None:
        """End the outstanding rollouts of these groups. An engine that cannot interrupt a rollout may finish it first.

        Their waves are handed in as always, with the finished rollouts, and with ``cancelled`` rollouts in place of the
        others. After a restart the engine may not know a wave. Then it counts all of the wave's unfinished rollouts as
        cancelled.
        """


class RolloutController:
    """One run's policy, live groups, prompt stream and ledger.

    A training step calls :meth:`begin_step` once, and :meth:`finish_waves` whenever waves finish. After each of these
    calls it calls :meth:`take_batch`, until :meth:`take_batch` returns groups. :meth:`fill_batch` is this loop, for
    engines with a function that waits for the next waves.

    Raises:
        InvalidValue: the policy has an attribute that :func:`~verl_ext.policy.check_attributes` refuses.
    """

    VERSION = 3

    def __init__(self, policy: RolloutPolicy, rows: Iterable[Prompt], rows_per_epoch: int, engine: Engine):
        check_attributes(policy)
        self.policy = policy
        self.engine = engine
        self.ledger = Ledger()
        self.live: dict[str, Group] = {}
        self.cancelled: set[str] = set()  # ids of groups whose rollouts are being cancelled
        self.prompts = PromptStream(iter(rows), rows_per_epoch, self._is_live)
        self.step = 0
        self.decision_seconds = 0.0
        self._live_prompts: dict[str, Group] = {}  # by prompt id
        self._groups_created = 0
        self._outstanding = 0  # a running sum, because the driver reads it at every poll
        self.batch: list[Group] = []
        self._requested: list[tuple[Group, int]] = []  # not submitted to the engine yet
        self._released: list[Group] = []  # discarded, and not released by the engine yet
        self._restored = 0  # rollouts in generation that a checkpoint had, until they are submitted again

    @property
    def outstanding(self) -> int:
        """Rollouts requested and not finished."""
        return self._outstanding

    @property
    def policy_name(self) -> str:
        return type(self.policy).__name__

    def begin_step(self, step: int) -> None:
        """Let the policy open training step ``step``, and submit its requests."""
        self.step = step
        self.decision_seconds = 0.0
        self.batch = []
        self.ledger.begin_step()
        self._execute(self._decide(self.policy.start_step, step, self.prompts.draw))

    def finish_waves(self, waves: list[tuple[str, list[Rollout]]]) -> None:
        """Hand in finished waves: pairs of a group id and all new rollouts of the group, failed rollouts included."""
        groups = []
        for group_id, rollouts in waves:
            group = self.live[group_id]
            if len(rollouts) != group.outstanding:
                raise ValueError(
                    f"group {group_id} awaits {group.outstanding} rollouts, {len(rollouts)} were handed in"
                )
            for each in rollouts:
                if not each.failed and (each.cancelled or not math.isfinite(each.reward)):
                    raise ValueError(
                        f"group {group_id}: a rollout with reward={each.reward} and cancelled={each.cancelled} was "
                        "handed in as usable, mark it with failed=True"
                    )
            group.rollouts.extend(rollouts)
            self._outstanding -= group.outstanding
            group.outstanding = 0
            self.cancelled.discard(group_id)
            self.ledger.sampled(rollouts)
            groups.append(group)
        counts = self.ledger.step
        failed, tried = counts["rollouts/failed"], counts["rollouts/sampled"] - counts["rollouts/discarded_cancelled"]
        if groups and 0 < failed == tried and not self.outstanding:
            raise EveryRolloutFailed(f"step {self.step}: all {failed} rollouts failed; {WHY_ROLLOUTS_FAIL}")
        for group in groups:
            self._apply(self._decide(self.policy.on_group, group), groups)
        self._hand_over()

    def take_batch(self) -> list[Group]:
        """The groups to train on now, or []. The ledger counts them as trained, and they are no longer live."""
        groups = self._decide(self.policy.take_batch, wanted="groups")
        for group in groups:
            if not isinstance(group, Group):
                raise RuntimeError(f"{self.policy_name}.take_batch returned {group!r} in its list: use groups alone")
        prompts = {group.prompt.id for group in groups}
        if len(prompts) != len(groups):
            raise RuntimeError(f"{self.policy_name}.take_batch returned {len(groups)} groups of {len(prompts)} prompts")
        for group in groups:
            if group.id not in self.live:
                raise RuntimeError(f"{self.policy_name}.take_batch returned group {group.id}, which is not alive")
            live = self.live[group.id]  # a policy restored from a checkpoint may return a copy
            if (missing := len(live.rollouts) - len(group.rollouts)) > 0:
                raise RuntimeError(
                    f"{self.policy_name}.take_batch returned a copy of group {group.id} without its last {missing} "
                    "rollouts: after a restart, keep the group that on_group gets"
                )
            if not group.usable or live.outstanding:
                raise RuntimeError(f"{self.policy_name}.take_batch returned group {group.id}, which is not complete")
            _check_taken(group, self.policy_name)
            self._remove(group)
            self.ledger.trained(group)
        self.batch = list(groups)
        return self.batch

    def check_progress(self) -> None:
        """Raise CannotFillBatch if no rollout is outstanding, since a policy without a batch would wait for ever."""
        if self.step == 0:
            raise RuntimeError("no step has begun: begin_step comes before fill_batch")
        if self.outstanding == 0:
            raise CannotFillBatch(
                f"step {self.step}: {self.policy_name} has no batch to train on and asks for no more rollouts "
                f"({len(self.live)} groups are alive, {len(self.prompts.evicted)} prompts evicted of "
                f"{self.prompts.rows_per_epoch} rows); loosen its thresholds or give it more data"
            )

    def fill_batch(self, finish: Callable[[], list[tuple[str, list[Rollout]]]], drain: bool = True) -> list[Group]:
        """The batch of the step, from an engine that can be waited for.

        Args:
            finish: returns the waves that finish next, or [] to be called again; called only while rollouts are
                outstanding.
            drain: also wait for all outstanding rollouts.
        """
        batch: list[Group] = []
        while True:
            batch = batch or self.take_batch()
            if batch and not (drain and self.outstanding):
                return batch
            self.check_progress()
            waves = finish()
            if self._restored and not waves:
                raise RuntimeError(
                    f"step {self.step}: {self._restored} rollouts of the checkpoint were in generation, and "
                    "none finish: call resubmit_unfinished after load_state_dict"
                )
            self.finish_waves(waves)

    def metrics(self) -> dict[str, float]:
        """All metrics of the step whose batch was just taken. Checks the ledger, and the policy's own metrics."""
        self.ledger.check(self.live.values())
        counted = {
            **self.ledger.metrics(),
            **self.prompts.metrics(),
            **batch_metrics(self.batch, self.step, self.policy.baseline),
            "groups/in_batch": float(len(self.batch)),
            "groups/live": float(len(self.live)),
            "allocation/seconds": self.decision_seconds,
        }
        own = self.policy.metrics()
        if not isinstance(own, Mapping):
            raise self._wrong_answer(self.policy.metrics, own, "a dict of floats, {} for none")
        for name, value in own.items():
            section = name.partition("/")[0]
            taken = section in DRIVER_SECTIONS | VERL_SECTIONS
            if taken or not isinstance(value, int | float | np.number):
                owner = "the driver counts" if section in DRIVER_SECTIONS else "verl logs"
                valid = f"{owner} under {section}/, use the method's own name" if taken else "use a number"
                raise RuntimeError(f"{self.policy_name}.metrics returned {name}={value!r}: {valid}")
        return counted | {name: float(value) for name, value in own.items()}  # of numpy, perhaps, which is no JSON

    def state_dict(self) -> dict:
        """JSON-able state of the whole run between two steps, except the position in the data."""
        return {
            "version": self.VERSION,
            "step": self.step,
            "groups_created": self._groups_created,
            "live": [group.state_dict() for group in self.live.values()],
            **({"cancelled": sorted(self.cancelled)} if self.cancelled else {}),
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
        self.cancelled = set(state.get("cancelled", ()))
        self._live_prompts = {group.prompt.id: group for group in self.live.values()}
        self._outstanding = self._restored = sum(group.outstanding for group in self.live.values())
        self.policy.load_state_dict(state["policy"]["state"])
        self.ledger.load_state_dict(state["ledger"])
        self.prompts.load_state_dict(state["prompts"])
        self.ledger.check(self.live.values())

    def resubmit_unfinished(self) -> int:
        """After a restart, generate every unfinished wave anew, unless the policy has cancelled the wave.

        Returns the number of rollouts requested.
        """
        self._restored = 0
        unfinished = [group for group in self.live.values() if group.outstanding]
        requests = [(group, group.outstanding) for group in unfinished if group.id not in self.cancelled]
        if self.cancelled:
            self.engine.cancel([group for group in unfinished if group.id in self.cancelled])
        if requests:
            self.engine.submit(requests)
        return sum(count for _, count in requests)

    def _execute(self, actions: list[Action]) -> None:
        self._apply(actions)
        self._hand_over()

    def _apply(self, actions: list[Action], finished: Iterable[Group] = ()) -> None:
        """Apply the actions of one decision to the groups and prompts, before the policy decides about another group.

        Cancels come first, so that they end only waves of earlier decisions. ``finished``: groups whose waves are
        being handed in.
        """
        self._cancel([action.prompt for action in actions if isinstance(action, Cancel)], finished)
        for action in actions:
            match action:
                case Request(target=target, rollouts=count, prefix=prefix, sampling=sampling):
                    group = self._new_group(target, prefix) if isinstance(target, Prompt) else self._known(target)
                    group.sampling = sampling
                    count = int(count)  # of numpy, perhaps, which records could not hold
                    group.outstanding += count
                    self._outstanding += count
                    self._requested.append((group, count))
                case Discard(group=group, reason=reason):
                    group = self._known(group)
                    self._remove(group)
                    self.ledger.discarded(group, reason)
                    self._released.append(group)
                case Evict(prompt=prompt):
                    self.prompts.evict(prompt)
                case PutBack(prompt=prompt):
                    if self._is_live(prompt.id):
                        raise RuntimeError(f"{self.policy_name} puts back prompt {prompt.id}, which has a live group")
                    self.prompts.put_back(prompt)
                case Cancel():
                    pass
                case _:
                    raise RuntimeError(
                        f"{self.policy_name} returned {action!r}: use Request, Discard, Evict, PutBack, Cancel"
                    )

    def _hand_over(self) -> None:
        """Tell the engine which groups are dropped, and submit all requests together, so that the engine can spread
        them over its workers."""
        released, self._released = self._released, []
        requested, self._requested = self._requested, []
        if released:
            self.engine.release(released)
        if requested:
            self.engine.submit(requested)

    def _cancel(self, prompts: list[Prompt], finished: Iterable[Group]) -> None:
        """Cancel the running waves of ``prompts``. Cancelling a group in ``finished`` changes nothing."""
        if not prompts:
            return
        just_finished = {group.id for group in finished}
        groups: dict[str, Group] = {}
        for prompt in prompts:
            group = self._live_prompts.get(prompt.id)
            if group is None or not (group.outstanding or group.id in just_finished):
                raise RuntimeError(f"{self.policy_name} cancels prompt {prompt.id}, which has no rollout in generation")
            if group.outstanding and group.id not in self.cancelled:
                groups[group.id] = group
        if groups:
            self._hand_over()  # the engine must know the waves
            self.cancelled |= groups.keys()
            self.engine.cancel(list(groups.values()))

    def _new_group(self, prompt: Prompt, prefix: Trajectory | None) -> Group:
        if self._is_live(prompt.id):
            raise RuntimeError(f"{self.policy_name} requested a second live group of prompt {prompt.id}")
        if prompt.id in self.prompts.returned:
            raise RuntimeError(f"{self.policy_name} requested prompt {prompt.id}, which it has put back: draw it again")
        self._groups_created += 1
        group = Group(f"{prompt.id}-{self._groups_created}", prompt, prefix=prefix)  # no "_": verl splits keys at it
        self.live[group.id] = group
        self._live_prompts[prompt.id] = group
        return group

    def _known(self, group: Group) -> Group:
        """The live group itself: a policy restored from a checkpoint may hold an equal copy."""
        if group.id not in self.live:
            raise RuntimeError(f"{self.policy_name} acts on group {group.id}, which is not alive")
        if self.live[group.id].outstanding:
            raise RuntimeError(f"{self.policy_name} acts on group {group.id}, which is still being generated")
        return self.live[group.id]

    def _remove(self, group: Group) -> None:
        del self.live[group.id]
        del self._live_prompts[group.prompt.id]

    def _is_live(self, prompt_id: str) -> bool:
        return prompt_id in self._live_prompts

    def _decide(
        self, function: Callable[..., list[Decided]], *arguments: object, wanted: str = "actions"
    ) -> list[Decided]:
        start = time.perf_counter()
        try:
            decided = function(*arguments)
        finally:
            self.decision_seconds += time.perf_counter() - start
        if not isinstance(decided, list | tuple):
            raise self._wrong_answer(function, decided, f"a list of {wanted}, [] for none")
        return decided

    def _wrong_answer(self, function: Callable, answer: object, wanted: str) -> RuntimeError:
        found = None if answer is None else type(answer).__name__
        return RuntimeError(f"{self.policy_name}.{function.__name__} returned {found}: return {wanted}")


def _check_taken(group: Group, policy_name: str) -> None:
    """Raise RuntimeError unless the group's ``weight`` is a finite number of at least 0, and its ``trained`` is None or
    has the indices of two or more different usable rollouts.

    A single row has no advantage: verl would use its reward.
    """
    if not (checks.is_number(group.weight) and group.weight >= 0):
        raise RuntimeError(
            f"{policy_name}.take_batch returned group {group.id} with weight={group.weight!r}: "
            "use a finite number of at least 0"
        )
    if group.trained is None:
        return
    usable = {index for index, rollout in enumerate(group.rollouts) if not rollout.failed}
    different = len(set(group.trained)) == len(group.trained) >= 2
    if not (different and all(map(checks.is_integer, group.trained)) and usable.issuperset(group.trained)):
        raise RuntimeError(
            f"{policy_name}.take_batch returned group {group.id} with trained={list(group.trained)}: "
            f"use two or more different indices of its usable rollouts {sorted(usable)}"
        )


def check_written_by(state: Mapping, policy_name: str) -> None:
    """Raise ValueError unless this policy wrote ``state``."""
    written_by = state["policy"]["class"]
    if written_by != policy_name:
        raise ValueError(
            f"the checkpoint was written by {written_by}, this run uses {policy_name}; "
            f"resume with the recipe of {written_by}, or start anew in another trainer.default_local_dir"
        )
