"""SIGUSR1: save after the current step and stop, to be started again with the same command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from verl_ext.driver import job_notes

EXIT_STOPPED = 75  # sysexits.h: "temporary failure; the user is invited to try again later"
_POLL = 0.5  # seconds


class Stopped(Exception):
    """The run was asked to stop and has saved; it is not at its end."""


@contextmanager
def stop_on_signal() -> Iterator[None]:
    """While inside, SIGUSR1 to this process, the driver's, asks the training for an early end.

    The training may run on another node, so the request goes through Ray. It is passed on from a thread, since a signal
    may come in the middle of any call to Ray, and as soon as Ray is there.
    """
    asked, left = threading.Event(), threading.Event()

    def pass_on() -> None:
        asked.wait()
        while not left.is_set() and not ray.is_initialized():
            left.wait(_POLL)
        if not left.is_set():
            request_stop()

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
    """Ask the training of this Ray job to save after the current step and stop."""
    job_notes.write("stop", "requested")


def stop_requested() -> bool:
    """Whether :func:`request_stop` was called, in any process of this Ray job."""
    return job_notes.read("stop") is not None
