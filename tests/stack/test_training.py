"""Each recipe trains on the real stack: verl, Ray, TransferQueue, FSDP2 and vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from faults.running import FAULTS, judge
from faults.verdict import REFUSED
from support.training import TrainingRun, assert_books_balance, optimizer_steps

from verl_ext.driver.checkpoint import load_state
from verl_ext.errors import DataUsedUp

pytestmark = pytest.mark.ray
YOUR_OWN_POLICY = Path(__file__).parents[2] / "docs/your_own_policy.md"
BROKEN_REWARDS = Path(__file__).parents[1] / "faults/rewards.py"
UPDATES = 2  # train_batch_size 4 / ppo_mini_batch_size 2
SEVERAL_WORKERS = (
    "actor_rollout_ref.rollout.agent.num_workers=3",
    "reward.num_workers=2",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
)


def test_grpo_until_a_worker_dies(tied_task, tmp_path):
    """Output head and embedding are tied, as in most small pretrained models: weight sync renews both. There are
    several workers of each kind, and one of them dies."""
    run = TrainingRun(
        tied_task,
        "grpo",
        tmp_path,
        *SEVERAL_WORKERS,
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=1000",
        "trainer.save_freq=3",
        "trainer.test_freq=3",
    )
    run.wait_for_step(4)
    started = run.processes()
    assert [started[f"ray::{name}"] for name in ("WaveWorker", "RewardLoopWorker", "SimpleStorageUnit")] == [3, 2, 2]
    workers = {"ray::WaveWorker", "ray::WorkerDict", "ray::vLLMHttpServer", "VLLM::EngineCore"}
    assert run.forks() >= {*workers, "ray::DashboardAgent"}  # workers, and Ray's own programs
    run.kill_worker("ray::WaveWorker")
    outcome, why = judge(FAULTS["an agent-loop worker dies"], run.end(), run.steps(), run.log)
    assert outcome == REFUSED, why
    steps = run.steps()
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["rollouts/sampled"] == metrics["rollouts/trained"] == 4 * 4
        assert metrics["off_policy/delay_max"] == 0
        # vLLM samples from the newly trained weights.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert optimizer_steps(run.checkpoints, 3) == 3 * UPDATES
    assert any(name.startswith("val-core/") for name in steps[3])
    assert "step 3/1000 | reward" in run.log


def test_dapo_with_rewards_that_fail(task, tmp_path):
    """Three of ten rewards raise, are NaN or infinite: their rollouts count as failed, and their groups are trained."""
    run = TrainingRun(
        task,
        "dynamic_sampling",
        tmp_path,
        f"reward.custom_reward_function.path={BROKEN_REWARDS}",
        "reward.custom_reward_function.name=broken_at_times",
        "actor_rollout_ref.rollout.n=4",
        "rollout_policy.s=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        forked=True,
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3]
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["groups/effective_ratio"] == 1.0 and metrics["rollouts/buffered"] == 0
        assert metrics["rollouts/sampled"] == metrics["dynamic_sampling/rounds"] * 2 * 4 * 4
        assert metrics["rollouts/failed"] >= 9  # of at least 32
        assert metrics["actor/grad_norm"] > 0
    assert optimizer_steps(run.checkpoints, 3) == 3 * UPDATES
    run.assert_requests_replay()


def test_a_policy_of_ones_own_with_groups_of_different_sizes(task, tmp_path):
    """The policy of docs/your_own_policy.md on two actor ranks: two waves in a step, and row counts that neither ranks
    nor mini-batches divide."""
    source = re.search(r"```python\n(.*?)```", YOUR_OWN_POLICY.read_text(), re.DOTALL).group(1)
    (tmp_path / "disagreement.py").write_text(source)
    run = TrainingRun(
        task,
        "grpo",
        tmp_path,
        "rollout_policy._target_=disagreement.Disagreement",
        "~rollout_policy.prompt_weight",
        "actor_rollout_ref.rollout.n=7",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=4",
        "trainer.save_freq=4",
        python_path=str(tmp_path),
        forked=True,
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3, 4]
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["rollouts/sampled"] == 4 * 7  # the budget, to the unit
        assert metrics["allocation/min"] >= 3 + 4
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    uneven = [metrics["rollouts/trained"] % 8 for metrics in steps.values()]  # 2 ranks with 4 mini-batches each
    assert any(uneven), "no step needed padding"
    assert len(list(run.checkpoints.glob("global_step_4/actor/optim_world_size_2_rank_*.pt"))) == 2
    assert optimizer_steps(run.checkpoints, 4) == 4 * 4


def test_pilot_commit_until_its_data_are_used_up(task, tmp_path):
    """Every prompt with a correct pilot survives and is evicted once it is trained, so hopeless prompts are left over.
    With importance correction, and several workers of each kind."""
    overrides = ["rollout_policy.n_pilot=6", "rollout_policy.n_commit=2", "rollout_policy.p_solve=0.01"]
    overrides += ["rollout_policy.p_lower=0.01", "rollout_policy.p_upper=1", "rollout_policy.max_rounds=2"]
    overrides += ["data.train_max_samples=48", "algorithm.rollout_correction.rollout_is=token"]
    overrides += ["trainer.total_training_steps=50", "trainer.save_freq=40", "trainer.test_freq=40"]
    run = TrainingRun(task, "pilot_commit", tmp_path, *overrides, *SEVERAL_WORKERS, forked=True)
    assert run.end() == DataUsedUp.exit_code, run.log[-6000:]
    steps = run.steps()
    last = max(steps)
    assert list(steps) == list(range(1, last + 1)) and 4 <= last <= 48 // 4
    assert_books_balance(steps)
    assert steps[last]["data/epoch"] > 1
    steady = [metrics for metrics in steps.values() if metrics["pilot_commit/rounds"] == 0]
    assert steady, "no step was filled from the buffer alone"
    for metrics in steady:
        assert metrics["rollouts/sampled"] == 12 * 6 + 4 * 2  # b_g n_pilot + b_t n_commit
    for metrics in steps.values():
        assert metrics["allocation/min"] == metrics["allocation/max"] == 8
        assert metrics["off_policy/delay_max"] <= 4
        assert "rollout_corr/rollout_is_mean" in metrics
    stale = [metrics for metrics in steady if metrics["off_policy/delay_max"] >= 1]
    assert stale and all(metrics["training/rollout_probs_diff_max"] > 1e-3 for metrics in stale)
    assert optimizer_steps(run.checkpoints, last) == last * UPDATES
    said = [line for line in run.log.splitlines() if "the data is used up: " in line]
    assert said and f"step {last} is the last of this run, since step {last + 1}: no prompt survived" in said[-1]
    assert "error: " not in said[-1]
    saved = load_state(run.checkpoints / f"global_step_{last}")
    # A survivor that no step chose becomes too old when the step begins that cannot be filled.
    assert saved["ledger"]["buffered"] == 0
    assert saved["ledger"]["step"].get("rollouts/discarded_stale", 0) == steps[last]["rollouts/buffered"]
    assert json.loads(json.dumps(saved))["step"] == last + 1  # has begun, and could not be filled
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert any(line["step"] == last and any("val-core" in name for name in line["data"]) for line in lines)
    run.assert_requests_replay()
