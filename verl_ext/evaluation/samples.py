"""The responses on disk: one JSON line each, appended as they arrive, read again when an evaluation goes on."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

FSYNC_SECONDS = 10.0  # what a power failure may cost; a killed process loses nothing but the line being written


@dataclass(frozen=True)
class Sample:
    """What the estimators need to know of one response.

    Attributes:
        accuracy: of the reward function, see :class:`verl_ext.evaluation.reward.Verdict`.
        answer: its vote, or None.
        cut: whether it ended at the token limit.
        tokens: in the response, 0 where the server did not say.
    """

    accuracy: float
    answer: str | None
    cut: bool
    tokens: int


@dataclass
class Lines:
    """How many lines of the file were not used, and why.

    Attributes:
        truncated: last lines that had no end, as a kill leaves them; they were removed.
        malformed: lines that are not what this command writes; they were left in place and ignored.
        repeated: lines for a sample that an earlier line holds.
    """

    truncated: int = 0
    malformed: int = 0
    repeated: int = 0


class Samples:
    """A file of responses, locked until it is closed; a context manager.

    Attributes:
        found: by problem and number, every sample that the file holds.
        lines: what was not used when the file was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, made with its folder if it is not there, and read it.

        Raises:
            ValueError: another process has it open, or it cannot be written.
        """
        self.path, self.lines = path, Lines()
        self.found: dict[str, dict[int, Sample]] = defaultdict(dict)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(path, "a+b")
        except OSError as error:
            raise ValueError(f"out: {path} cannot be written ({error.strerror}).") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"out: {path} is being written by another evaluation; wait for it to end.") from error
        except OSError:
            pass  # some network file systems have no locks
        self._synced = time.monotonic()
        self._read()

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, problem: str, number: int, sample: Sample, record: Mapping[str, Any]) -> None:
        """Keep a sample; ``record`` is what else its line holds."""
        line = {"problem": problem, "sample": number, **vars(sample), **record}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > FSYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()
        self.found[problem][number] = sample

    def _read(self) -> None:
        self._file.seek(0)
        complete = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                # the next response would be appended to it, and both be lost
                self._file.truncate(complete)
                self.lines.truncated += 1
                break
            complete += len(line)
            if line.strip():
                self._parse(line)

    def _parse(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            problem, number = record["problem"], record["sample"]
            accuracy, answer = float(record["accuracy"]), record["answer"]
            sample = Sample(accuracy, answer, bool(record["cut"]), int(record["tokens"]))
            known = isinstance(problem, str) and type(number) is int and number >= 0
            if not known or not math.isfinite(accuracy) or not isinstance(answer, str | None):
                raise ValueError(line)
        except (ValueError, KeyError, TypeError, OverflowError):
            self.lines.malformed += 1
            return
        if number in self.found[problem]:
            self.lines.repeated += 1
        else:
            self.found[problem][number] = sample
