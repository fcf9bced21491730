"""The workers of a run: verl's actors, engines and TransferQueue's parts among them."""

from __future__ import annotations

import contextlib
import json

import ray
from ray.util import list_named_actors

from verl_ext.driver import job_notes

OF_THE_QUEUE = "transfer_queue"  # the namespace that TransferQueue gives its controller
OF_A_SERVER = "server_"  # in the names of verl's rollout servers: vllm_server_0_0, sglang_server_reward_1_0
SHOWN = 3  # names in the error
ANSWER = 5.0  # seconds; a server that takes longer is busy, not lost


class WorkerLost(RuntimeError):
    """A worker of the run has died. The message names it and says how to go on."""


def note_workers() -> None:
    """Tell the driver which workers the run has: from now until :func:`forget_workers` none may die."""
    job_notes.write("workers", json.dumps(sorted(_alive())))


def forget_workers() -> None:
    """The run is at its end, and its workers may go."""
    job_notes.write("workers", "[]")


def check_workers() -> None:
    """Raise WorkerLost if one of the workers noted is gone, or its engine. Nothing starts it again, and verl may wait
    for it: for an engine, with the next weights in hand and no time-out."""
    names = json.loads(job_notes.read("workers") or "[]")
    if not names:
        return
    gone = sorted(set(names) - _alive()) or [f"{name} (its engine)" for name in _without_engine(names)]
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


def _without_engine(names: list[str]) -> list[str]:
    """The servers that say that their engine has died. vLLM's do: it is a process of its own, which they outlive."""
    asked = {}
    for name in names:
        with contextlib.suppress(ValueError):  # not in the run's own namespace, or gone since
            if OF_A_SERVER in name:
                asked[ray.get_actor(name).__ray_call__.remote(_has_lost_its_engine)] = name
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER) if asked else ([], [])
    lost = []
    for answer in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # a server that goes meanwhile is seen at the next look
            if ray.get(answer):
                lost.append(asked[answer])
    return sorted(lost)


def _has_lost_its_engine(server: object) -> bool:
    """Asked in the server's process: what vLLM's ``/health`` looks at."""
    return bool(getattr(getattr(server, "engine", None), "errored", False))
