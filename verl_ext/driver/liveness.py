"""Finds lost nodes and workers of a run. verl needs every node and worker, and may wait forever for a
lost node or worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Iterable

import ray
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group_table

from verl_ext.driver.cluster import QUEUE_NAMESPACE, read_note, write_note
from verl_ext.errors import EveryRolloutFailed, RunError

logger = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between two checks
NOTICE = 30.0  # seconds; after the loss of a worker, Ray may take this long to notice the loss of the node
ANSWER = 5.0  # seconds; a server with a slower answer is busy, not lost
SERVER = "server_"  # in the names of verl's rollout servers: vllm_server_0_0, sglang_server_reward_1_0
SHOWN = 3  # names in an error


class NodeLost(RunError):
    """A node of the run has left the Ray cluster."""


class WorkerLost(RunError):
    """A worker of the run, or the engine of a rollout server, has died."""


# ---- nodes ----


def note_nodes(groups: Iterable[PlacementGroup]) -> None:
    """Record the nodes with workers of the run. Other nodes of the cluster may come and go."""
    ids = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
    write_note("nodes", json.dumps(sorted(ids)))


def check_nodes() -> None:
    """Raise NodeLost if a recorded node is gone."""
    ids = json.loads(read_note("nodes") or "[]")
    gone = [node for node in ray.nodes() if node["NodeID"] in ids and not node["Alive"]]
    if gone:
        names = ", ".join(sorted(f"{node['NodeName']} ({node['NodeID'][:8]})" for node in gone))
        raise NodeLost(
            f"the run has lost {len(gone)} of its {len(ids)} nodes: {names}; start the same command again on a whole "
            "cluster, and the run resumes from the last checkpoint"
        )


def await_lost_node(seconds: float, enough: threading.Event) -> NodeLost | None:
    """The lost node, if Ray notices a loss within ``seconds`` and before ``enough`` is set; otherwise None.

    With a cluster of one node there is no wait: the loss of this node would have ended the driver.
    """
    deadline = time.monotonic() + (seconds if len(ray.nodes()) > 1 else 0)
    while True:
        try:
            check_nodes()
        except NodeLost as lost:
            return lost
        if time.monotonic() >= deadline or enough.wait(1):
            return None


# ---- workers: verl's actors, engines and TransferQueue's actors ----


def note_workers() -> None:
    """Record the names of the run's actors. :func:`check_workers` reports any actors lost before
    :func:`forget_workers`."""
    write_note("workers", json.dumps(sorted(_alive())))


def forget_workers() -> None:
    """The run has ended: its workers may stop."""
    write_note("workers", "[]")


def check_workers() -> None:
    """Raise WorkerLost if a recorded worker, or an engine that :class:`EngineWatch` asks for, is gone.

    Nothing restarts a lost worker, and verl may wait for the worker forever: verl sends new weights to an engine
    without a time-out.
    """
    names = _noted("workers")
    if not names:
        return
    gone = sorted(set(names) - _alive()) or [f"{name} (its engine)" for name in _noted("engines")]
    if gone:
        more = f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
        raise WorkerLost(
            f"the run has lost {len(gone)} of its {len(names)} workers: {', '.join(gone[:SHOWN])}{more}; a worker that "
            "dies without an error of its own was often killed for memory; start the same command again, and the "
            "run resumes from the last checkpoint"
        )


def _alive() -> set[str]:
    """Names of the run's living actors; verl gives every actor a name."""
    namespaces = ray.get_runtime_context().namespace, QUEUE_NAMESPACE
    return {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] in namespaces}


def _noted(kind: str) -> list[str]:
    return json.loads(read_note(kind) or "[]")


class EngineWatch:
    """Within this context, a thread records the rollout servers whose engine has died, for :func:`check_workers`.

    vLLM's engine is another process than the server, and the server outlives the engine. The thread belongs to the task
    runner, which has imported the servers' class. In the driver, the handle of a server would make Ray import vLLM.
    """

    def __init__(self):
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._look, name="engines", daemon=True)

    def __enter__(self) -> EngineWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._left.set()
        self._thread.join(timeout=2 * ANSWER)
        if kind is not None:  # perhaps because of an engine that has just died
            self._ask()

    def _look(self) -> None:
        while not self._left.wait(INTERVAL):
            self._ask()

    def _ask(self) -> None:
        try:
            if lost := _without_engine(_noted("workers")):
                write_note("engines", json.dumps(lost))
        except Exception as error:  # Ray could not answer, which says nothing of the run
            logger.warning("the run's engines could not be checked: %s", error)


def _without_engine(names: list[str]) -> list[str]:
    """Rollout servers with a dead engine."""
    asked = {}
    for name in names:
        with contextlib.suppress(ValueError):  # in another namespace, or gone by now
            if SERVER in name:
                asked[ray.get_actor(name).__ray_call__.remote(_has_lost_its_engine)] = name
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER) if asked else ([], [])
    lost = []
    for answer in answered:
        with contextlib.suppress(ray.exceptions.RayError):  # if a server dies meanwhile, the next check sees the loss
            if ray.get(answer):
                lost.append(asked[answer])
    return sorted(lost)


def _has_lost_its_engine(server: object) -> bool:
    """Runs in the server's process, and reads the flag behind vLLM's ``/health``."""
    return bool(getattr(getattr(server, "engine", None), "errored", False))


# ---- the watch ----


class Watch:
    """Within this context, a loss raises NodeLost or WorkerLost in the main thread, where the driver waits for the run.

    The run itself may not notice a loss: TransferQueue, for example, waits for its dead parts without a time-out. A
    watching thread checks nodes and workers, and interrupts the main thread's call to Ray with SIGUSR2.
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
        """Raise NodeLost from ``error`` if a lost node caused ``error``."""
        self._left.set()  # from now on, lost workers are expected: the run stops them
        if not ray.is_initialized():
            return  # Ray has not started, and a question would start it
        # If the lost node held the load balancer, all rollouts fail before Ray notices the loss.
        of_a_loss = isinstance(error, (ray.exceptions.RayActorError, WorkerLost, EveryRolloutFailed))
        if (lost := await_lost_node(NOTICE if of_a_loss else 0, threading.Event())) is not None:
            raise lost from error

    def _look(self) -> None:
        while not self._left.wait(INTERVAL):
            try:
                self._lost = self._loss() if ray.is_initialized() else None
            except Exception as error:  # Ray could not answer, which says nothing of the run
                logger.warning("the run's nodes and workers could not be checked: %s", error)
            if self._lost is not None:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                return

    def _loss(self) -> NodeLost | WorkerLost | None:
        try:
            check_workers()
        except WorkerLost as lost:
            return await_lost_node(NOTICE, self._left) or (None if self._left.is_set() else lost)
        return await_lost_node(0, self._left)

    def _interrupt(self, *_) -> None:
        if self._lost is not None and not self._left.is_set():
            raise KeyboardInterrupt  # a waiting ray.get lets only this exception through
