"""Verifies a record: gives a fresh policy the recorded results in the recorded order and compares its requests.

verl-ext verify outputs/record.jsonl
verl-ext verify outputs/record.jsonl --data train.parquet   # for a policy that estimates from the prompts' texts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from verl_ext.controller import RolloutController
from verl_ext.data import sources
from verl_ext.data.schema import row_id
from verl_ext.errors import RunError, option_errors
from verl_ext.lab.method import instantiate, reads_texts
from verl_ext.policy import Group, Prompt, Rollout, RolloutPolicy
from verl_ext.prompts import prompt_text
from verl_ext.record import VERSION, batch_state, first_difference, request_state
from verl_ext.trajectory import Trajectory

EFFECTS = {"rows", "submitted", "released"}
KEYS = {  # of an event's line, at least
    "run": {"version", "policy", "total_steps", "rows_per_epoch"},
    "load": {"state"},
    "step": {"step", "total_steps", *EFFECTS},
    "waves": {"waves", *EFFECTS},
    "batch": {"groups"},
    "resubmit": EFFECTS,
}


class RecordDiffers(RunError):
    """The policy made another request than in the recorded run. The message names the line and both requests."""


def verify(
    path: str | Path, policy: Callable[[], RolloutPolicy] | None = None, texts: Sequence[str] | None = None
) -> Verification:
    """Run a fresh policy against the record of a run (``rollout_driver.record``).

    Only generation is replaced: policy, controller, prompt stream and ledger are those of training.

    Args:
        path: a file written by :class:`~verl_ext.record.RecordingController`.
        policy: makes the policy; None: the policy described in the record.
        texts: the prompts' texts by row, for estimators over texts; None: there is no such estimator.

    Raises:
        RecordDiffers: at the first difference in requests, discarded groups, rows read or batches.
        ValueError: there is no such file, it is not a record of this version, a line is damaged, or the recorded policy
            needs texts.
    """
    verification = Verification(policy, texts)
    for number, event in _events(Path(path)):
        verification.apply(number, event)
    return verification


class Verification:
    """One pass over a record, with its counts so far. It is also the engine of the controller under test.

    Attributes:
        run: the controller, with the policy under test.
        steps: training steps begun; a resumed run repeats some.
        requests: prompts and groups with requested rollouts.
        rollouts: rollouts requested.
        batches: batches trained on.
        cut: last lines of processes that were left out, since a kill had cut them off.
    """

    def __init__(self, policy: Callable[[], RolloutPolicy] | None, texts: Sequence[str] | None):
        self.make, self.texts = policy, texts
        self.run: RolloutController
        self.rows: list[Prompt] = []
        self.submitted: list[list] = []
        self.released: list[str] = []
        self.cancelled: list[str] = []
        self.steps = self.requests = self.rollouts = self.batches = self.cut = 0

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        """Note the requests, for the comparison with the record."""
        self.submitted += [request_state(group, count) for group, count in requests]

    def release(self, groups: list[Group]) -> None:
        """Note the discarded groups, for the comparison with the record."""
        self.released += [group.id for group in groups]

    def cancel(self, groups: list[Group]) -> None:
        """Note the cancelled groups, for the comparison with the record."""
        self.cancelled += [group.id for group in groups]

    def apply(self, number: int, event: Mapping[str, Any]) -> None:
        """Make the call recorded in line ``number``, and compare its effects."""
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
                _compare(where, "batch", event["groups"], batch_state(self.run.take_batch()))
                self.batches += 1
            case "resubmit":
                self.run.resubmit_unfinished()
            case "cut":
                self.cut += 1
        self._compare_effects(where, event)

    def _start(self, event: Mapping[str, Any]) -> None:
        if event["version"] != VERSION:
            raise ValueError(f"the record has version {event['version']!r}, this code reads version {VERSION}.")
        if self.make is None and event["policy"] is None:
            raise ValueError("the record does not describe its policy; pass one to verify().")
        if self.make is None and self.texts is None and reads_texts(event["policy"]):
            raise ValueError(
                f"the estimator {event['policy']['estimator']} reads the prompts' texts, which no record holds; give "
                "the parquet files of the run's data.train_files with --data."
            )
        policy = instantiate(dict(event["policy"])) if self.make is None else self.make()
        self.rows, self.submitted, self.released, self.cancelled = [], [], [], []  # a killed process may have left some
        texts = [""] * event["rows_per_epoch"] if self.texts is None else self.texts
        policy.start_run(event["total_steps"], texts)
        self.run = RolloutController(policy, self._recorded_rows(), event["rows_per_epoch"], self)

    def _recorded_rows(self) -> Iterator[Prompt]:
        while True:
            if not self.rows:
                raise RecordDiffers("the policy draws more prompts than the recorded run did")
            yield self.rows.pop(0)

    def _compare_effects(self, where: str, event: Mapping[str, Any]) -> None:
        if "submitted" not in event:
            return
        _compare(where, "requests", event["submitted"], self.submitted)
        _compare(where, "discarded groups", event["released"], self.released)
        _compare(where, "cancelled groups", event.get("cancelled", []), self.cancelled)
        _compare(where, "unread rows of the data", [], [row.id for row in self.rows])
        self.requests += len(self.submitted)
        self.rollouts += sum(count for _, count, *_ in self.submitted)
        self.submitted, self.released, self.cancelled = [], [], []


def _compare(where: str, kind: str, recorded: list, found: list) -> None:
    if recorded == found:
        return
    at, one, other = first_difference(recorded, found)
    raise RecordDiffers(
        f"{where}: {kind} differ, {len(recorded)} in the record and {len(found)} now; the first difference is at "
        f"number {at + 1}: {one} in the record, {other} now"
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
    """Line numbers and events. The event of an incomplete line is ``cut``: a kill cuts off its process's last line."""
    if not path.is_file():
        raise ValueError(f"{path}: {'it is a folder, name a file' if path.is_dir() else 'there is no such file'}.")
    begun, cut = False, 0
    with path.open(encoding="utf-8", errors="replace") as file:  # another file is refused as no record, not by a byte
        for number, line in enumerate(file, 1):
            if not line.strip():  # a resumed run begins a new line
                continue
            event = _complete(line)
            begun = begun or event["event"] == "run"
            if not begun and event["event"] != "cut":
                raise ValueError(f"{path}: is not a record; its first line is not a complete run event.")
            if cut and event["event"] not in ("run", "cut"):
                raise ValueError(f"{path}: line {cut} is damaged.")
            cut = number if event["event"] == "cut" else 0
            yield number, event
    if not begun:
        raise ValueError(f"{path}: is not a record; it has no run event.")


def _complete(line: str) -> dict:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    keys = KEYS.get(str(event.get("event"))) if isinstance(event, dict) else None
    return event if keys is not None and event.keys() >= keys else {"event": "cut"}


def texts_of(data: Sequence[Path], record: Path) -> list[str]:
    """The texts of a recorded run's prompts by row, from the run's training data.

    Raises:
        ValueError: a file cannot be read, or a row of the data is not the prompt of the record.
    """
    rows = [row for file in data for row in sources.rows(file, ["data_source", "prompt", "reward_model"])]
    ids = list(map(row_id, rows))
    for _, event in _events(record):
        sized = event.get("rows_per_epoch", len(ids)) == len(ids)
        if not sized or any(ids[row] != identity for identity, row, *_ in event.get("rows", ())):
            raise ValueError(
                f"--data {', '.join(map(str, data))}: holds other prompts than the recorded run read; give the run's "
                "data.train_files, without the prompts longer than data.max_prompt_length, which verl drops."
            )
    return [prompt_text(row["prompt"]) for row in rows]


def main(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A record: the file named by rollout_driver.record.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRAIN.parquet",
            help="Parquet file of the run's data.train_files, for an estimator over texts that has no features; once "
            "per file, in their order.",
        ),
    ] = None,
) -> None:
    """Check that a fresh policy makes the same requests as in a recorded run; exits with 1 if they differ."""
    console = Console()
    try:
        with option_errors():
            found = verify(path, texts=texts_of(data, path) if data else None)
    except RecordDiffers as error:
        console.print(Text(f"differs: {error}"))
        raise typer.Exit(1) from error
    console.print(
        f"the same: {found.requests:,} requests for {found.rollouts:,} rollouts and {found.batches:,} batches "
        f"in {found.steps:,} steps"
    )
    if found.cut:
        console.print(f"Incomplete lines left out, since a kill cuts off the last line of its process: {found.cut}")
