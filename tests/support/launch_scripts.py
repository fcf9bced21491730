"""Launch scripts, run dry: with a stand-in for Python that notes what it is asked to do.

A real dry run of one script takes as long as importing verl; so does that of all of them here.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT  # where scripts are run
MACHINE = ("NNODES", "GPUS_PER_NODE", "HARDWARE", "MODEL_PATH", "MODEL_SIZE")
CHOICES = ("RECIPE", "N", "ESTIMATOR", "LENGTH", "BASELINE", "TOOLS")
OURS = (*MACHINE, "DATA_DIR", "TRAIN_FILES", "VAL_FILES", "CHECKPOINT_DIR", *CHOICES)


def run_script(script: str, python: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """``examples/run_<script>.sh`` with this Python, and nothing of the scripts' own from the environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / f"run_{script}.sh"), *arguments],
        cwd=FOLDER,
        env=inherited | {"PYTHON": python, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def argument_printer(folder: Path) -> str:
    """A program that prints its arguments, a line each."""
    path = folder / "python"
    path.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    path.chmod(0o755)
    return str(path)


def asked(script: str, python: str, *arguments: str, **environment: str) -> tuple[str, list[str]]:
    """The recipe that a script starts, and with which overrides."""
    result = run_script(script, python, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    _, module, *overrides = result.stdout.splitlines()
    return module.removeprefix("recipe."), overrides
