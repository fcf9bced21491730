"""Ends a run that has lost a node or a worker: verl cannot go on with a part of them."""

from __future__ import annotations

import signal
import threading
import time

import ray

from verl_ext.driver.nodes import NodeLost, check_nodes
from verl_ext.driver.workers import WorkerLost, check_workers

INTERVAL = 5.0  # seconds between two looks
NOTICE = 30.0  # seconds within which Ray notices that a node is gone, after a worker on it is


class Watch:
    """While inside, a loss raises NodeLost or WorkerLost in the main thread, which waits for the run.

    The run itself cannot be relied on to notice: TransferQueue, for one, waits without a time-out for a part of it that
    has died. SIGUSR2 to the own process is how one thread interrupts another's call to Ray.
    """

    def __init__(self):
        self._left = threading.Event()
        self._lost: NodeLost | WorkerLost | None = None
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._before = signal.signal(signal.SIGUSR2, self._interrupt)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._left.set()
        self._thread.join(timeout=10)
        signal.signal(signal.SIGUSR2, self._before)
        if kind is KeyboardInterrupt and self._lost is not None:
            raise self._lost from None

    def explain(self, error: Exception) -> None:
        """Raise NodeLost from ``error`` if a lost node is what has led to it."""
        self._left.set()  # from here on, what goes is taken down by the run's end
        patient = isinstance(error, (ray.exceptions.RayActorError, WorkerLost))
        if (lost := lost_node(NOTICE if patient else 0, threading.Event())) is not None:
            raise lost from error

    def _look(self) -> None:
        while not self._left.wait(INTERVAL):
            if ray.is_initialized() and (lost := self._loss()):
                self._lost = lost
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                return

    def _loss(self) -> NodeLost | WorkerLost | None:
        try:
            check_workers()
        except WorkerLost as lost:
            return lost_node(NOTICE, self._left) or (None if self._left.is_set() else lost)
        return lost_node(0, self._left)

    def _interrupt(self, *_) -> None:
        if self._lost is not None and not self._left.is_set():
            raise KeyboardInterrupt  # of all exceptions, the one that a waiting ray.get lets through


def lost_node(seconds: float, enough: threading.Event) -> NodeLost | None:
    """The lost node, if Ray notices one within ``seconds``, or until it is ``enough``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            check_nodes()
        except NodeLost as lost:
            return lost
        if time.monotonic() >= deadline or enough.wait(1):
            return None
