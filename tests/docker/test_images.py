"""The build steps of the images, run without a container engine, since the tests have none."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from verl_ext.recipes import recipes

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
    copied = [argument.split() for step, argument in steps if step == "COPY" and "--from" in argument]
    assert [words[1:] for words in copied] == [["/usr/local/bin/docker"] * 2]
    assert re.fullmatch(r"--from=docker:\d+\.\d+\.\d+-cli", copied[0][0])
    assert '"$ROOT[verl,agents]"' in (ROOT / "docker" / "install.sh").read_text()


def test_nothing_that_git_ignores_gets_into_an_image():
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert ignored <= left_out


def test_the_smoke_test_passes_here():
    command = [sys.executable, "docker/smoke_test.py", "--hardware", "cpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"recipes     {', '.join(recipes())}\n" in result.stdout and "1/2 equals 0.5" in result.stdout
    assert len(recipes()) >= 7


def test_the_smoke_test_wants_the_verl_that_the_project_wants():
    smoke_test = runpy.run_path(str(ROOT / "docker" / "smoke_test.py"))
    assert f'"verl=={smoke_test["VERL"]}"' in (ROOT / "pyproject.toml").read_text()


def install(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "docker" / "install.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_packages_that_an_installation_leaves_alone():
    kept = dict(line.split("==") for line in install("constraints").stdout.splitlines())
    assert kept["torch"] == metadata.version("torch") and kept["transformers"] == metadata.version("transformers")
    assert "numpy" not in kept and "verl" not in kept
    assert install("remove").returncode == 2
