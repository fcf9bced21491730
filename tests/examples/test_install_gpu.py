"""examples/install_gpu.sh and install_cpu.sh. A stand-in for Python 3.12 notes the packages to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$NOTES"
case "$*" in
  *"-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    [[ -n ${INTERRUPTED:-} ]] && exit 1
    echo "VIRTUAL_ENV=${@: -1}" >"${@: -1}/bin/activate" ;;
  *"-m uv "*) echo "${UV_COMPILE_BYTECODE:-}" >>"$NOTES.compile" ;;
  *follow.py*) cat >/dev/null ;;
  *"sysconfig"*) [[ -z ${NO_COMPILER:-} ]] ;;
  *"sys.version_info"*) [[ ${MINOR:-12} == 12 ]] ;;
esac
"""
TOOLS = {
    "uname": "echo Linux x86_64",
    "getconf": "[[ ${HERE_GLIBC:-} != none ]] && echo glibc ${HERE_GLIBC:-2.39}",
    "df": "printf 'x\\nx x x 99999999999\\n'",
    "nvidia-smi": 'echo "${HERE_DRIVER:-580.95.05}"',
    "git": "true",
}


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name in ("examples", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tools").mkdir()
    for name, text in TOOLS.items():
        (tmp_path / "tools" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def install(checkout: Path, script: str = "install_gpu.sh", **environment: str) -> subprocess.CompletedProcess:
    own = {"PYTHON": str(checkout / "python"), "NOTES": str(checkout / "notes")}
    own["UV_COMPILE_BYTECODE"] = ""  # not the tester's
    own["PATH"] = f"{checkout / 'tools'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(checkout / "examples" / script)]
    return subprocess.run(command, env=os.environ | own | environment, capture_output=True, text=True, timeout=60)


def installed(checkout: Path) -> list[str]:
    """What each call of uv installed."""
    lines = (checkout / "notes").read_text().splitlines()
    return [line.partition(" --no-deps ")[2] for line in lines if " -m uv pip install " in f" {line}"]


@pytest.mark.parametrize(
    ("environment", "lock", "wheels", "checked"),
    [
        ({}, "gpu_vllm", ["gpu_wheels"], "--engine vllm --megatron 0"),
        ({"ENGINE": "sglang"}, "gpu_sglang", ["gpu_wheels"], "--engine sglang --megatron 0"),
        ({"MEGATRON": "1"}, "gpu_vllm_megatron", ["gpu_wheels", "gpu_wheels_megatron"], "--engine vllm --megatron 1"),
    ],
)
def test_first_the_locked_set_then_verls_own_wheels(environment, lock, wheels, checked, checkout):
    result = install(checkout, **environment)
    assert result.returncode == 0, result.stderr
    files = " ".join(f"-r requirements/{name}.txt" for name in wheels)
    assert installed(checkout) == [f"-r requirements/{lock}.txt", files, "--no-build-isolation -e ."]
    assert f"docker/smoke_test.py --hardware h200 {checked}" in (checkout / "notes").read_text()
    assert "is up to date" in install(checkout, **environment).stdout
    assert "Done in" in install(checkout, ENGINE="sglang", MEGATRON="1").stdout  # another set is not up to date


@pytest.mark.parametrize(("script", "compiled"), [("install_gpu.sh", "1"), ("install_cpu.sh", "")])
def test_only_the_gpu_stack_is_compiled_while_it_is_installed(script, compiled, checkout):
    result = install(checkout, script)
    assert result.returncode == 0, result.stderr
    assert set((checkout / "notes.compile").read_text().splitlines()) == {compiled}


def test_an_environment_of_another_folder_is_not_up_to_date(checkout, tmp_path_factory):
    assert install(checkout).returncode == 0
    assert "is up to date" in install(checkout).stdout
    link = tmp_path_factory.mktemp("link") / "checkout"
    link.symlink_to(checkout)
    assert "is up to date" in install(link).stdout
    moved = tmp_path_factory.mktemp("moved") / "checkout"
    shutil.copytree(checkout, moved, symlinks=True)
    result = install(moved)
    assert result.returncode == 2 and "was made in another folder, and an environment cannot be moved" in result.stderr
    shutil.rmtree(moved / ".venv")
    (moved / ".venv").symlink_to(checkout / ".venv")
    result = install(moved)
    assert result.returncode == 2 and "is a link to an environment of another place" in result.stderr


def test_one_stack_does_not_overwrite_the_other(checkout):
    assert install(checkout).returncode == 0
    before = installed(checkout)
    for _ in range(2):
        result = install(checkout, "install_cpu.sh")
        assert result.returncode == 2 and "holds the GPU stack, and both would overwrite each other" in result.stderr
    assert installed(checkout) == before and "is up to date" in install(checkout).stdout


def test_an_environment_that_was_interrupted_is_made_again(checkout):
    assert install(checkout, INTERRUPTED="1").returncode == 1 and (checkout / ".venv/bin/python").exists()
    assert "Done in" in install(checkout).stdout
    assert (checkout / "notes").read_text().count("-m venv ") == 2


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"ENGINE": "trtllm"}, "ENGINE=trtllm is not valid: use vllm or sglang."),
        ({"MEGATRON": "yes"}, "MEGATRON=yes is not valid: use 1, or 0 for FSDP2 alone."),
        ({"MINOR": "11"}, "the GPU stack needs Python 3.12 (found: "),
        ({"PYTHON": "/nix"}, "PYTHON=/nix cannot be started; name Python 3.12 in its place, or leave PYTHON out."),
        (
            {"NO_COMPILER": "1"},
            "install a C compiler and Python's headers (on Debian: apt-get install gcc python3-dev).",
        ),
        ({"HERE_GLIBC": "2.31"}, "needs glibc 2.34 or newer (Ubuntu 22.04, Debian 12, RHEL 9), and this is 2.31;"),
        ({"HERE_GLIBC": "none"}, "and this is another libc; use the container (docker/Dockerfile)."),
        ({"HERE_DRIVER": "570.172.08"}, "CUDA 13.0 needs driver R580 or newer, and this machine has 570.172.08."),
    ],
)
def test_what_cannot_finish_is_refused_before_the_first_download(environment, sentence, checkout):
    result = install(checkout, **environment)
    assert result.returncode == 2 and sentence in result.stderr, result.stderr
    assert not (checkout / "notes").exists() or not installed(checkout)


def test_a_compiler_and_the_headers_are_looked_for():
    """By the Python of the environment; here, where this environment was made, both are there."""
    code = f"source examples/install_common.sh; VENV={sys.prefix}; compiles"
    for compiler, status in ((None, 0), ("/no/compiler -O2", 1)):
        environment = {name: value for name, value in os.environ.items() if name != "CC"}
        environment |= {} if compiler is None else {"CC": compiler}
        assert subprocess.run(["bash", "-c", code], cwd=ROOT, env=environment, timeout=60).returncode == status
