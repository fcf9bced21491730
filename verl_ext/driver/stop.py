"""SIGUSR1: save after the current step and stop. The same command resumes the run later."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.driver.cluster import read_note, write_note

EXIT_STOPPED = 75  # sysexits.h: "temporary failure; the user is invited to try again later"
_POLL = 0.5  # seconds

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was asked to stop and has saved a checkpoint before its last step."""


@contextmanager
def stop_on_signal() -> Iterator[None]:
    """Context in which SIGUSR1 to this process, the driver's, asks the training to stop early.

    The training may run on another node, so the request goes through Ray. A thread sends it as soon as Ray is there: a
    signal may arrive in the middle of any call to Ray.
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
    write_note("stop", "requested")


def stop_requested() -> bool:
    """Whether any process of this Ray job has called :func:`request_stop`."""
    return read_note("stop") is not None


class StoppableTrainer(PPOTrainer):
    """Saves a checkpoint and ends when asked to, whatever verl's ``save_freq`` and ``total_training_steps`` say.

    The checkpoint holds buffered and unfinished rollouts, as any other: the policy is not told that the run ends.
    """

    stopped_after: int | None = None  # the last step done, once the run is stopped
    _saved_step: int | None = None

    def stop(self, after: int) -> None:
        """Begin no step after step ``after``."""
        self.stopped_after = self.total_training_steps = after

    def on_step_end(self) -> None:
        if not self._is_to_stop():
            return super().on_step_end()
        self._save_and_stop()
        # Time is short, so the engines get no new weights, and validation would measure old ones.
        self.config.trainer.test_freq = -1

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self._is_to_stop():  # the request came after on_step_end: validation can take minutes
            self._save_and_stop()

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _is_to_stop(self) -> bool:
        return self.stopped_after is None and self.global_steps < self.total_training_steps and stop_requested()

    def _save_and_stop(self) -> None:
        logger.info("asked to stop: step %d is the last of this run", self.global_steps)
        if self._saved_step != self.global_steps:
            self._save_checkpoint()
        self.stop(after=self.global_steps)
