"""A small Ray program to run under Slurm. The program needs every node, and stops on the same signal as a training.

For each tick, the program appends a line to the file named by the first argument. A restarted program continues where
the file ends. The second argument is the number of ticks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ray

from verl_ext.driver.stop import stop_on_signal, stop_requested
from verl_ext.errors import EXIT_STOPPED


@ray.remote(num_gpus=1)
def node() -> str:
    time.sleep(0.5)  # so one node cannot run the tasks of two
    return ray.get_runtime_context().get_node_id()


def main(path: Path, ticks: int) -> int:
    ray.init()
    alive = [entry["NodeID"] for entry in ray.nodes() if entry["Alive"]]
    assert sorted(ray.get([node.remote() for _ in alive])) == sorted(alive)
    done = len(path.read_text().split()) if path.exists() else 0
    for tick in range(done, ticks):
        with path.open("a") as file:
            file.write(f"{tick}/{len(alive)}\n")
        time.sleep(0.1)
        if stop_requested():
            return EXIT_STOPPED
    return 0


if __name__ == "__main__":
    with stop_on_signal():
        raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
