"""Reads the event files of verl's ``tensorboard`` logger. Each event holds a value of a metric at a step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

PATTERN = "events.out.tfevents.*"
FRAME = 16
"""Bytes around a record: the record's length, a checksum of the length, and a checksum of the record."""

Records = list[tuple[int, dict[str, float]]]
"""Steps with values by metric, in the order of writing; a start of the run has one record for each time it logged."""


def event_files(path: Path) -> list[Path]:
    """Event files directly in a folder, or the path itself if it is an event file; else none."""
    found = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
    return [file for file in found if file.match(PATTERN) and file.is_file()]


def read_events(files: Iterable[Path]) -> tuple[Records, int]:
    """The values of one run, and the number of unread bytes.

    Consecutive values of a step are one record, since verl logs the metrics of a step together. Each start of a run
    writes its own file; files are read in the order in which they were started. Text values, such as verl's samples of
    validations (``trainer.log_val_generations``), are ignored. An unfinished or damaged event ends its file, because
    the start of the next event is unknown.

    TensorBoard keeps float32. A value is read as the shortest decimal with the same float32, so a logged 0.7 is 0.7
    again and reaches a target of 0.7. Counts are exact up to 2^24 (16,777,216); larger counts, such as tokens, have a
    relative error of at most 1.2e-7.

    Raises:
        ValueError: a file cannot be read, or the package tensorboard is missing.
    """
    # Sorted by time: names of files started within one second are in the order of process ids.
    parts = sorted((_read(file) for file in files), key=lambda part: part[0])
    return [record for _, records, _ in parts for record in records], sum(unread for _, _, unread in parts)


def _read(path: Path) -> tuple[float, Records, int]:
    """Time of the file's first record, its values, and the number of unread bytes at its end."""
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
        # The loader ends silently at an unfinished record or a wrong checksum, so this function counts the bytes.
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            begun = min(begun, event.wall_time)
            read += len(raw) + FRAME
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    if not records or records[-1][0] != event.step:
                        records.append((event.step, {}))
                    records[-1][1][value.tag] = _shortest(value.simple_value)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    except DecodeError:
        pass  # a record without an event counts as damaged, so the rest of the file is unread
    return begun, records, max(0, size - read)


def _shortest(value: float) -> float:
    """The decimal with the fewest digits whose float32 is the value."""
    return float(str(np.float32(value)))
