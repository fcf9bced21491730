"""SIGUSR1: save after the current step and stop. The same command resumes the run later."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from verl_ext.driver.cluster import read_note, write_note

logger = logging.getLogger(__name__)

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
