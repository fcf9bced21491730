"""A record of everything that passes between a run and its policy, to be replayed without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_ext.controller import Engine, RolloutController
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy

VERSION = 1


class RecordingController(RolloutController):
    """A controller that writes down, a JSON object a line, what it is called with and what comes of it.

    | ``event`` | when | holds |
    |---|---|---|
    | ``run`` | once per process | ``version``, ``policy``, ``rows_per_epoch``, ``total_steps`` |
    | ``load`` | a checkpoint was loaded | ``state``, the checkpoint's; ``loaded``, what the controller then has |
    | ``step`` | a training step begins | ``step``, ``total_steps``, and what was done |
    | ``waves`` | waves were handed in | ``waves``: [group id, rollouts, trajectories or null]; and what was done |
    | ``batch`` | the policy gave a batch | ``groups``: their ids |
    | ``resubmit`` | after a restart | what was done |

    "What was done" is ``rows``, the rows of the data that were read, [id, row, metadata]; ``submitted``, the requests,
    [group id, rollouts, prefix or null]; and ``released``, ids of groups given up. Calls that hand in nothing and get
    nothing are left out: policies do not notice them.

    Lines are written as they happen; a resumed run appends.

    ``policy``, ``rows``, ``rows_per_epoch`` and ``engine`` are those of
    :class:`~verl_ext.controller.RolloutController`.

    Args:
        path: of the record; its folder is made.
        config: of the policy, as ``rollout_policy`` has it, so that the reader can make one.
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
        super().__init__(policy, self._watched(rows), rows_per_epoch, _WatchedEngine(engine, self))
        self._clear()
        path = Path(path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell():  # the last line of a run that was killed may have no end
            self._file.write("\n")
        self._write(
            "run", version=VERSION, policy=config, rows_per_epoch=rows_per_epoch, total_steps=policy.total_steps
        )

    def begin_step(self, step: int) -> None:
        total_steps = self.policy.total_steps
        super().begin_step(step)
        self._write_done("step", step=step, total_steps=total_steps)

    def finish_waves(self, waves: list[tuple[str, list[Rollout]]]) -> None:
        super().finish_waves(waves)
        if waves:
            self._write_done("waves", waves=[_wave_state(*wave) for wave in waves])

    def take_batch(self) -> list[Group]:
        groups = super().take_batch()
        if groups:
            self._write("batch", groups=[group.id for group in groups])
        return groups

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._write("load", state=state, loaded=self.state_dict())

    def resubmit_unfinished(self) -> int:
        count = super().resubmit_unfinished()
        self._write_done("resubmit")
        return count

    def _watched(self, rows: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in rows:
            self.rows.append([prompt.id, prompt.row, dict(prompt.metadata)])
            yield prompt

    def _clear(self) -> None:
        self.rows: list[list] = []
        self.submitted: list[list] = []
        self.released: list[str] = []

    def _write_done(self, event: str, **what: Any) -> None:
        self._write(event, **what, rows=self.rows, submitted=self.submitted, released=self.released)
        self._clear()

    def _write(self, event: str, **what: Any) -> None:
        self._file.write(json.dumps({"event": event, **what}) + "\n")
        self._file.flush()


class _WatchedEngine:
    """Passes on what the controller asks for, and notes it."""

    def __init__(self, engine: Engine, controller: RecordingController):
        self.engine, self.controller = engine, controller

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        self.controller.submitted += [request_state(group, count) for group, count in wave]
        self.engine.submit(wave)

    def release(self, groups: list[Group]) -> None:
        self.controller.released += [group.id for group in groups]
        self.engine.release(groups)


def request_state(group: Group, count: int) -> list:
    """[group id, how many more rollouts, the prefix that they start from or None]."""
    return [group.id, count, None if group.prefix is None else group.prefix.state_dict()]


def _wave_state(group_id: str, rollouts: list[Rollout]) -> list:
    trajectories = None
    if any(rollout.trajectory is not None for rollout in rollouts):
        trajectories = [None if r.trajectory is None else r.trajectory.state_dict() for r in rollouts]
    return [group_id, Group(group_id, Prompt("", 0), list(rollouts)).state_dict()["rollouts"], trajectories]
