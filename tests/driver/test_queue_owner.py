"""One TransferQueue for a whole Ray cluster: on a real cluster, and after a run crashes."""

from __future__ import annotations

import subprocess

import pytest
import ray
from ray.cluster_utils import Cluster
from support.forks import with_verl

from verl_ext.driver.cluster import await_queue
from verl_ext.errors import RunError

pytestmark = pytest.mark.ray

RUN = """
import sys, time
import ray, transfer_queue as tq
sys.path.insert(0, sys.argv[2])
from support.configs import compose

ray.init(address=sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=1)
class Run:  # as verl's task runner
    def start(self, config):
        tq.init(config)

run = Run.remote()
ray.get(run.start.remote(compose("grpo").transfer_queue))
print("has the queue", flush=True)
time.sleep(3600)
"""


def test_a_queue_belongs_to_one_run_and_goes_with_it(pytestconfig):
    forks = with_verl()
    with forks.starting_ray():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    run = [forks.python, "-c", RUN, cluster.address, str(pytestconfig.rootpath / "tests")]
    first = subprocess.Popen(run, stdout=subprocess.PIPE, text=True)
    try:
        assert any("has the queue" in line for line in first.stdout)
        ray.init(address=cluster.address, log_to_driver=False)
        with pytest.raises(RunError, match="another run on this Ray cluster .* or on a separate cluster"):
            await_queue(seconds=1)
        first.kill()
        first.wait()
        await_queue()
        await_queue(seconds=0)
    finally:
        first.kill()
        ray.shutdown()
        cluster.shutdown()
