"""The nodes a run trains on. Losing one ends it: verl cannot go on with a part of its workers."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterable

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from verl_ext.driver import job_notes

INTERVAL = 5.0  # seconds between two looks
NOTICE = 30.0  # seconds within which Ray notices that a node is gone, after an actor on it is


class NodeLost(RuntimeError):
    """A node of the run has left the Ray cluster. The message names it and says how to go on."""


def note_nodes(groups: Iterable[PlacementGroup]) -> None:
    """Tell the driver on which nodes the run has its workers. Other nodes of the cluster may come and go."""
    ids = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
    job_notes.write("nodes", json.dumps(sorted(ids)))


def check_nodes() -> None:
    """Raise NodeLost if one of the nodes noted is gone."""
    ids = json.loads(job_notes.read("nodes") or "[]")
    gone = [node for node in ray.nodes() if node["NodeID"] in ids and not node["Alive"]]
    if gone:
        names = ", ".join(sorted(f"{node['NodeName']} ({node['NodeID'][:8]})" for node in gone))
        raise NodeLost(
            f"the run has lost {len(gone)} of its {len(ids)} nodes: {names}; start the same command again on a whole "
            "cluster, and it goes on from the last checkpoint"
        )


class NodeWatch:
    """While inside, the loss of a node raises NodeLost in the main thread, which is the driver's and waits for the run.

    The run itself cannot be relied on to notice: TransferQueue, for one, waits without a time-out for a part of it that
    was on the node. SIGUSR2 to the own process is how one thread interrupts another's call to Ray.
    """

    def __init__(self):
        self._left = threading.Event()
        self._lost: NodeLost | None = None
        self._thread = threading.Thread(target=self._look, name="node-watch", daemon=True)

    def __enter__(self) -> NodeWatch:
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
        deadline = time.monotonic() + (NOTICE if isinstance(error, ray.exceptions.RayActorError) else 0)
        while not isinstance(error, NodeLost):
            try:
                check_nodes()
            except NodeLost as lost:
                raise lost from error
            if time.monotonic() >= deadline:
                return
            time.sleep(1)

    def _look(self) -> None:
        while not self._left.wait(INTERVAL):
            if not ray.is_initialized():
                continue
            try:
                check_nodes()
            except NodeLost as lost:
                self._lost = lost
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                return

    def _interrupt(self, *_) -> None:
        if self._lost is not None and not self._left.is_set():
            raise KeyboardInterrupt  # of all exceptions, the one that a waiting ray.get lets through
