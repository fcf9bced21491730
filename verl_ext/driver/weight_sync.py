"""Runs on one machine take turns to hand weights to their engines.

verl's actor replaces the socket ``/tmp/rl-colocate-zmq-<Ray job>-replica-<n>-rank-<n>.sock``, and the engine connects
to this socket. The first job of every Ray cluster is 01000000, so two runs on one machine with separate Ray clusters
use the same socket. If both handed over weights at the same time, an engine would wait forever, or load the other run's
weights.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.errors import RunError

PATIENCE = 1800.0  # seconds
SOCKETS = Path("/tmp")  # verl's folder for sockets; verl ignores TMPDIR


@contextlib.contextmanager
def turn(folder: Path | None = None, seconds: float = PATIENCE) -> Iterator[None]:
    """Lock for all runs of this user on this machine. The lock of a killed run is released by the kernel.

    Args:
        folder: folder of the lock file; by default the folder of the sockets.
        seconds: longest wait.

    Raises:
        RunError: another run was inside for ``seconds``; the message names the lock file. Or verl could not replace a
            socket, on any node, since in /tmp only its owner and root can remove it; the message names the socket.
    """
    path = (folder or SOCKETS) / f"verl_ext_weights_{os.getuid()}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise RunError(
            f"another run on this machine has been handing weights to its engines for {seconds:.0f} s "
            f"(lock file {path}): check whether the other run hangs, and start this run again when the other has ended"
        ) from None
    try:
        yield
    except Exception as error:
        if left := re.search(r"Address already in use \(addr='ipc://([^']+)", str(error)):
            raise RunError(
                f"verl cannot replace the socket {left[1]}, which the run of another user has left or holds: its owner "
                "or root must remove this file, or start this run on another machine"
            ) from error
        raise
    finally:
        lock.release()


class WeightTurns(PPOTrainer):
    """Takes the :func:`turn` lock wherever verl's trainers send weights."""

    def on_init_end(self) -> None:
        with turn():
            super().on_init_end()

    def on_validate_begin(self) -> None:  # separate_async may lend the actor's devices to a validation
        with turn():
            super().on_validate_begin()

    def on_step_end(self) -> None:
        with turn():
            super().on_step_end()
