"""Ray nodes on one machine, each from its own `ray start`, as on separate machines."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import ray.util

from support.slurm import free_ports

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class RayNodes:
    """A head and workers; each node claims 16 CPUs and a GPU.

    Attributes:
        environment: environment variables for a program that joins.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        ip = ray.util.get_node_ip_address()
        port, client = free_ports(2)
        self.address = f"{ip}:{port}"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._start_environment = {**os.environ, **token, "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment = {**self._start_environment, "RAY_ADDRESS": self.address}
        self._processes: dict[str, subprocess.Popen] = {}
        self._options = ["--head", f"--node-ip-address={ip}", f"--port={port}"]
        self._options += ["--include-dashboard=false", f"--ray-client-server-port={client}"]
        self._options += ['--system-config={"health_check_period_ms": 1000}']  # a loss is noticed in 5 s, not in 15

    def __enter__(self) -> RayNodes:
        self.start("head", *self._options)
        return self

    def __exit__(self, *_) -> None:
        for name in list(self._processes):
            self.kill(name)

    def start(self, name: str, *options: str) -> None:
        """Start a node and wait until the node is up; without ``options``, a worker."""
        ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        command = [*RAY, "start", "--block", f"--node-name={name}", "--num-cpus=16", "--num-gpus=1", *ports]
        command += [f"--temp-dir={self.folder}/{name}", *(options or [f"--address={self.address}"])]
        log = self.folder / f"{name}.log"
        for _ in range(3):  # on a busy machine Ray gives up on its own processes
            with open(log, "w") as output:
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=self._start_environment
                )
            self._processes[name] = process
            while process.poll() is None:
                if "--block" in log.read_text():
                    return
                time.sleep(0.2)
        raise AssertionError(f"{name} did not start:\n{log.read_text()[-3000:]}")

    def kill(self, name: str) -> None:
        """As when the machine is switched off: SIGKILL for everything on the node."""
        node = self._processes.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        node.wait()
