"""Files of a trial's runs: the record of a run and its policy, and verl's own rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PADDING = "pad"  # prefix of verl's keys of padding rows; keys of prompts are hashes


@dataclass
class Record:
    """One training run over all its processes. Steps that a resumed process repeats replace the lost ones.

    Attributes:
        rows_per_epoch: rows of the data in an epoch.
        loaded: state of the last process after it had loaded a checkpoint; None: it started anew.
        rows: row numbers of the data, in reading order.
        batches: ids of the prompts of each step's batch.
    """

    rows_per_epoch: int = 0
    loaded: dict[str, Any] | None = None
    rows: list[int] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)


def read_record(path: Path) -> Record:
    """The record (``rollout_driver.record``) of a run that may have been resumed, and may still be running."""
    before, record, step = Record(), Record(), 0
    for event in _events(path):
        match event["event"]:
            case "run":
                before, record = record, Record(event["rows_per_epoch"])
            case "load":
                saved = event["state"]
                record.loaded = event["loaded"]
                record.rows = before.rows[: saved["prompts"]["seen_total"]]
                record.batches = {done: ids for done, ids in before.batches.items() if done <= saved["step"]}
            case "step":
                step = event["step"]
            case "batch":
                record.batches[step] = [
                    prompt_of(group if isinstance(group, str) else group[0]) for group in event["groups"]
                ]
        record.rows += [row for _, row, _ in event.get("rows", ())]
    return record


def prompt_of(group_id: str) -> str:
    """The prompt id in the id of a group, or in a row's key in TransferQueue."""
    return group_id.rsplit("-", 1)[0]


def trained_prompts(folder: Path, steps: Iterable[int]) -> dict[int, set[tuple[str, str]]]:
    """(prompt id, text) of the rows that verl has trained on, without padding, for those ``steps`` with a file."""
    files = {step: folder / f"{step}.jsonl" for step in steps}
    return {step: set(_prompts(file)) for step, file in files.items() if file.exists()}


def _prompts(file: Path) -> Iterator[tuple[str, str]]:
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if not row["uid"].startswith(PADDING):
            yield prompt_of(row["uid"]), row["input"]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut off by a kill, or not yet written to its end
            continue
