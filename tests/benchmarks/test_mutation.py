"""Mutants differ from their module in one place, and the list of equivalent mutants follows the code."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
from pathlib import Path

import mutation
import pytest
import typer
from mutants import mutants

SOURCE = """
def least(a, b=1):
    if a < b and not logger.info("smaller"):
        return pair(a, b, sort=True)
    self.total += 2
    raise ValueError(f"{a + b}")
"""


def test_every_kind_of_change_is_made_once():
    made = [(mutant.line, mutant.mutation) for mutant in mutants(SOURCE, 100, random.Random(0))]
    assert len(made) == len(set(made)) and sorted(mutation for _, mutation in made) == sorted(
        [
            "def least(a, b=2):",
            "if not (a < b and (not logger.info('smaller'))):",
            "if a < b or not logger.info('smaller'):",
            "if a <= b and (not logger.info('smaller')):",
            "return pair(b, a, sort=True)",
            "return pair(a, b)",
            "return pair(a, b, sort=False)",
            "self.total -= 2",
            "self.total += 3",
            "pass",  # instead of the sum
            "pass",  # instead of the error
        ]
    )


def test_a_larger_sample_begins_with_the_smaller_one():
    few, many = ([mutant.key for mutant in mutants(SOURCE, size, random.Random("seed"))] for size in (4, 9))
    assert len(few) == 4 and len(many) == 9 and many[:4] == few


def test_listed_equivalents_are_mutants_of_the_code_as_it_is():
    for entry in mutation.listed_equivalents():
        lines = [
            line.strip() for line in ast.unparse(ast.parse((mutation.ROOT / entry["module"]).read_text())).splitlines()
        ]
        assert entry["line"] in lines and entry["mutation"] != entry["line"] and entry["why"].endswith("."), entry
        assert set(entry) == {"module", "line", "mutation", "why"}


def test_guards_name_files_that_exist():
    for module, tests in mutation.GUARDS.items():
        assert all((Path(mutation.ROOT) / path).is_file() for path in (module, *tests)), module


def test_a_spawned_process_imports_the_mutant():
    """In a process that multiprocessing spawns, the main module, here mutation.py, has the name __mp_main__."""
    module = mutation.ROOT / "verl_ext/data/limited.py"
    mutated = dict(zip(mutation.SPAWNED, (str(module), "TIMEOUT = 'mutated'"), strict=True))
    code = f"import runpy, verl_ext.data.limited; runpy.run_path({mutation.__file__!r}, run_name='__mp_main__')"
    code += "; from verl_ext.data.limited import TIMEOUT; print(TIMEOUT)"
    folders = os.pathsep.join([str(mutation.ROOT / "benchmarks"), str(mutation.ROOT)])
    for changed, printed in ((mutated, "mutated"), ({}, "15.0")):
        environment = {**os.environ, "PYTHONPATH": folders, **changed}
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=120)
        assert result.stdout.strip() == printed


def test_verdicts_are_kept_and_counted(tmp_path):
    module = "verl_ext/ledger.py"
    drawn = mutation.draw(module, 4, 0)
    verdicts = mutation.Verdicts(module, tmp_path)
    for mutant, alive in zip(drawn[:3], (False, True, True), strict=True):
        verdicts.add(mutant, alive)
    equivalents = {(module, drawn[1].line, drawn[1].mutation)}
    again = mutation.Verdicts(module, tmp_path)
    assert again.outcome(drawn, equivalents) == (module, 1, 1, [drawn[2]])
    again.add(drawn[2], False)  # a test was written
    outcome = mutation.Verdicts(module, tmp_path).outcome(drawn, equivalents)
    assert outcome == (module, 2, 1, [])
    assert "| `verl_ext/ledger.py` | 3 | 2 | 1 | 0 |" in list(mutation.page([outcome], [], "How."))


def test_a_page_keeps_the_rows_of_modules_without_verdicts(tmp_path, monkeypatch):
    """Rows with survivors are left out, since the survivors' lines are unknown; so are modules that are gone."""
    run, kept, alive = "verl_ext/ledger.py", "verl_ext/files.py", "verl_ext/checks.py"
    guards = {module: tests for module, tests in mutation.GUARDS.items() if module in (run, kept, alive)}
    monkeypatch.setattr(mutation, "GUARDS", guards)
    rows = [f"| `{module}` | 10 | 7 | {3 - left} | {left} |" for module, left in ((run, 0), (kept, 0), (alive, 1))]
    page, verdicts = tmp_path / "page.md", mutation.Verdicts(run, tmp_path)
    page.write_text("\n".join([*rows, "| `verl_ext/gone.py` | 10 | 10 | 0 | 0 |"]))
    drawn = mutation.draw(run, 2, 0)
    for mutant in drawn:
        verdicts.add(mutant, False)
    mutation.table(page, sample=2, seed=0, out=tmp_path, machine="one core")
    written = page.read_text()
    with pytest.raises(typer.BadParameter, match="holds no verdicts"):
        mutation.table(page, machine="another", out=tmp_path / "empty")
    assert page.read_text() == written
    table = [line for line in page.read_text().splitlines() if line.startswith("| `verl_ext/") and line.count("|") == 6]
    assert table == [rows[1], "| `verl_ext/ledger.py` | 2 | 2 | 0 | 0 |"]
    assert "| all | 12 | 9 | 3 | 0 |" in page.read_text()
