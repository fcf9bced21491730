"""One TransferQueue for a whole Ray cluster: on a real cluster, and after a run crashes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

from verl_ext.driver.cluster import await_queue
from verl_ext.errors import RunError

pytestmark = pytest.mark.ray

RUN = """
import sys, time
import ray, transfer_queue as tq
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
    address = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False).address_info[
        "address"
    ]
    root = pytestconfig.rootpath
    first = subprocess.Popen(
        [sys.executable, "-c", RUN, address],
        env={**os.environ, "PYTHONPATH": f"{root}:{root}/tests"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        await_queue(seconds=0)
        assert any("has the queue" in line for line in first.stdout)
        with pytest.raises(RunError, match="another run on this Ray cluster .* or on a separate cluster"):
            await_queue(seconds=1)
        first.kill()
        first.wait()
        await_queue()
    finally:
        first.kill()
        ray.shutdown()
