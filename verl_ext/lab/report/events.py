"""Reading what verl's ``tensorboard`` logger wrote: event files, one value of one step per record."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

PATTERN = "events.out.tfevents.*"
FRAME = 16
"""Bytes around a record: its length, and a checksum each of the length and of the record."""

Records = list[tuple[int, dict[str, float]]]
"""Steps and values, in the order in which they were written."""


def event_files(path: Path) -> list[Path]:
    """The event files that a path stands for: those directly in a folder, or the file itself; else none."""
    found = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    return [file for file in found if file.match(PATTERN) and file.is_file()]


def read_events(files: Iterable[Path]) -> tuple[Records, int]:
    """The values of one run, and how many bytes could not be read.

    Each start of a run writes a file of its own: the one that was begun later continues. verl's samples of validations
    (``trainer.log_val_generations``) lie beside them, are text, and are left out. A record that is cut off or damaged
    ends its file, since nothing says where the next one begins.

    TensorBoard keeps float32. A value is read as the shortest decimal that float32 stores the same, so 0.7 is 0.7 again
    and reaches a target of 0.7. Counts are exact up to 2^24 (16,777,216); beyond, where tokens soon are, they are
    within 1.2e-7 of themselves: 120 in a billion.

    Raises:
        ValueError: a file cannot be read, or the package tensorboard is missing.
    """
    # Not by name: within a second, names are in the order of process ids.
    parts = sorted((_read(file) for file in files), key=lambda part: part[0])
    return [record for _, records, _ in parts for record in records], sum(unread for _, _, unread in parts)


def _read(path: Path) -> tuple[float, Records, int]:
    """When the file was begun, its values, and how many bytes at its end could not be read."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise ValueError(f"{path}: reading it takes the package tensorboard: pip install tensorboard.") from error
    records: Records = []
    begun, read = math.inf, 0
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
        # The loader ends in silence where a record is cut off or its checksum is wrong, so the bytes are counted.
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            begun = min(begun, event.wall_time)
            read += len(raw) + FRAME
            records += [
                (event.step, {value.tag: _shortest(value.simple_value)})
                for value in event.summary.value
                if value.WhichOneof("value") == "simple_value"
            ]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except DecodeError:
        pass  # a record that is no event: as with a damaged one, what follows counts as not read
    return begun, records, max(0, size - read)


def _shortest(value: float) -> float:
    """The decimal of fewest digits that float32 rounds to the value."""
    return float(str(np.float32(value)))
