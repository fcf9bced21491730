"""The cores that a run holds in Ray. On too few cores, verl 0.9.1 waits for ever for its pools of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OF_TRAINING = 3  # cores for each GPU of the training: max_colocate_count of verl's ResourcePoolManager
OF_ENGINES = 2  # cores for each GPU of separate engines: max_colocate_count in verl's RolloutReplica
OF_DRIVER = 2  # cores of the task runner and of TransferQueue's controller
STORAGE = "transfer_queue.backend.SimpleStorage"


class Node(NamedTuple):
    """A node's name, and the GPUs (on the CPU, slots) and cores that Ray has there."""

    name: str
    gpus: float
    cores: float


def to_nodes(answer: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The nodes that are alive in the answer of ``ray.nodes()``."""
    alive = [(node["NodeName"], node["Resources"]) for node in answer if node["Alive"]]
    return [Node(name, there.get("GPU", 0), there.get("CPU", 0)) for name, there in alive]


def lack_of_cores(nodes: Sequence[Node], training: tuple[int, int], engines: int, units: int) -> str | None:
    """Why a run cannot start on the cores that Ray has, as a sentence; None if it may start, or if GPUs are missing.

    The cores are a lower bound on several nodes, where Ray chooses the nodes of the engines and of the driver.

    Args:
        nodes: all nodes in Ray.
        training: nodes, and GPUs of each node.
        engines: GPUs of separate engines.
        units: storage units of TransferQueue, which spreads them over all nodes, with a core for each.
    """
    count, gpus = training
    of_node, unit = OF_TRAINING * gpus, units // max(1, len(nodes))
    needed = of_node * count + OF_ENGINES * engines + units + OF_DRIVER
    if sum(node.gpus // gpus for node in nodes) < count:  # verl says so
        return None
    places = sum(min(node.gpus // gpus, max(0, node.cores - unit) // of_node) for node in nodes)
    there = ", ".join(f"{node.name} with {node.cores:g}" for node in sorted(nodes))
    if any(node.cores < unit for node in nodes):
        return (
            f"TransferQueue's storage units need cores on every node in Ray ({unit} each), and Ray has {there}: give "
            f"the nodes more, use fewer units ({STORAGE}.num_data_storage_units), or name a custom resource that only "
            f"nodes with cores have (+{STORAGE}.required_node_resource)"
        )
    if places >= count and sum(node.cores for node in nodes) >= needed:
        return None
    on_nodes = f"each of {count} nodes" if count > 1 else "one node"
    return (
        f"the run needs {needed} cores in Ray, at least {of_node + unit} of them on {on_nodes} with {gpus} GPUs, and "
        f"Ray has {there}: ask for more (--cpus-per-task of Slurm, --num-cpus of ray start, or "
        f"ray_kwargs.ray_init.num_cpus), or use fewer storage units ({STORAGE}.num_data_storage_units)"
    )
