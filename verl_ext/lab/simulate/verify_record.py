"""Replays a recorded run: the same results, in the same order, to a fresh policy; its requests have to be the same.

python -m verl_ext.lab.simulate.verify_record outputs/recording.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from verl_ext.controller import RolloutController
from verl_ext.lab.method import instantiate
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy
from verl_ext.record import VERSION, request_state
from verl_ext.trajectory import Trajectory


class RecordingDiffers(RuntimeError):
    """The policy asked for something else than it did in the recorded run. The message says where."""


@dataclass(frozen=True)
class Replayed:
    """What was compared, all of it equal.

    Attributes:
        steps: training steps that began; a resumed run repeats some.
        requests: prompts and groups for which rollouts were requested.
        rollouts: that were requested.
        batches: that were trained on.
        policy: as it is at the end.
    """

    steps: int
    requests: int
    rollouts: int
    batches: int
    policy: RolloutPolicy


def replay(
    path: str | Path, policy: Callable[[], RolloutPolicy] | None = None, texts: Sequence[str] | None = None
) -> Replayed:
    """Feed the record of a run (``rollout_driver.record``) to a fresh policy, and compare what it asks for.

    Everything but the generation is that of training: policy, controller, stream of prompts, books.

    Args:
        path: written by :class:`~verl_ext.record.RecordingController`.
        policy: makes the policy; None: the one that the record describes.
        texts: of the prompts by row, for estimators over texts; None: there are none, which all others do without.

    Raises:
        RecordingDiffers: at the first request, release or batch that is not the recorded one.
        ValueError: no such file, or no record of this version.
    """
    events = _events(Path(path))
    replaying = _Replaying(policy, texts)
    for number, event in events:
        replaying.see(number, event)
    return Replayed(replaying.steps, replaying.requests, replaying.rollouts, replaying.batches, replaying.run.policy)


class _Replaying:
    """One pass over a record; it is the controller's engine."""

    def __init__(self, policy: Callable[[], RolloutPolicy] | None, texts: Sequence[str] | None):
        self.make, self.texts = policy, texts
        self.run: RolloutController
        self.rows: list[Prompt] = []
        self.submitted: list[list] = []
        self.released: list[str] = []
        self.steps = self.requests = self.rollouts = self.batches = 0

    # ---- what the controller calls ----

    def submit(self, wave: list[tuple[Group, int]]) -> None:
        self.submitted += [request_state(group, count) for group, count in wave]

    def release(self, groups: list[Group]) -> None:
        self.released += [group.id for group in groups]

    # ---- what was recorded ----

    def see(self, number: int, event: Mapping[str, Any]) -> None:
        """Do it again, and compare."""
        where = f"line {number}"
        self.rows += [Prompt(*row) for row in event.get("rows", ())]
        match event["event"]:
            case "run":
                self._start(event)
            case "load":
                self.run.load_state_dict(event["state"])
            case "step":
                where = f"step {event['step']} ({where})"
                self.run.policy.total_steps = event["total_steps"]
                self.run.begin_step(event["step"])
                self.steps += 1
            case "waves":
                self.run.finish_waves([_wave(*wave) for wave in event["waves"]])
            case "batch":
                taken = [group.id for group in self.run.take_batch()]
                _compare(where, "batch", event["groups"], taken)
                self.batches += 1
            case "resubmit":
                self.run.resubmit_unfinished()
        self._compare_done(where, event)

    def _start(self, event: Mapping[str, Any]) -> None:
        if event["version"] != VERSION:
            raise ValueError(f"the record has version {event['version']!r}, this code reads version {VERSION}.")
        if self.make is None and event["policy"] is None:
            raise ValueError("the record does not say what its policy was; give one.")
        policy = instantiate(dict(event["policy"])) if self.make is None else self.make()
        self.rows, self.submitted, self.released = [], [], []  # of a process that was killed
        texts = [""] * event["rows_per_epoch"] if self.texts is None else self.texts
        policy.start_run(event["total_steps"], texts)
        self.run = RolloutController(policy, self._recorded_rows(), event["rows_per_epoch"], self)

    def _recorded_rows(self) -> Iterator[Prompt]:
        while True:
            if not self.rows:
                raise RecordingDiffers("the policy draws more prompts than were drawn in the recorded run")
            yield self.rows.pop(0)

    def _compare_done(self, where: str, event: Mapping[str, Any]) -> None:
        if "submitted" not in event:
            return
        _compare(where, "requests", event["submitted"], self.submitted)
        _compare(where, "groups given up", event["released"], self.released)
        _compare(where, "rows of the data left", [], [row.id for row in self.rows])
        self.requests += len(self.submitted)
        self.rollouts += sum(count for _, count, _ in self.submitted)
        self.submitted, self.released = [], []


def _compare(where: str, what: str, recorded: list, replayed: list) -> None:
    if recorded == replayed:
        return
    pairs = zip(recorded, replayed, strict=False)
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(recorded), len(replayed)))
    one, other = (str(values[at])[:120] if at < len(values) else "none" for values in (recorded, replayed))
    raise RecordingDiffers(
        f"{where}: {what} differ, {len(recorded)} recorded and {len(replayed)} replayed; the first that does is "
        f"number {at + 1}: recorded {one}, replayed {other}"
    )


def _wave(group_id: str, rollouts: list, trajectories: list | None) -> tuple[str, list[Rollout]]:
    state = {"id": group_id, "prompt": ["", 0, {}], "rollouts": rollouts, "outstanding": 0, "prefix": None}
    made = Group.from_state_dict(state).rollouts
    if trajectories is None:
        return group_id, made
    return group_id, [
        rollout if tokens is None else replace(rollout, trajectory=Trajectory.from_state_dict(tokens))
        for rollout, tokens in zip(made, trajectories, strict=True)
    ]


def _events(path: Path) -> Iterator[tuple[int, dict]]:
    """The lines; one that a kill cut off, the last of its process, is passed over."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    begun = False
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            begun = begun or event.get("event") == "run"
            if not begun:
                raise ValueError(f"{path}: does not begin as a record does.")
            yield number, event
    if not begun:
        raise ValueError(f"{path}: holds no record.")


def main(path: Annotated[Path, typer.Argument(metavar="FILE", help="What rollout_driver.record wrote.")]) -> None:
    """Replay a recorded run with the policy it was made with; exits with 1 where the policy asks for something else."""
    console = Console()
    try:
        found = replay(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RecordingDiffers as error:
        console.print(Text(f"differs: {error}"))
        raise typer.Exit(1) from error
    console.print(
        f"the same: {found.requests:,} requests for {found.rollouts:,} rollouts and {found.batches:,} batches "
        f"in {found.steps:,} steps"
    )


if __name__ == "__main__":
    typer.run(main)
