"""Training on two Ray nodes; one node dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.ray_nodes import RAY, RayNodes
from support.training import assert_nothing_lost

from verl_ext.driver.checkpoint import load_state
from verl_ext.first_run.process import metrics_of

pytestmark = pytest.mark.stack
ROOT = Path(__file__).parents[2]
STEPS = 5


@pytest.fixture
def nodes():
    with tempfile.TemporaryDirectory(prefix="rn", ignore_cleanup_errors=True) as folder, RayNodes(Path(folder)) as ray:
        ray.start("worker")
        yield ray


def test_a_node_dies_while_pilots_and_commits_are_generated(nodes, task, tmp_path):
    """In `colocate_async`. The run, a `ray job submit`, ends soon after with one error. A run on one node, with two
    devices, continues."""
    checkpoints, logs = tmp_path / "checkpoints", [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    train = [sys.executable, "-m", "recipe.pilot_commit", *task.overrides(), "trainer.nnodes=2"]
    train += ["rollout_policy.n_pilot=6", "rollout_policy.n_commit=2", "rollout_policy.p_solve=null"]
    train += ["rollout_policy.p_lower=0.15", "rollout_policy.p_upper=0.85", "trainer.save_freq=2"]
    train += ["trainer.v1.trainer_mode=colocate_async"]
    train += [f"trainer.total_training_steps={STEPS}", f"trainer.default_local_dir={checkpoints}"]

    environment = {"VERL_FILE_LOGGER_PATH": str(logs[0]), "PYTHONPATH": str(ROOT)}
    runtime = ["--runtime-env-json", json.dumps({"env_vars": environment})]
    submit = [*RAY, "job", "submit", f"--address={nodes.jobs}", *runtime, "--", *train]
    with open(tmp_path / "first.log", "w") as log:
        job = subprocess.Popen(submit, stdout=log, stderr=subprocess.STDOUT, env=nodes.environment)
    deadline = time.monotonic() + 600
    while 3 not in metrics_of(logs[0]):
        assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "first.log").read_text()[-6000:]
        time.sleep(0.05)
    nodes.kill("worker")  # the fourth step's pilots and commits have just been asked for
    code = job.wait(timeout=180)
    output = (tmp_path / "first.log").read_text()
    assert code == 1, output[-6000:]
    assert "\nerror: the run has lost 1 of its 2 nodes: worker (" in output[-3000:], output[-20000:]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    before = {step: metrics for step, metrics in metrics_of(logs[0]).items() if step <= 2}
    state = load_state(checkpoints / "global_step_2")
    assert state["ledger"]["buffered"] == before[2]["rollouts/buffered"]
    assert len(state["policy"]["state"]["buffer"]["groups"]) == before[2]["pilot_commit/buffer"] > 0

    train[train.index("trainer.nnodes=2")] = "trainer.n_gpus_per_node=2"  # the same two ranks on one node
    environment = {**os.environ, **environment, "VERL_FILE_LOGGER_PATH": str(logs[1])}
    with open(tmp_path / "second.log", "w") as log:
        run = subprocess.run(train, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=600)
    assert run.returncode == 0, (tmp_path / "second.log").read_text()[-6000:]
    after = metrics_of(logs[1])
    assert max(after) == STEPS
    assert_nothing_lost(before, after)
    if before[2]["pilot_commit/buffer"] >= 4:  # the buffered pilots themselves came back and were trained
        assert after[3]["pilot_commit/rounds"] == 0 and after[3]["off_policy/delay_max"] >= 1
    assert all(metrics["off_policy/delay_max"] <= 4 for metrics in (before | after).values())
