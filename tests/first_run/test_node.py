"""Each check of a node: its result on a good machine, and its sentence about a bad machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from verl_ext.errors import RunError
from verl_ext.first_run import devices, node
from verl_ext.first_run.made_up import CHAT_TEMPLATE, byte_tokenizer, write_model
from verl_ext.first_run.node import GB, NOTE, ON_CPU, ON_GPUS, Fault, Question, check_node
from verl_ext.first_run.place import Place

ROOT = Path(__file__).parents[2]


@pytest.fixture
def question(tmp_path) -> Question:
    (tmp_path / NOTE).write_text("here")
    write_model(tmp_path / "model")
    return Question(Place("cpu", 1, 1, str(tmp_path / "model")), tmp_path, "here", ON_CPU._replace(memory=0, disk=0))


def refused(check, question: Question) -> str:
    with pytest.raises(RunError) as fault:
        check(question)
    return str(fault.value)


def command(folder: Path, name: str, text: str, monkeypatch) -> None:
    """A stand-in for a command, first on the path."""
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_this_machine_passes(question):
    found = check_node(question)
    assert {name: each.text for name, each in found.items() if not each.passed} == {}
    assert list(found) == [name for name in node.CHECKS if name not in ("driver", "caches", "C compiler")]
    assert found["devices talk"].text == "2 processes over gloo"
    assert "torch 2." in found["versions"].text and "verl 0.9.1" in found["versions"].text
    assert all(each.seconds >= 0 for each in found.values())


def test_a_check_that_raises_is_a_row_and_the_others_go_on(question, monkeypatch):
    def broken(_):
        raise OSError("no such\ndevice")

    monkeypatch.setattr(node, "CHECKS", {"broken": broken, "shared folder": node.shared_folder})
    found = check_node(question)
    assert found["broken"][:2] == (False, "OSError: no such device") and found["shared folder"].passed


def test_without_nvidia_smi(question, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(node.driver, question).endswith("install NVIDIA's driver, or set HARDWARE=cpu")


def test_a_driver_that_fails(question, tmp_path, monkeypatch):
    command(tmp_path, "nvidia-smi", "echo Failed to initialize NVML >&2; exit 9", monkeypatch)
    assert refused(node.driver, question).startswith("nvidia-smi finds no GPU (Failed to initialize NVML): ")


def test_the_driver_must_know_the_cuda_of_the_installation(question, tmp_path, monkeypatch):
    installer = (ROOT / "examples" / "install_gpu.sh").read_text()
    assert re.search(rf"^DRIVER={node.DRIVER}\b", installer, re.M)
    command(tmp_path, "nvidia-smi", "echo '81559, 575.57.08, NVIDIA H100 80GB HBM3'", monkeypatch)
    assert refused(node.driver, question).startswith("driver 575.57.08 is older than R580, the first for CUDA 13.0")
    command(tmp_path, "nvidia-smi", "echo '81559, 580.95.05, NVIDIA H100 80GB HBM3'", monkeypatch)
    assert node.driver(question) == "580.95.05"


def test_a_torch_without_cuda_is_named(question):
    on_gpus = replace(question, place=replace(question.place, hardware="h100"))
    sentence = refused(node.devices, on_gpus)
    assert re.fullmatch(r"torch \S+ is built without CUDA: bash examples/install_gpu.sh", sentence)


@pytest.mark.parametrize(("visible", "seen"), [("4,5", "4,5"), ("", "all"), (None, "all")])
def test_devices_talk_on_the_gpus_that_are_visible(question, visible, seen, tmp_path, monkeypatch):
    command(tmp_path, "python", "echo ${CUDA_VISIBLE_DEVICES-all} >&2; exit 1", monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)  # empty in a task of Ray
    assert refused(node.devices, replace(question, place=replace(question.place, hardware="h100"))) == seen


def test_ranks_that_do_not_answer_in_time(question, monkeypatch):
    monkeypatch.setattr(node, "SECONDS", 0.01)
    assert refused(node.devices, question) == (
        "the ranks had not exchanged a message after 0.01 s; "
        "NCCL_DEBUG=INFO python -m verl_ext.first_run.devices 2 --cpu shows more"
    )


def test_ranks_that_hang_are_killed(question, tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    command(tmp_path, "python", f"sleep 600 & echo $! >{pid}; wait", monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(node, "SECONDS", 2)
    assert refused(node.devices, question).startswith("the ranks had not exchanged a message after 2 s")
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(int(pid.read_text()))
        assert rank.status() == psutil.STATUS_ZOMBIE or rank.wait(10) is None


TORCH = """
device = str
class ones:
    def __init__(self, *_, **__): pass
    def __matmul__(self, _): return self
"""
GROUP = """
import time
def init_process_group(*_, rank, **__):
    if rank == 1:
        raise RuntimeError("CUDA error: uncorrectable ECC error")
    time.sleep(600)
"""


def test_the_error_of_a_rank_is_told_while_others_wait_for_it(question, tmp_path, monkeypatch):
    """With a stand-in for torch, whose first rank waits."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "distributed.py").write_text(GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(node, "SECONDS", 60)
    assert refused(node.devices, question) == "CUDA error: uncorrectable ECC error"


def test_a_message_that_does_not_come_from_all_ranks_is_an_error(monkeypatch):
    for name in ("init_process_group", "destroy_process_group", "all_reduce"):
        monkeypatch.setattr(devices.torch.distributed, name, lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="rank 0 computed 512 and received 1"):
        devices.rank(0, 2, "store", on_gpus=False)
    monkeypatch.setattr(devices.torch.distributed, "all_reduce", lambda message: message.fill_(3.0))
    assert devices.rank(0, 2, "store", on_gpus=False) == (0, "CPU", 0)


def test_a_gpu_with_less_memory_than_its_profile():
    answer = {"cuda": "13.0", "nccl": "2.28.9", "devices": [["NVIDIA H100 80GB HBM3", 84_900_000_000]] * 2}
    assert node.describe(answer, "h100") == "2 x NVIDIA H100 80GB HBM3, CUDA 13.0, NCCL 2.28.9"
    answer["devices"][1] = ["NVIDIA H100 MIG 3g.40gb", 42_000_000_000]
    with pytest.raises(
        Fault, match=r"GPU 1 \(NVIDIA H100 MIG 3g.40gb\) has 42.0 GB, and hardware=h100 computes with 84"
    ):
        node.describe(answer, "h100")


def test_too_little_shared_memory(question):
    assert ON_GPUS.shared_memory == 10 * GB
    small = replace(question, limits=ON_CPU._replace(shared_memory=10**15))
    assert re.match(
        r"/dev/shm has [\d.]+ GB, use 1e\+06 or more: docker run --shm-size=10g", refused(node.shared_memory, small)
    )


def test_triton_needs_a_compiler_and_pythons_headers(question, tmp_path, monkeypatch):
    monkeypatch.setattr(node.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert refused(node.compiler, question).startswith("no C compiler is here (gcc, clang), and Triton needs one")
    (tmp_path / "mycc").touch(0o755)
    monkeypatch.setenv("CC", "mycc")
    assert refused(node.compiler, question).startswith(f"{tmp_path}/include/Python.h is missing, and Triton needs it")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    assert node.compiler(question) == f"{tmp_path}/mycc"


def test_too_little_memory(question):
    sentence = refused(node.memory, replace(question, limits=ON_CPU._replace(memory=10**15)))
    assert re.match(r"[\d.]+ GB of memory are free, and a training needs about", sentence)


@pytest.mark.parametrize(
    ("groups", "limit"),
    [
        ("0::/slurm/job_7/step_1", 2 * GB),  # of the job, which is smaller than the step's
        ("0::/slurm", 8 * GB),  # of the container: a group above has none
        ("5:cpu:/\n4:memory:/slurm/job_7/step_1\n0::/", 3 * GB),
        ("4:cpu,memory:/docker/of_the_host\n", 4 * GB),  # a container sees its own group at the root
        ("4:cpu:/slurm/job_7\n", math.inf),
        ("", math.inf),
        (None, math.inf),  # a machine without control groups
    ],
)
def test_the_limit_of_a_jobs_memory_is_the_least_of_its_groups(groups, limit, tmp_path, question, monkeypatch):
    root = tmp_path / "cgroup"
    for file, text in {
        "memory.max": 8 * GB,
        "slurm/memory.max": "max",
        "slurm/job_7/memory.max": 2 * GB,
        "slurm/job_7/step_1/memory.max": 5 * GB,
        "memory/memory.limit_in_bytes": 4 * GB,
        "memory/slurm/job_7/step_1/memory.limit_in_bytes": 3 * GB,
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"{text}\n")
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    assert node.memory_limit(tmp_path / "groups", root) == limit
    monkeypatch.setattr(node, "memory_limit", lambda: limit)
    if limit < 4 * GB:
        assert refused(node.memory, replace(question, limits=ON_CPU._replace(memory=4 * GB))) == (
            f"this job or container may use {limit / GB:.1f} GB of memory, and a training needs about 4: ask for more "
            "(Slurm: --mem)"
        )


@pytest.mark.parametrize(
    ("ulimit", "sentence"),
    [
        ("-n 1000", "ulimit -Hn allows 1000 open files, use 8192 or more"),
        ("-u 3000", "ulimit -Hu allows 3000 processes, use 4096 or more"),
    ],
)
def test_low_limits_of_processes(question, ulimit, sentence):
    code = (
        "import pathlib; from verl_ext.first_run import node; from verl_ext.first_run.place import Place\n"
        "question = node.Question(Place('cpu', 1, 1, ''), pathlib.Path(), '', node.ON_CPU)\n"
        "try:\n    print(node.limits(question))\nexcept node.Fault as fault:\n    print(fault)"
    )
    shell = ["bash", "-c", f'ulimit {ulimit}; exec "$0" -c "$1"', sys.executable, code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(shell, capture_output=True, text=True, timeout=60, env=environment)
    assert result.stdout.startswith(sentence), result.stderr


def test_hard_limits_count_and_may_be_none(question, monkeypatch):
    none = node.resource.RLIM_INFINITY
    for hard, text in ((none, "unlimited"), (10**6, "1000000")):
        monkeypatch.setattr(node.resource, "getrlimit", lambda number, hard=hard: (1, hard))
        assert node.limits(question) == f"open files {text}, processes {text}"


def test_adapters_of_infiniband_without_their_devices_are_told(question, tmp_path, monkeypatch):
    monkeypatch.setattr(node.resource, "getrlimit", lambda number: (1, node.resource.RLIM_INFINITY))
    monkeypatch.setattr(node, "ADAPTERS", tmp_path / "adapters")
    monkeypatch.setattr(node, "RDMA", tmp_path / "devices")
    several = replace(question, place=replace(question.place, nodes=2))
    assert "NCCL" not in node.limits(several)
    (tmp_path / "adapters/mlx5_0").mkdir(parents=True)
    assert node.limits(several).endswith(
        f"NCCL will use TCP: {tmp_path}/adapters has adapters, and {tmp_path}/devices is "
        f"missing (docker run --device {tmp_path}/devices)"
    )
    assert "NCCL" not in node.limits(question)
    (tmp_path / "devices").mkdir()
    assert "NCCL" not in node.limits(several)


def test_a_full_disk_and_a_folder_that_cannot_be_written_to(question, tmp_path, monkeypatch):
    full = replace(question, limits=ON_CPU._replace(disk=10**15))
    sentence = refused(node.disks, full)
    assert re.match(rf"--out={re.escape(str(tmp_path))} has [\d.]+ GB free, use a disk with 1e\+06 or more", sentence)
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", f"{tmp_path}/file/hub")
    assert refused(node.disks, question).startswith(f"HF_HOME={tmp_path}/file/hub: {tmp_path}/file is a file")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HOME" not in node.disks(question)  # the hub's models are read there, and nothing is written
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "RAY_TMPDIR" not in node.disks(question)
    monkeypatch.setenv("RAY_TMPDIR", f"{tmp_path}/file/ray")
    assert refused(node.disks, question).startswith(f"RAY_TMPDIR={tmp_path}/file/ray: {tmp_path}/file is a file")
    (tmp_path / "full").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", f"{tmp_path}/full")
    monkeypatch.setattr(
        node.shutil, "disk_usage", lambda folder: SimpleNamespace(free=9 * GB * (folder.name != "full"))
    )
    sentence = refused(node.disks, replace(question, limits=ON_CPU._replace(disk=GB)))
    assert sentence == f"RAY_TMPDIR={tmp_path}/full has 0.0 GB free, use a disk with 1 or more"


def test_caches_belong_on_a_disk_of_the_node_that_allows_programs(question, tmp_path, monkeypatch):
    monkeypatch.setenv("NODE_CACHE", f"{tmp_path}/cache")
    assert node.caches(question) == f"{tmp_path}/cache"
    mounts = [SimpleNamespace(mountpoint="/", fstype="ext4", opts="rw"), None]
    for kind, options, sentence in (
        ("nfs4", "rw", "is on a network disk (nfs4): set NODE_CACHE"),
        ("tmpfs", "rw,noexec,nosuid", "is mounted noexec"),
    ):
        mounts[1] = SimpleNamespace(mountpoint=str(tmp_path), fstype=kind, opts=options)
        monkeypatch.setattr(node.psutil, "disk_partitions", lambda all: mounts)  # noqa: B023
        assert sentence in refused(node.caches, question)
    mounts[1] = SimpleNamespace(mountpoint=str(tmp_path / "own"), fstype="lustre", opts="rw")
    monkeypatch.setenv(node.CACHES[-1], f"{tmp_path}/own/cache")  # the user's own choice for one of them
    assert refused(node.caches, question).startswith(f"{node.CACHES[-1]}={tmp_path}/own/cache is on a network disk")
    (tmp_path / "cache").touch()
    assert "; NODE_CACHE names the folder" in refused(node.caches, question)


def test_the_mount_of_a_folder_is_the_nearest_above_it():
    mounts = [
        SimpleNamespace(mountpoint=point, fstype=kind, opts="")
        for point, kind in (("/", "ext4"), ("/data/runs", "xfs"), ("/data", "nfs"), ("/data/run", "cifs"))
    ]
    assert node.mount_of(Path("/data/runs/a"), mounts)[0] == "xfs"
    assert node.mount_of(Path("/data/other"), mounts)[0] == "nfs"
    assert node.mount_of(Path("/database"), mounts)[0] == "ext4"


def test_a_folder_that_is_not_the_first_nodes(question, tmp_path):
    (tmp_path / NOTE).write_text("of another start")
    assert "is not the first node's folder" in refused(node.shared_folder, question)
    (tmp_path / NOTE).unlink()
    assert "is not the first node's folder" in refused(node.shared_folder, question)


def test_other_versions_than_on_the_first_node(question):
    first = node.installed_versions()
    assert node.versions(replace(question, versions=first)) == node.versions(question)
    sentence = refused(node.versions, replace(question, versions=first | {"torch": "2.0"}))
    assert re.match(r"torch is 2\.\S+ here and 2.0 on the first node: use one environment", sentence)
    sentence = refused(node.versions, replace(question, versions=first | {"sglang": "0.5"}))
    assert sentence.startswith("sglang is missing here and 0.5 on the first node")
    fewer = {name: number for name, number in first.items() if name != "torch"}
    assert re.match(
        r"torch is 2\.\S+ here and missing on the first", refused(node.versions, replace(question, versions=fewer))
    )


def test_tokenizers_with_which_no_run_can_train(question, tmp_path):
    def with_tokenizer(name: str, change) -> Question:
        tokenizer = byte_tokenizer([], CHAT_TEMPLATE)
        change(tokenizer)
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
        return replace(question, place=replace(question.place, model=str(tmp_path / name)))

    without = with_tokenizer("a", lambda tokenizer: setattr(tokenizer, "chat_template", None))
    assert "a has no chat template: use an instruct model" in refused(node.tokenizer, without)
    silent = with_tokenizer("b", lambda tokenizer: setattr(tokenizer, "chat_template", "{{ bos_token }}"))
    assert "leaves out the user's message: it renders '<|im_start|>'" in refused(node.tokenizer, silent)
    endless = with_tokenizer("c", lambda tokenizer: setattr(tokenizer, "eos_token", None))
    assert "has no eos_token" in refused(node.tokenizer, endless)
    missing = replace(question, place=replace(question.place, model=str(tmp_path / "nothing")))
    assert refused(node.tokenizer, missing).startswith(f"the tokenizer of {tmp_path}/nothing cannot be loaded: ")
