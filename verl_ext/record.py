"""A record of all calls between a run and its policy, to verify the policy later without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.controller import Engine, RolloutController
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy

VERSION = 1


class RecordingController(RolloutController):
    """A controller that also writes each call, with its effects, to a file as one line of JSON.

    | ``event`` | when | holds |
    |---|---|---|
    | ``run`` | once per process | ``version``, ``policy``, ``rows_per_epoch``, ``total_steps`` |
    | ``load`` | a checkpoint was loaded | its ``state``; ``loaded``, the controller's state afterwards |
    | ``step`` | a training step begins | ``step``, ``total_steps``, and the effects |
    | ``waves`` | waves have finished | ``waves``: [group id, rollouts, trajectories or null]; and the effects |
    | ``batch`` | the policy returned a batch | ``groups``: their ids |
    | ``resubmit`` | after a restart | the effects |

    The effects are ``rows``, the rows read from the data, each [id, row, metadata]; ``submitted``, the
    requests, each [group id, rollouts, prefix or null], and a fourth entry if the request has its own sampling;
    ``released``, the ids of discarded groups; and, if there are any, ``cancelled``, the ids of cancelled groups. Calls
    without finished waves or a batch are left out: they do not change the policy.

    Lines are written as the calls happen; a resumed run appends.

    ``policy``, ``rows``, ``rows_per_epoch`` and ``engine`` are those of
    :class:`~verl_ext.controller.RolloutController`.

    Args:
        path: the record; its folder is created.
        config: the policy's configuration, ``rollout_policy``, from which a reader makes the policy.
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        rows: Iterable[Prompt],
        rows_per_epoch: int,
        engine: Engine,
        *,
        path: str | Path,
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__(policy, self._watch_rows(rows), rows_per_epoch, _WatchedEngine(engine, self))
        self._clear()
        path = Path(path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell():  # a kill may have cut off the last line of the previous process
            self._file.write("\n")
        self._write(
            "run", version=VERSION, policy=config, rows_per_epoch=rows_per_epoch, total_steps=policy.total_steps
        )

    def begin_step(self, step: int) -> None:
        total_steps = self.policy.total_steps
        super().begin_step(step)
        self._write_effects("step", step=step, total_steps=total_steps)

    def finish_waves(self, waves: list[tuple[str, list[Rollout]]]) -> None:
        super().finish_waves(waves)
        if waves:
            self._write_effects("waves", waves=[_wave_state(*wave) for wave in waves])

    def take_batch(self) -> list[Group]:
        groups = super().take_batch()
        if groups:
            self._write("batch", groups=batch_state(groups))
        return groups

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._write("load", state=state, loaded=self.state_dict())

    def resubmit_unfinished(self) -> int:
        count = super().resubmit_unfinished()
        self._write_effects("resubmit")
        return count

    def _watch_rows(self, rows: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in rows:
            self.rows.append([prompt.id, prompt.row, dict(prompt.metadata)])
            yield prompt

    def _clear(self) -> None:
        self.rows: list[list] = []
        self.submitted: list[list] = []
        self.released: list[str] = []
        self.cancels: list[str] = []

    def _write_effects(self, event: str, **fields: Any) -> None:
        cancelled = {"cancelled": self.cancels} if self.cancels else {}
        self._write(event, **fields, rows=self.rows, submitted=self.submitted, released=self.released, **cancelled)
        self._clear()

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()


class _WatchedEngine:
    """Passes the controller's requests on to the engine and notes them for the record."""

    def __init__(self, engine: Engine, controller: RecordingController):
        self.engine, self.controller = engine, controller

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        self.controller.submitted += [request_state(group, count) for group, count in requests]
        self.engine.submit(requests)

    def release(self, groups: list[Group]) -> None:
        self.controller.released += [group.id for group in groups]
        self.engine.release(groups)

    def cancel(self, groups: list[Group]) -> None:
        self.controller.cancels += [group.id for group in groups]
        self.engine.cancel(groups)


def request_state(group: Group, count: int) -> list:
    """[group id, number of rollouts requested, their prefix or None], and their sampling if it is not verl's."""
    sampling = [] if group.sampling is None else [group.sampling.state_dict()]
    return [group.id, count, None if group.prefix is None else group.prefix.state_dict(), *sampling]


def batch_state(groups: list[Group]) -> list:
    """For each group its id, [id, trained] or [id, trained, weight].

    ``trained`` holds the indices of the trained rollouts; it is None, or left out, if all usable rollouts are trained
    on. A weight of 1 is left out.
    """

    def state(group: Group) -> str | list:
        trained = None if group.trained is None else [int(index) for index in group.trained]
        if group.weight != 1:
            return [group.id, trained, float(group.weight)]
        return group.id if trained is None else [group.id, trained]

    return [state(group) for group in groups]


def first_difference(one: Sequence, other: Sequence) -> tuple[int, str, str]:
    """Index of the first entry in which two different lists differ, and both entries as short texts."""
    pairs = zip(one, other, strict=False)
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    first, second = (str(each[at])[:120] if at < len(each) else "none" for each in (one, other))
    return at, first, second


def _wave_state(group_id: str, rollouts: list[Rollout]) -> list:
    trajectories = None
    if any(rollout.trajectory is not None for rollout in rollouts):
        trajectories = [None if r.trajectory is None else r.trajectory.state_dict() for r in rollouts]
    return [group_id, Group(group_id, Prompt("", 0), list(rollouts)).state_dict()["rollouts"], trajectories]
