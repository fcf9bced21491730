"""The cores that verl's pools, TransferQueue and the driver hold."""

from __future__ import annotations

import pytest

from verl_ext.hardware.cores import OF_ENGINES, OF_POOL, Node, lack_of_cores


def nodes(*gpus_and_cores: tuple[int, int]) -> list[Node]:
    """Nodes of one name, as Ray names several nodes of one address."""
    return [Node("10.0.0.1", gpus, cores) for gpus, cores in gpus_and_cores]


@pytest.mark.parametrize(
    ("pools", "engines", "units", "enough", "too_few"),
    [
        ([(1, 8)], 0, 8, [(8, 34)], [(8, 33)]),
        ([(1, 1)], 0, 1, [(1, 6)], [(1, 5)]),  # the CPU profile, which tells Ray of 16 cores
        ([(1, 4)], 0, 1, [(4, 16)], [(4, 14)]),
        ([(1, 4)], 4, 8, [(8, 30)], [(8, 29)]),  # separate engines on the same node
        ([(2, 8)], 0, 8, [(8, 30), (8, 28)], [(8, 29), (8, 28)]),  # 4 of the 8 units and 24 cores on each, 2 anywhere
        ([(2, 8)], 0, 8, [(8, 28), (8, 28), (0, 8)], [(8, 60), (8, 25), (0, 8)]),
        ([(2, 4)], 0, 8, [(8, 34)], [(8, 33)]),  # both pools fit on one node
        ([(1, 8)], 0, 8, [(0, 4), (8, 30)], [(0, 3), (8, 64)]),  # a head without GPUs has 4 units
        ([(1, 8)], 0, 0, [(0, 0), (8, 26)], [(0, 0), (8, 25)]),  # a head without units
        ([(1, 8), (1, 8)], 0, 8, [(8, 28), (8, 30)], [(8, 28), (8, 29)]),  # a reward model on the other node
        ([(1, 8), (1, 8)], 0, 0, [(8, 24), (8, 99)], [(8, 23), (8, 99)]),
        ([(1, 4), (1, 4)], 0, 8, [(8, 34)], [(8, 33)]),
        ([(1, 8), (2, 4)], 0, 0, [(8, 24), (8, 26)], [(8, 64), (4, 12), (4, 11)]),
        ([(1, 4), (1, 0)], 0, 1, [(4, 15)], [(4, 14)]),  # teachers without GPUs, which verl refuses
    ],
)
def test_fewer_cores_than_a_run_holds_are_refused_and_no_more(pools, engines, units, enough, too_few):
    assert lack_of_cores(nodes(*enough), pools, engines, units) is None
    assert lack_of_cores(nodes(*too_few), pools, engines, units) is not None


def test_the_sentence_names_the_nodes_and_the_remedy():
    assert lack_of_cores([Node("node2", 8, 32), Node("node1", 8, 16)], [(2, 8)], 0, 8) == (
        "the run needs 58 cores in Ray, at least 28 of them on each of 2 nodes with 8 GPUs, and Ray has node1 with 16, "
        "node2 with 32: ask for more (--cpus-per-task of Slurm, --num-cpus of ray start, or "
        "ray_kwargs.ray_init.num_cpus), or use fewer storage units "
        "(transfer_queue.backend.SimpleStorage.num_data_storage_units)"
    )
    assert lack_of_cores([Node("head", 0, 0), Node("node1", 8, 64)], [(1, 8)], 0, 8) == (
        "TransferQueue's storage units need cores on every node in Ray (4 each), and Ray has head with 0, node1 with "
        "64: give the nodes more, use fewer units (transfer_queue.backend.SimpleStorage.num_data_storage_units), or "
        "name a custom resource that only nodes with cores have "
        "(+transfer_queue.backend.SimpleStorage.required_node_resource)"
    )


def test_the_sentence_names_the_largest_pool():
    sentence = lack_of_cores([Node("a", 8, 28), Node("b", 8, 17)], [(1, 4), (1, 8)], 0, 8)
    assert sentence.startswith("the run needs 46 cores in Ray, at least 28 of them on one node with 8 GPUs, and Ray ")
    sentence = lack_of_cores([Node("a", 8, 40), Node("b", 8, 20)], [(1, 8), (1, 8)], 0, 8)
    assert ", at least 28 of them on each of 2 nodes with 8 GPUs, and Ray " in sentence  # two pools of this size


def test_missing_gpus_are_left_to_verl():
    assert lack_of_cores(nodes((4, 1)), [(1, 8)], 0, 8) is None


def test_the_numbers_are_verls():
    """verl's engines have a pool of their own with a number in the source."""
    import inspect

    from verl.single_controller.ray.base import ResourcePoolManager
    from verl.workers.rollout.replica import RolloutReplica

    assert ResourcePoolManager.max_colocate_count == OF_POOL
    assert f"max_colocate_count={OF_ENGINES}," in inspect.getsource(RolloutReplica.init_standalone)
