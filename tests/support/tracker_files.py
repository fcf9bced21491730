"""Reads what trackers have written, as their own programs do."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER, CHUNK = 32768, 7, struct.Struct("<IHB")  # checksum, length, kind: LevelDB's log format


def wandb_history(folder: Path) -> dict[int, dict]:
    """The logged values by step, of the one offline run in the folder."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: dict[int, dict] = {}
    for record in _records(file.read_bytes()):
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.setdefault(record.history.step.num, {}).update((k, json.loads(v)) for k, v in values.items())
    return rows


def _records(content: bytes) -> Iterator[Record]:
    position, data = HEADER, b""
    while position + CHUNK.size <= len(content):
        if BLOCK - position % BLOCK < CHUNK.size:  # a block ends with padding
            position += BLOCK - position % BLOCK
        _, length, kind = CHUNK.unpack_from(content, position)
        position += CHUNK.size
        data += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last part of a record
            yield Record.FromString(data)
            data = b""


def text_of_tensorboard(folder: Path, name: str) -> dict[int, str]:
    """The logged texts by step, of the event files in the folder."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors(f"{name}/text_summary")}
