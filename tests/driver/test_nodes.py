"""Losing a node, on a real Ray cluster of three."""

import time

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from verl_ext.driver import nodes
from verl_ext.driver.nodes import NodeLost, NodeWatch, check_nodes, note_nodes


@pytest.fixture
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "head"})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@ray.remote
def run_of_an_hour() -> None:
    time.sleep(3600)


def test_only_nodes_of_the_run_matter_and_losing_one_ends_the_wait_for_it(cluster, monkeypatch):
    monkeypatch.setattr(nodes, "INTERVAL", 0.2)
    ours = cluster.add_node(num_cpus=1, resources={"ours": 1}, node_name="ours")
    other = cluster.add_node(num_cpus=1, node_name="other")
    check_nodes()  # none is noted yet
    group = placement_group([{"ours": 1}])
    ray.get(group.ready(), timeout=60)
    note_nodes([group])
    cluster.remove_node(other)
    error = ValueError("of another kind")
    with NodeWatch() as watch:
        time.sleep(1)
        watch.explain(error)
    with pytest.raises(NodeLost, match=r"lost 1 of its 1 nodes: ours \(\w{8}\); start the same command"), NodeWatch():
        run = run_of_an_hour.remote()
        ours.kill_raylet()
        ray.get(run, timeout=120)
    with pytest.raises(NodeLost, match="ours") as lost:
        watch.explain(error)
    assert lost.value.__cause__ is error
