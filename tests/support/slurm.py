"""A real Slurm on this machine: Debian's packages, one controller and several slurmd on free ports, in a folder.

Without accounting and cgroups, this Slurm runs in a container and as any user. All jobs then belong to this user.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}  # states of a job
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # daemons; not on every user's path
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=600
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Missing programs."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


class Slurm:
    """A controller and ``nodes`` nodes, node1, node2, ..., that claim ``cpus`` CPUs and ``gpus`` GPUs each.

    Args:
        folder: an empty folder with a short path (a socket lies in it).
        affinity: tasks are bound to cores, as on most clusters. The CPUs must then exist.
    """

    def __init__(self, folder: Path, *, nodes: int = 2, cpus: int = 16, gpus: int = 1, affinity: bool = False):
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        host = socket.gethostname().split(".")[0]
        ports = free_ports(1 + nodes)
        names = [f"node{i + 1}" for i in range(nodes)]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4096 "
            f"Gres=gpu:{gpus} State=UNKNOWN"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        self.names = names
        self._write(
            "slurm.conf",
            CONFIGURATION.format(
                host=host,
                ports=ports,
                user=getpass.getuser(),
                folder=folder,
                first_job=random.randrange(1, 10**6),  # train.sbatch names a folder in /tmp by the job's number
                task="affinity" if affinity else "none",
                nodes="\n".join(lines),
            ),
        )
        for i in range(gpus):  # a file stands for each device: Slurm opens the path
            self._write(f"gpu{i}", "")
        self._write("gres.conf", f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "state").mkdir()
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf"}

    def __enter__(self) -> Slurm:
        munge = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        try:
            self._start("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *munge)
            self._wait(lambda: (self.folder / "munge.socket").exists(), "munged's socket")
            self._start("slurmctld", "-D", "-i")
            for name in self.names:
                self.start_node(name)
            self._wait(lambda: self.node_states() == ["idle"] * len(self.names), "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        if "slurmctld" in self._daemons:
            self.run("scancel", "--full", f"--user={getpass.getuser()}", check=False)
            deadline = time.monotonic() + 30
            while self.run("squeue", "-h", check=False) and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, name=name)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, **environment: str) -> str:
        """The output of a client program."""
        env = {**self.environment, **environment}
        result = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 or not check, f"{' '.join(command)}: {result.stderr}"
        return result.stdout.strip()

    def node_states(self) -> list[str]:
        return self.run("sinfo", "--Node", "--noheader", "--partition=main", "--format=%t", check=False).split()

    def submit(self, *arguments: str, cwd: Path, **environment: str) -> str:
        """``sbatch <arguments>``; returns the job's id."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environment)

    def job(self, identifier: str) -> dict[str, str]:
        """The fields of ``scontrol show job``: JobState, ExitCode, Restarts, ..."""
        words = self.run("scontrol", "show", "job", identifier).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_now(self, identifier: str) -> None:
        """Start a requeued job in some seconds; Slurm waits two minutes. At once, its nodes would still refuse the job,
        whose credential they have just revoked."""
        self.run("scontrol", "update", f"jobid={identifier}", "starttime=now+5")

    def kill(self, job: str, node: str) -> None:
        """SIGKILL for every process of the job on the node, as when the machine is switched off."""
        own = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": node}.items()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if own <= process.environ().items():
                    process.kill()

    def wait(self, condition: Callable[[], bool], what: str, timeout: float) -> None:
        self._wait(condition, what, timeout)

    def _start(self, program: str, *arguments: str, name: str | None = None) -> None:
        name = name or program
        with open(self.folder / f"{name}.out", "a") as log:
            command = [shutil.which(program, path=PATH), *arguments]
            self._daemons[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)

    def _wait(self, condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            for name, daemon in self._daemons.items():
                assert daemon.poll() is None, f"{name} ended:\n{(self.folder / f'{name}.out').read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s"
            time.sleep(0.1)

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


def free_ports(count: int) -> list[int]:
    """Free ports below 32768, since Linux gives the ports above to connections."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            with contextlib.suppress(OSError):  # in use
                sockets.append(socket.create_server(("", random.randrange(20000, 32768))))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
