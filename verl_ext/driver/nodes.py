"""The nodes a run trains on. Losing one ends it: verl cannot go on with a part of its workers."""

from __future__ import annotations

import time
from collections.abc import Iterable

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

INTERVAL = 5.0  # seconds between two looks
NOTICE = 60.0  # seconds within which Ray notices that a node is gone (by default 3 s x 5 failures, and time-outs)


class NodeLost(RuntimeError):
    """A node of the run has left the Ray cluster. The message names it and says how to go on."""


class Nodes:
    """The nodes that hold the placement groups of a run.

    Without looking at them, a step whose rollouts were on the lost node would wait for rollout_driver.stall_timeout.
    Nodes of the cluster that the run does not use may come and go.
    """

    def __init__(self, groups: Iterable[PlacementGroup]):
        self.ids = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
        self._next_look = time.monotonic() + INTERVAL

    def lost(self) -> list[str]:
        """Names of those that are gone."""
        return sorted(
            f"{node['NodeName']} ({node['NodeID'][:8]})"
            for node in ray.nodes()
            if node["NodeID"] in self.ids and not node["Alive"]
        )

    def check(self) -> None:
        """Raise NodeLost if one is gone; looks every INTERVAL seconds only, so it may be called at any rate."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + INTERVAL
            self._raise_if_lost()

    def explain(self, error: Exception) -> None:
        """Raise NodeLost from ``error`` if it is what a lost node has led to."""
        if isinstance(error, NodeLost):
            return
        deadline = time.monotonic() + (NOTICE if isinstance(error, ray.exceptions.RayError) else 0)
        while True:
            try:
                self._raise_if_lost()
            except NodeLost as lost:
                raise lost from error
            if time.monotonic() >= deadline:
                return
            time.sleep(1)

    def _raise_if_lost(self) -> None:
        if lost := self.lost():
            raise NodeLost(
                f"the run has lost {len(lost)} of its {len(self.ids)} nodes: {', '.join(lost)}; start the same command "
                "again on a whole cluster, and it goes on from the last checkpoint"
            )
