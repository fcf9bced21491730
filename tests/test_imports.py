"""Allowed imports between modules, and the time of imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"verl", "ray", "torch", "vllm", "transformers"}
WITHOUT_VERL = [
    "policy.py",
    "ledger.py",
    "checks.py",
    "prompts.py",
    "controller.py",
    "allocation",
    "estimation",
    "one_wave.py",
    "lab",
    "evaluation",
    "record.py",
    "testing",
    "sampling.py",
    "trajectory.py",
    "files.py",
    "weights.py",
]
# Imported in this order in one process, so that a heavy import is noticed at the first package with it.
OUTSIDE_OF_VERL = (
    "verl_ext.allocation",
    "verl_ext.estimation",
    "verl_ext.evaluation",
    "verl_ext.lab.report.command",
    "verl_ext.lab.simulate.command",
    "verl_ext.lab.simulate.verify_record",
)
LEARNER = ROOT / "verl_ext" / "lab" / "learn"  # trains with torch, and only its own command imports it


def files_without_verl():
    for name in WITHOUT_VERL:
        path = ROOT / "verl_ext" / name
        yield from [path] if path.is_file() else path.rglob("*.py")
    yield from ROOT.glob("recipe/*/policy.py")


@pytest.mark.parametrize("path", list(files_without_verl()), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_heavy_import_at_module_level(path):
    imported = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert not imported & (HEAVY - {"torch"} if LEARNER in path.parents else HEAVY)


def test_packages_for_use_outside_of_verl_load_nothing_heavy():
    code = (
        "import sys\nfor name in sys.argv[1:]: __import__(name); print(name, *(m for m in sys.modules if '.' not in m))"
    )
    command = [sys.executable, "-c", code, *OUTSIDE_OF_VERL]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name: modules for name, *modules in map(str.split, result.stdout.splitlines())}
    assert tuple(loaded) == OUTSIDE_OF_VERL
    for name, modules in loaded.items():
        assert not set(modules) & (HEAVY | {"scipy", "sklearn"}), name


# grpo is the baseline without a special setting: evaluation runs its trainer.
METHODS = sorted({path.parent.name for path in ROOT.glob("recipe/*/policy.py")} - {"grpo"})
# knapsack is also an allocator, and dynamic_sampling an option of OneWave: these words may occur.
ALSO_WORDS = {"knapsack", "dynamic_sampling"}


@pytest.mark.parametrize("method", METHODS)
def test_verl_ext_names_no_method(method):
    uses = rf"\brecipe[./]{method}\b|\b{method}/" + ("" if method in ALSO_WORDS else rf"|\b{method}\b")
    files = sorted((ROOT / "verl_ext").rglob("*.py")) + sorted((ROOT / "verl_ext").rglob("*.yaml"))
    assert len(files) > 50 and len(METHODS) >= 6
    named = [f"{path.relative_to(ROOT)}: {line.strip()}" for path in files for line in path.read_text().splitlines()
             if re.search(uses, line) and not line.startswith("verl-ext ")]  # fmt: skip
    assert not named, named
