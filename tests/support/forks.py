"""A process with a fork server, as the driver of a run has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = """
import logging, sys
logging.basicConfig()
sys.path.insert(0, sys.argv[1])
from verl_ext import launch
from verl_ext.driver.cpu import fork_server
if sys.argv[2] == "serve with Ray":
    launch.prepare_forks()
    fork_server.start()
else:
    fork_server.start(shared=["uuid"], modules=["numpy.random", "module_that_is_nowhere", "fractions"])
if sys.argv[2] != "refuse":
    print(fork_server.command(), flush=True)
sys.stdin.read()
"""


class Driver:
    """Starts the process; ``python`` is the executable of its server's forks. ``end`` waits for the process.

    Args:
        mode: "serve", "serve with Ray" and all that a run imports, or "refuse".
    """

    def __init__(self, mode: str = "serve"):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(ROOT), mode],
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

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
