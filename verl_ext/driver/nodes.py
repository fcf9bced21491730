"""The nodes a run trains on."""

from __future__ import annotations

import json
from collections.abc import Iterable

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from verl_ext.driver import job_notes


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
