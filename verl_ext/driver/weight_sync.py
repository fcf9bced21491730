"""Runs on one machine hand weights to their engines one at a time.

verl's actor binds, and its engine connects to, ``/tmp/rl-colocate-zmq-<Ray job>-replica-<n>-rank-<n>.sock``, after
removing what is there. The first job of every Ray is 01000000, so two runs on one machine, each with a Ray of its own,
have the same name: at the same moment, an engine would wait for ever, or load the other run's weights.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

PATIENCE = 1800.0  # seconds
SOCKETS = Path("/tmp")  # verl's, whatever TMPDIR says


class WeightsBlocked(RuntimeError):
    """Another run on this machine has not come to the end of its turn. The message names the lock."""


@contextlib.contextmanager
def turn(folder: Path | None = None, seconds: float = PATIENCE) -> Iterator[None]:
    """No other run of this user on this machine is in its turn; a run that dies ends its turn.

    Args:
        folder: of the lock; that of the sockets unless given.
        seconds: to wait at most.

    Raises:
        WeightsBlocked: another was in its turn all the time.
    """
    path = (folder or SOCKETS) / f"verl_ext_weights_{os.getuid()}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise WeightsBlocked(
            f"another run on this machine has been handing weights to its engines for {seconds:.0f} s (it holds "
            f"{path}): see whether it hangs, and start this one again when it has ended"
        ) from None
    try:
        yield
    finally:
        lock.release()


class WeightTurns(PPOTrainer):
    """Takes a turn wherever verl's trainers send weights."""

    def on_init_end(self) -> None:
        with turn():
            super().on_init_end()

    def on_validate_begin(self) -> None:  # separate_async may lend the actor's devices to a validation
        with turn():
            super().on_validate_begin()

    def on_step_end(self) -> None:
        with turn():
            super().on_step_end()
