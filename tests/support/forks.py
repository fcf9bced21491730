"""A process with a fork server, as the driver of a run has."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from unittest import mock

from filelock import FileLock

from verl_ext.driver.cpu import fork_client
from verl_ext.launch import FIRST_JOB, FORKS

ROOT = Path(__file__).parents[2]
DRIVER = """
import logging, shutil, sys
logging.basicConfig()
sys.path.insert(0, sys.argv[1])
from verl_ext import launch
from verl_ext.driver.cpu import fork_server
if sys.argv[2] == "serve with Ray":
    launch.prepare_forks(sys.argv[3])
    fork_server.start(job=sys.argv[3])
else:
    fork_server.start(shared=["uuid"], modules=["numpy.random", "module_that_is_nowhere", ".TypeError", "fractions"])
if sys.argv[2] == "serve as Ray":
    with fork_server.starting_ray():
        print(sys.executable, flush=True)
        print(fork_server.command(), flush=True)
elif sys.argv[2] != "refuse":
    print(fork_server.command(), flush=True)
sys.stdin.read()
if sys.argv[4]:
    shutil.rmtree(sys.argv[4])
"""


# python -c RUN_MODULE <folders before the search path> <module> <arguments>: python -m, for a fork.
RUN_MODULE = """
import runpy, sys
sys.path[:0], module = sys.argv[1].split(":"), sys.argv[2]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# An executable like Python. Recipes, `verl_ext` and the programs that `ray start` starts are forks; `verl_ext` starts
# programs with this executable, too.
PYTHON = """#!/bin/bash
case "$1 $2" in
  "-m ray.scripts.scripts") exec {python} -c 'import sys; sys.executable = "{forks}"
{run_module}' {root} "${{@:2}}" ;;
  "-m verl_ext") SELF=$0 exec {forks} -c 'import os, sys; sys.executable = os.environ["SELF"]
{run_module}' {root} "${{@:2}}" ;;
  "-m recipe."*) exec env {environment} {forks} -c '{run_module}' {root} "${{@:2}}" ;;
  *) exec {python} "$@" ;;
esac
"""


@cache
def with_verl() -> Forks:
    """Forks that have imported verl and vLLM.

    All processes of pytest share one server. The server ends when the last of these processes has ended.
    """
    folder = Path(tempfile.gettempdir(), f"verl_ext_{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}")
    folder.mkdir(exist_ok=True)
    lifeline, server = folder / "lifeline", folder / "server"
    with FileLock(folder / "lock"):
        first = not lifeline.exists()
        if first:
            os.mkfifo(lifeline)
            stdin = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
        os.open(lifeline, os.O_WRONLY)  # stays open until this process ends
        if first:
            os.set_blocking(stdin, True)
            driver = Driver("serve with Ray", stdin=stdin, folder=str(folder))
            os.close(stdin)
            server.write_text(f"{driver.python}\n{driver.pid}")
    python, pid = server.read_text().splitlines()
    return Forks(python, int(pid))


class Forks:
    """``python`` is the executable that starts forks, and ``pid`` the process that has the servers."""

    def __init__(self, python: str, pid: int):
        self.python, self.pid = python, pid

    def as_python(self, file: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Path:
        """Write an executable like Python, which starts recipes as forks with these variables: see ``PYTHON``."""
        variables = shlex.join(map("=".join, environment.items()))
        parts = {"python": sys.executable, "forks": self.python, "root": ROOT, "run_module": RUN_MODULE}
        file.write_text(PYTHON.format(environment=variables, **parts))
        file.chmod(0o755)
        return file

    def of_a_training(self) -> dict[str, str]:
        """Environment variables with which a training starts a fork server (:func:`verl_ext.launch.prepare_forks`)."""
        return dict(zip(FORKS, (FIRST_JOB, str(self.pid)), strict=True))

    def starting_ray(self) -> AbstractContextManager:
        """While this context lasts, a Ray that this process starts has forks as its programs.

        Workers of the first job are forks, too.
        """
        return mock.patch.object(sys, "executable", self.python)

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess:
        """``python`` with these arguments, as :func:`subprocess.run` does it."""
        return subprocess.run(
            [self.python, *arguments], capture_output=True, text=True, timeout=60, **({"cwd": "/"} | options)
        )


class Driver(Forks):
    """Starts a process with a fork server, which ends at the end of its ``stdin``; ``close`` ends it all.

    Args:
        mode: "serve", "serve with Ray" and all that a run imports, "serve as Ray" starts its own programs, or "refuse".
        job: Ray's number of the job whose workers are forks.
        stdin: an open file; by default a pipe, which ``close`` closes.
        folder: removed at the end.
    """

    def __init__(
        self, mode: str = "serve", job: str = fork_client.FIRST_JOB, stdin: int = subprocess.PIPE, folder: str = ""
    ):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(ROOT), mode, job, folder],
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OF_THE_DRIVER": "1"},
        )
        super().__init__(self.process.stdout.readline().strip() if mode != "refuse" else "", self.process.pid)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
