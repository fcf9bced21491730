"""A launch script on two nodes of a real Slurm: pre-empted, requeued, resumed; one node dies."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import pytest
from support.forks import Driver
from support.slurm import ENDED, Slurm, missing
from support.training import assert_nothing_lost, optimizer_steps

from verl_ext.driver.checkpoint import load_state
from verl_ext.first_run.process import metrics_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())}"),
]
ROOT = Path(__file__).parents[2]
SAVED = 3  # steps from one checkpoint to the next


def test_a_pre_empted_training_saves_and_resumes_and_a_node_dies(task, tmp_path):
    """In `separate_async`: one node trains, and the other generates. The weights are sent by gloo."""
    data, model, python = task.folder / "data", task.folder / "model", tmp_path / "python"
    environment = {
        "PYTHON": str(python),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HARDWARE": "cpu",
        "MODEL_PATH": str(model),
        "TRAIN_FILES": str(data / "train.parquet"),
        "VAL_FILES": str(data / "validation.parquet"),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "STOP_TIMEOUT": "450",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "metrics.jsonl"),
    }
    overrides = [o for o in task.overrides() if not o.startswith(("hardware=", "data.train_files=", "data.val_files="))]
    overrides += ["rollout_policy.n_pilot=6", "rollout_policy.n_commit=2", "rollout_policy.p_solve=null"]
    overrides += ["rollout_policy.p_lower=0.15", "rollout_policy.p_upper=0.85", "trainer.test_freq=2"]
    overrides += ["actor_rollout_ref.rollout.val_kwargs.n=1", "trainer.nnodes=1", "actor_rollout_ref.rollout.nnodes=1"]
    overrides += ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=false"]
    overrides += ["actor_rollout_ref.rollout.checkpoint_engine.backend=gloo", f"trainer.save_freq={SAVED}"]
    overrides += ["trainer.total_training_steps=1000"]
    # The training and Ray's workers are forks of a process outside of Slurm, and end with the processes that the job
    # and Ray start for them. train.sbatch asks Ray for its nodes first, so the training is Ray's second job.
    forks = Driver("serve with Ray", job="02000000")
    overrides += [f"+ray_kwargs.ray_init.runtime_env.py_executable={forks.python}"]
    forks.as_python(python)
    with (
        tempfile.TemporaryDirectory(prefix="slurm_") as folder,
        Slurm(Path(folder)) as slurm,
        contextlib.closing(forks),
    ):
        job = slurm.submit(
            *["--nodes=2", "--gpus-per-node=1", str(ROOT / "examples/slurm/train.sbatch")],
            *[str(ROOT / "examples/run_pilot_commit_qwen3_8b.sh"), *overrides],
            cwd=tmp_path,
            **environment,
        )
        log, first = tmp_path / f"slurm-{job}.out", tmp_path / "metrics.jsonl"
        slurm.wait(lambda: metrics_of(first) or slurm.job(job)["JobState"] in ENDED, "first step", 600)
        assert slurm.job(job)["JobState"] == "RUNNING", log.read_text()[-6000:]
        urgent = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path)
        slurm.wait(lambda: slurm.job(urgent)["JobState"] == "COMPLETED", "end of the urgent job", 500)
        assert slurm.job(job)["JobState"] == "PENDING", log.read_text()[-6000:]
        assert not Path(f"/tmp/ray_{job}").exists()

        (checkpoints,) = (tmp_path / "checkpoints").iterdir()
        latest = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
        before = metrics_of(first)
        saved = {int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*")}
        assert saved == {latest, *range(SAVED, latest, SAVED)} and list(before) == list(range(1, latest + 1))
        assert f"stopped after step {latest}, as asked" in log.read_text()
        assert not any(name.startswith("val-core") for name in before[latest])  # no time to validate

        slurm.start_now(job)
        second, last = tmp_path / "metrics-restart-1.jsonl", (latest // SAVED + 1) * SAVED

        def running() -> bool:
            return slurm.job(job)["JobState"] not in ENDED

        slurm.wait(lambda: last + 1 in metrics_of(second) or not running(), "second checkpoint", 600)
        assert running() and "start 2] starting" in log.read_text(), log.read_text()[-6000:]
        slurm.kill(job, "node2")
        slurm.wait(lambda: not running(), "end of the job", 300)
    assert "start 1] saved; back into the queue" in log.read_text()
    assert "\nerror: the run has lost 1 of its 2 nodes: node2 (" in log.read_text(), log.read_text()[-20000:]
    assert "error: the run ended with status 1" in log.read_text()
    assert int((checkpoints / "latest_checkpointed_iteration.txt").read_text()) >= last
    after = metrics_of(second)
    assert_nothing_lost(before, after)
    steps = before | after
    assert all(metrics["off_policy/delay_max"] <= 4 for metrics in steps.values())
    # The step after a restart begins with buffered groups or fresh pilots; later steps with rollouts in flight.
    assert any(metrics["off_policy/delay_max"] >= 1 for metrics in steps.values())
    assert any(name.startswith("val-core/") for metrics in after.values() for name in metrics)
    assert optimizer_steps(checkpoints, last) == last * 2  # train_batch_size 4 / ppo_mini_batch_size 2
    state = load_state(checkpoints / f"global_step_{last}")
    assert state["step"] == last and state["ledger"]["buffered"] == steps[last]["rollouts/buffered"]
    assert len(state["policy"]["state"]["buffer"]["groups"]) == steps[last]["pilot_commit/buffer"]
