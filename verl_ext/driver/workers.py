"""The workers of a run: verl's actors, engines and TransferQueue's parts among them."""

from __future__ import annotations

import json

import ray
from ray.util import list_named_actors

from verl_ext.driver import job_notes

OF_THE_QUEUE = "transfer_queue"  # the namespace that TransferQueue gives its controller
SHOWN = 3  # names in the error


class WorkerLost(RuntimeError):
    """A worker of the run has died. The message names it and says how to go on."""


def note_workers() -> None:
    """Tell the driver which workers the run has: from now until :func:`forget_workers` none may die."""
    job_notes.write("workers", json.dumps(sorted(_alive())))


def forget_workers() -> None:
    """The run is at its end, and its workers may go."""
    job_notes.write("workers", "[]")


def check_workers() -> None:
    """Raise WorkerLost if one of the workers noted is gone. Nothing starts it again, and verl may wait for it."""
    names = json.loads(job_notes.read("workers") or "[]")
    gone = sorted(set(names) - _alive()) if names else []
    if gone:
        more = f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
        raise WorkerLost(
            f"the run has lost {len(gone)} of its {len(names)} workers: {', '.join(gone[:SHOWN])}{more}; a worker that "
            "dies without an error of its own was often killed for memory; start the same command again, and it goes "
            "on from the last checkpoint"
        )


def _alive() -> set[str]:
    """verl names every actor that it starts."""
    namespaces = ray.get_runtime_context().namespace, OF_THE_QUEUE
    return {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] in namespaces}
