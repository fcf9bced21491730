"""Dry runs of launch scripts: in place of Python, a script runs a program that prints its arguments.

A real dry run of one script takes as long as importing verl. Here, the dry runs of all scripts together take no longer.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from unittest.mock import patch

from omegaconf import DictConfig, OmegaConf

from support import configs
from support.commands import run_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem.removeprefix("run_") for path in EXAMPLES.glob("run_*.sh"))
READ_BY_EXPERIMENTS = ("DATA_DIR", "CHECKPOINT_DIR")


def run_script(
    script: str, python: str, *arguments: str, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """Run ``examples/run_<script>.sh`` with this Python in this folder."""
    return subprocess.run(
        ["bash", str(EXAMPLES / f"run_{script}.sh"), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHON": python, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@cache
def _argument_printer() -> str:
    path = Path(tempfile.mkdtemp(prefix="launch_scripts_")) / "python"
    path.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


@cache
def asked(script: str, *arguments: str, folder: Path = ROOT, **environment: str) -> tuple[str, tuple[str, ...]]:
    """The recipe started by a script, and its overrides."""
    result = run_script(script, _argument_printer(), *arguments, folder=folder, **environment)
    assert result.returncode == 0, result.stderr
    _, module, *overrides = result.stdout.splitlines()
    return module.removeprefix("recipe."), tuple(overrides)


def composed(script: str, *arguments: str, **environment: str) -> DictConfig:
    """The config of the recipe started by a script. Resolving the config reads DATA_DIR and CHECKPOINT_DIR."""
    recipe, overrides = asked(script, *arguments, **environment)
    return configs.compose(recipe, *overrides)


@cache
def resolved(script: str, *arguments: str, folder: Path = ROOT, **environment: str) -> dict:
    """The config of the recipe started by a script, resolved as by ``--cfg job --resolve``, and its ``recipe``.

    DATA_DIR is /data unless the environment says otherwise.
    """
    environment = {"DATA_DIR": "/data"} | environment
    recipe, overrides = asked(script, *arguments, folder=folder, **environment)
    with _read_by_experiments(environment):
        return OmegaConf.to_container(configs.compose(recipe, *overrides), resolve=True) | {"recipe": recipe}


def dry_run(script: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the recipe started by a script, with these arguments."""
    recipe, given = asked(script, *arguments, **environment)
    with _read_by_experiments(environment):
        return run_recipe(recipe, *given)


def _read_by_experiments(environment: dict[str, str]) -> AbstractContextManager:
    """In this context, the variables that experiments read are set as in ``environment``."""
    return patch.dict(os.environ, {name: environment[name] for name in READ_BY_EXPERIMENTS if name in environment})
