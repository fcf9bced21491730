"""TransferQueue is one for a whole Ray cluster, and belongs to one run at a time."""

from __future__ import annotations

import time

from ray.util import list_named_actors

from verl_ext.driver.workers import OF_THE_QUEUE

QUEUE = {"name": "TransferQueueController", "namespace": OF_THE_QUEUE}
PATIENCE = 60.0  # seconds; the queue of a run that has crashed goes with the run, once Ray has noticed


class QueueTaken(RuntimeError):
    """Another run on this Ray cluster has the queue. The message says what to do."""


def await_queue(seconds: float = PATIENCE) -> None:
    """Wait until no run on this Ray cluster has a queue: one that finds a queue joins it, and clears what is in it.

    Two that look within the same second both find none, and share one.

    Raises:
        QueueTaken: there still is one after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while QUEUE in list_named_actors(all_namespaces=True):
        if time.monotonic() >= deadline:
            raise QueueTaken(
                "another run on this Ray cluster has its TransferQueue, which two runs cannot share: start this one "
                "when that has ended, or on a cluster of its own (+ray_kwargs.ray_init.address=local starts one)"
            )
        time.sleep(1)
