"""SIGUSR1: save after the current step and stop. The same command resumes the run later.

A run measures how long it needs to save and stop, so that a job can send the signal in time (:class:`StopTime`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from verl_ext.driver.cluster import read_note, write_note
from verl_ext.files import write_text

logger = logging.getLogger(__name__)

FILE = "STOP_SECONDS_FILE"  # environment variable with the file's path; examples/slurm/train.sbatch sets it
LAST = 10  # steps
_POLL = 0.5  # seconds


class Stopped(Exception):
    """The run was asked to stop, and has saved a checkpoint and ended before the last planned step."""


@contextmanager
def stop_on_signal() -> Iterator[None]:
    """Within this context, SIGUSR1 to the driver's process asks the run to stop early.

    The trainer may run on another node, so the request goes through Ray. A thread sends the request once Ray is
    initialized, because the signal may arrive in the middle of any call to Ray.
    """
    asked, left = threading.Event(), threading.Event()

    def pass_on() -> None:
        asked.wait()
        while not left.is_set():
            try:
                if ray.is_initialized():
                    request_stop()
                    return
            except Exception as error:  # of Ray, which is busy or about to stop
                logger.warning("the request to stop could not be passed on, and is repeated: %s", error)
            left.wait(_POLL)

    before = signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    thread = threading.Thread(target=pass_on, name="stop-on-signal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
        left.set()
        asked.set()
        thread.join(timeout=10)


def request_stop() -> None:
    """Ask this Ray job's run to save after the current step and stop."""
    write_note("stop", "requested")


def stop_requested() -> bool:
    """Whether any process of this Ray job has called :func:`request_stop`."""
    return read_note("stop") is not None


class StopTime:
    """The most seconds that a run takes from a request to stop until its end.

    A request waits for the step or the validation that has just begun, for the step that has begun ahead, and then for
    a checkpoint. The estimate uses the longest of the last ``LAST`` steps, the longest validation and the longest
    checkpoint. Before the first checkpoint, a checkpoint counts as much as a step.

    Args:
        begins_ahead: whether the next step can begin before a step has ended.
    """

    def __init__(self, begins_ahead: bool = False) -> None:
        self._begins_ahead = begins_ahead
        self._steps: deque[float] = deque(maxlen=LAST)
        self._validation = self._checkpoint = 0.0
        self._has_warned = False

    def note(self, timing: Mapping[str, float]) -> None:
        """Add a step's ``timing_raw``, of which verl's part ``step`` holds ``save_checkpoint`` but not ``testing``."""
        saving = timing.get("save_checkpoint", 0.0)
        self._steps.append(timing.get("step", 0.0) - saving)
        self._validation = max(self._validation, timing.get("testing", 0.0))
        self._checkpoint = max(self._checkpoint, saving)

    @property
    def seconds(self) -> float:
        """The time needed; 0 before the first step has ended."""
        step = max(self._steps, default=0.0)
        return max(step, self._validation) + step * self._begins_ahead + (self._checkpoint or step)

    def publish(self) -> None:
        """Write the time needed, in whole seconds, into the file that the environment names, if it names one.

        A failure is a warning, because the run can go on. Later failures are silent: each step calls this.
        """
        if file := os.environ.get(FILE):
            try:
                write_text(Path(file), f"{math.ceil(self.seconds)}\n")
            except OSError as error:
                if not self._has_warned:
                    why = "a job may ask the run too late to stop"
                    logger.warning("%s cannot be written (%s): %s", file, error.strerror, why)
                self._has_warned = True
