"""A process with a fork server, as the driver of a run has."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from verl_ext.driver.cpu import fork_client

ROOT = Path(__file__).parents[2]
DRIVER = """
import logging, sys
logging.basicConfig()
sys.path.insert(0, sys.argv[1])
from verl_ext import launch
from verl_ext.driver.cpu import fork_server
if sys.argv[2] == "serve with Ray":
    launch.prepare_forks(sys.argv[3])
    fork_server.start(job=sys.argv[3])
else:
    fork_server.start(shared=["uuid"], modules=["numpy.random", "module_that_is_nowhere", "fractions"])
if sys.argv[2] == "serve as Ray":
    with fork_server.starting_ray():
        print(sys.executable, flush=True)
        print(fork_server.command(), flush=True)
elif sys.argv[2] != "refuse":
    print(fork_server.command(), flush=True)
sys.stdin.read()
"""


# python -c RUN_MODULE <folders before the search path> <module> <arguments>: python -m, for a fork.
RUN_MODULE = """
import runpy, sys
sys.path[:0], module = sys.argv[1].split(":"), sys.argv[2]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@cache
def with_verl() -> Driver:
    """A process whose forks have imported verl and vLLM. Each process of pytest starts and ends one of its own."""
    return Driver("serve with Ray")


class Driver:
    """Starts a process with a fork server. ``python`` is the executable of the server's forks; ``close`` ends it all.

    Args:
        mode: "serve", "serve with Ray" and all that a run imports, "serve as Ray" starts its own programs, or "refuse".
        job: Ray's number of the job whose workers are forks.
    """

    def __init__(self, mode: str = "serve", job: str = fork_client.FIRST_JOB):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(ROOT), mode, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OF_THE_DRIVER": "1"},
        )
        self.python = self.process.stdout.readline().strip() if mode != "refuse" else ""

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess:
        """``python`` with these arguments, as :func:`subprocess.run` does it."""
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, timeout=60, **({"cwd": "/"} | options)
        )

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
