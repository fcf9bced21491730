"""What the runs of a trial have left on disk: the record of what passed between run and policy, and verl's own rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PADDING = "pad"  # what verl's keys of padding begin with; those of prompts are hashes


@dataclass
class Record:
    """One training, over all its processes: where one was resumed, what it did counts, and not what was lost.

    Attributes:
        rows_per_epoch: of the data.
        loaded: what the last process had after it had loaded a checkpoint; None: it started anew.
        rows: of the data, by number, in the order in which they were read.
        batches: ids of the prompts of each step's batch.
    """

    rows_per_epoch: int = 0
    loaded: dict[str, Any] | None = None
    rows: list[int] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)


def read_record(path: Path) -> Record:
    """The record (``rollout_driver.record``) of a run that was perhaps resumed, and perhaps goes on."""
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
                record.batches[step] = [prompt_of(group) for group in event["groups"]]
        record.rows += [row for _, row, _ in event.get("rows", ())]
    return record


def prompt_of(group_id: str) -> str:
    """The id of the prompt of a group, or of a row of it in TransferQueue."""
    return group_id.rsplit("-", 1)[0]


def trained_prompts(folder: Path, steps: Iterable[int]) -> dict[int, set[tuple[str, str]]]:
    """(prompt id, text) of what verl has trained on, padding left out; of those of ``steps`` that it has a file of."""
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
