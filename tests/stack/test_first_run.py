"""`bash examples/first_run.sh` on the CPU: one recipe in one mode, stopped by SIGUSR1 and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack
ROOT = Path(__file__).parents[2]


def first_run(folder: Path) -> subprocess.CompletedProcess:
    chosen = ["--recipes", "speed_rl", "--modes", "colocate_async", "--limit", "900"]
    environment = {**os.environ, "HARDWARE": "cpu", "OUT": str(folder / "out"), "PYTHON": sys.executable}
    script = ["bash", ROOT / "examples" / "first_run.sh", *chosen]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)


def test_a_first_run_on_the_cpu_and_its_continuation(tmp_path):
    first = first_run(tmp_path)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "rows.json").read_text())
    rows = {row["what"]: row for row in [*results["checks"], *results["trainings"]]}
    assert {row["result"] for row in rows.values()} == {"passed"}
    assert {"devices talk", "shared memory", "tokenizer and chat template", "speed_rl, colocate_async"} <= set(rows)
    trained = rows["speed_rl, colocate_async"]
    assert trained["seconds"] > 0 and trained["rollouts_per_second"] > 0 and trained["peak_bytes"] is None
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| speed_rl, colocate_async | passed | " in table and " | not measured | – |" in table
    log = tmp_path / "out" / "speed_rl-colocate_async" / "run.log"
    assert "stopped after step " in log.read_text() and not (log.parent / "checkpoints").exists()
    written = log.stat().st_mtime_ns

    second = first_run(tmp_path)
    assert second.returncode == 0 and "shared memory: passed" in second.stdout, second.stderr[-3000:]
    assert log.stat().st_mtime_ns == written and "1/1 speed_rl" not in second.stdout  # kept
