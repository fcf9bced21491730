"""`bash examples/first_run.sh` on the CPU stops and resumes a training. Two Ray nodes are checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.forks import with_verl
from support.ray_nodes import RayNodes

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


def first_run(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HARDWARE": "cpu", "OUT": f"{folder}/out", "PYTHON": sys.executable, **variables}
    script = ["bash", ROOT / "examples" / "first_run.sh", *options]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)


def rows_of(folder: Path) -> dict[str, dict]:
    results = json.loads((folder / "out" / "rows.json").read_text())
    return {row["what"]: row for row in [*results["checks"], *results["trainings"]]}


def test_a_first_run_on_the_cpu(tmp_path):
    forks = with_verl()
    python = forks.as_python(tmp_path / "python", forks.of_a_training())
    options = ("--recipes", "speed_rl", "--modes", "colocate_async", "--limit", "900")
    result = first_run(tmp_path, *options, PYTHON=str(python))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = rows_of(tmp_path)
    assert {row["result"] for row in rows.values()} == {"passed"}
    assert {"devices talk", "shared memory", "tokenizer and chat template", "speed_rl, colocate_async"} <= set(rows)
    trained = rows["speed_rl, colocate_async"]
    assert trained["seconds"] > 0 and trained["rollouts_per_second"] > 0 and trained["peak_bytes"] is None
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| speed_rl, colocate_async | passed | " in table and " | not measured | – |" in table
    log = tmp_path / "out" / "speed_rl-colocate_async" / "run.log"
    assert "stopped after step " in log.read_text() and not (log.parent / "checkpoints").exists()


def test_every_node_of_a_cluster_is_asked(tmp_path):
    """Two nodes on this machine, where three are needed."""
    with tempfile.TemporaryDirectory(prefix="rn", ignore_cleanup_errors=True) as folder, RayNodes(Path(folder)) as ray:
        ray.start("worker")
        asked = first_run(tmp_path, "--checks-only", NNODES="3", **ray.environment)
    assert asked.returncode == 1, asked.stdout[-3000:] + asked.stderr[-3000:]
    rows = rows_of(tmp_path)
    nodes = rows.pop("nodes in Ray")
    needed = "NNODES=3 nodes with GPUS_PER_NODE=1 are needed, and Ray has head with 1, worker with 1"
    assert (nodes["result"], nodes["why"]) == ("failed", needed)
    assert f"nodes in Ray: failed: {needed}" in asked.stdout
    assert len(rows) == 8 and {row["result"] for row in rows.values()} == {"passed"}
    assert rows["shared folder"]["why"] == str(tmp_path / "out")
