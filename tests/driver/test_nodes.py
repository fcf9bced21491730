"""Losing a node, on a real Ray cluster of three."""

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from verl_ext.driver import nodes
from verl_ext.driver.nodes import NodeLost, Nodes


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": "head"})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_only_nodes_of_the_run_matter_and_what_they_lead_to_is_explained(cluster, monkeypatch):
    monkeypatch.setattr(nodes, "INTERVAL", 0.0)
    ours = cluster.add_node(num_cpus=1, resources={"ours": 1}, node_name="ours")
    other = cluster.add_node(num_cpus=1, node_name="other")
    group = placement_group([{"ours": 1}])
    ray.get(group.ready(), timeout=60)
    run = Nodes([group])
    assert len(run.ids) == 1
    cluster.remove_node(other)
    run.check()
    error = ValueError("of another kind")
    run.explain(error)
    cluster.remove_node(ours)
    with pytest.raises(NodeLost, match=r"lost 1 of its 1 nodes: ours \(\w{8}\); start the same command"):
        run.check()
    with pytest.raises(NodeLost, match="ours") as lost:
        run.explain(error)
    assert lost.value.__cause__ is error
