"""The example with TRL, in a process of its own: where TRL can be imported, verl fails (pyproject.toml)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]


def test_a_policy_in_trls_trainer(tmp_path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    trl = next(package for package in extras["trl"] if package.startswith("trl"))
    install = [
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        sys.executable,
        "--no-deps",
        "--target",
        str(tmp_path / "trl"),
        trl,
    ]
    subprocess.run([sys.executable, *install], check=True, timeout=300)
    paths = os.pathsep.join([str(tmp_path / "trl"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    checks = [str(ROOT / "tests/examples/trl_checks.py"), "-q", "-n0", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *checks],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert found.returncode == 0 and "6 passed" in found.stdout, found.stdout + found.stderr
