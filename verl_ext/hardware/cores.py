"""The cores that a run holds in Ray. On too few cores, verl 0.9.1 waits for ever for its pools of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OF_POOL = 3  # cores for each GPU of the training, or of a reward model's or the teachers' pool: max_colocate_count
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


def lack_of_cores(nodes: Sequence[Node], pools: Sequence[tuple[int, int]], engines: int, units: int) -> str | None:
    """Why a run cannot start on the cores that Ray has, as a sentence; None if it may start, or if GPUs are missing.

    The cores are a lower bound on several nodes, where Ray chooses the nodes of the engines and of the driver.

    Args:
        nodes: all nodes in Ray.
        pools: nodes, and GPUs of each node: the training's, and the own pools of a reward model and of teachers.
        engines: GPUs of separate engines.
        units: storage units of TransferQueue, which spreads them over all nodes, with a core for each.
    """
    unit = units // max(1, len(nodes))
    needed = OF_POOL * sum(count * gpus for count, gpus in pools) + OF_ENGINES * engines + units + OF_DRIVER
    if not _may_hold([node.gpus for node in nodes], pools):  # verl says so
        return None
    there = ", ".join(f"{node.name} with {node.cores:g}" for node in sorted(nodes))
    with_cores = [min(node.gpus, max(0, node.cores - unit) // OF_POOL) for node in nodes]
    if any(node.cores < unit for node in nodes):
        return (
            f"TransferQueue's storage units need cores on every node in Ray ({unit} each), and Ray has {there}: give "
            f"the nodes more, use fewer units ({STORAGE}.num_data_storage_units), or name a custom resource that only "
            f"nodes with cores have (+{STORAGE}.required_node_resource)"
        )
    if _may_hold(with_cores, pools) and sum(node.cores for node in nodes) >= needed:
        return None
    gpus = max(of_node for _, of_node in pools)
    count = sum(nodes_of for nodes_of, of_node in pools if of_node == gpus)
    least = OF_POOL * gpus + unit
    on_nodes = f"each of {count} nodes" if count > 1 else "one node"
    return (
        f"the run needs {needed} cores in Ray, at least {least} of them on {on_nodes} with {gpus} GPUs, and "
        f"Ray has {there}: ask for more (--cpus-per-task of Slurm, --num-cpus of ray start, or "
        f"ray_kwargs.ray_init.num_cpus), or use fewer storage units ({STORAGE}.num_data_storage_units)"
    )


def _may_hold(free: Sequence[float], pools: Sequence[tuple[int, int]]) -> bool:
    """Whether nodes with so many GPUs free may hold all pools. False is certain; true is certain if sizes divide."""
    return all(
        sum(node // gpus for node in free) >= sum(count * (other // gpus) for count, other in pools)
        for _, gpus in pools
        if gpus > 0  # verl refuses a pool of teachers without GPUs
    )
