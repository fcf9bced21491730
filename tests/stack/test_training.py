"""Each recipe trains on the real stack: verl, Ray, TransferQueue, FSDP2 and vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.training import TrainingRun, assert_books_balance, optimizer_steps

from verl_ext.driver.checkpoint import load_state

pytestmark = pytest.mark.stack
YOUR_OWN_POLICY = Path(__file__).parents[2] / "docs/your_own_policy.md"
BROKEN_REWARDS = Path(__file__).parents[1] / "faults/rewards.py"
UPDATES = 2  # train_batch_size 4 / ppo_mini_batch_size 2
PILOT_COMMIT = ["rollout_policy.n_pilot=6", "rollout_policy.n_commit=2", "rollout_policy.p_solve=null"]
PILOT_COMMIT += ["rollout_policy.p_lower=0.15", "rollout_policy.p_upper=0.85"]


def test_grpo(tied_task, tmp_path):
    """With an output head that is the embedding, as in most small pretrained models: weight sync renews both."""
    run = TrainingRun(
        tied_task,
        "grpo",
        tmp_path,
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "trainer.test_freq=3",
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3]
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["rollouts/sampled"] == metrics["rollouts/trained"] == 4 * 4
        assert metrics["off_policy/delay_max"] == 0
        # vLLM samples from the weights that were just trained.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert optimizer_steps(run.checkpoints, 3) == 3 * UPDATES
    assert any(name.startswith("val-core/") for name in steps[3])
    assert "step 3/3 | reward" in run.log


def test_dapo_with_rewards_that_fail(task, tmp_path):
    """Three of ten raise, are NaN or infinite: those rollouts are counted as failed, and their groups are trained."""
    run = TrainingRun(
        task,
        "dapo",
        tmp_path,
        f"reward.custom_reward_function.path={BROKEN_REWARDS}",
        "reward.custom_reward_function.name=broken_at_times",
        "actor_rollout_ref.rollout.n=4",
        "rollout_policy.s=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3]
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["groups/effective_ratio"] == 1.0 and metrics["rollouts/buffered"] == 0
        assert metrics["rollouts/sampled"] == metrics["dapo/rounds"] * 2 * 4 * 4
        assert metrics["rollouts/failed"] >= 9  # of at least 32
        assert metrics["actor/grad_norm"] > 0
    assert optimizer_steps(run.checkpoints, 3) == 3 * UPDATES
    run.assert_requests_replay()


def test_a_policy_of_ones_own_with_groups_of_different_sizes(task, tmp_path):
    """The policy of docs/your_own_policy.md: two waves within a step, rows that no mini-batch size divides."""
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
        "trainer.total_training_steps=4",
        "trainer.save_freq=4",
        python_path=str(tmp_path),
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3, 4]
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["rollouts/sampled"] == 4 * 7  # the budget, to the unit
        assert metrics["allocation/min"] >= 3 + 4
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert any(metrics["rollouts/trained"] % 4 for metrics in steps.values()), "no step needed padding"
    assert optimizer_steps(run.checkpoints, 4) == 4 * 4


def test_pilot_commit_over_an_epoch_end_killed_and_resumed(task, tmp_path):
    """With importance correction. SIGKILL between two checkpoints: it goes on from the last one, as if nothing was."""
    overrides = [*PILOT_COMMIT, "algorithm.rollout_correction.rollout_is=token"]
    overrides += ["trainer.total_training_steps=12", "trainer.save_freq=2"]
    first = TrainingRun(task, "pilot_commit", tmp_path, *overrides)
    first.wait_for_step(5)
    first.kill()
    before = first.steps()
    saved = max(int(path.name.split("_")[-1]) for path in first.checkpoints.glob("global_step_*"))
    latest = int((first.checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert latest in (4, saved)
    state = load_state(first.checkpoints / f"global_step_{latest}")

    second = TrainingRun(task, "pilot_commit", tmp_path, *overrides)
    after = second.finish()
    assert list(after) == list(range(latest + 1, 13))
    resumed = after[latest + 1]
    for name in ("rollouts/sampled", "rollouts/trained", "tokens/sampled"):
        assert resumed[f"{name}_total"] - resumed[name] == before[latest][f"{name}_total"]
    assert before[latest]["rollouts/buffered"] == state["ledger"]["buffered"]
    assert len(state["policy"]["state"]["buffer"]["groups"]) == before[latest]["pilot_commit/buffer"]
    if before[latest]["pilot_commit/buffer"] >= 4:  # the buffered pilots themselves came back and were trained
        assert resumed["pilot_commit/rounds"] == 0 and resumed["off_policy/delay_max"] >= 1

    steps = {step: metrics for step, metrics in before.items() if step <= latest} | after
    assert_books_balance(steps)
    assert steps[12]["data/epoch"] > 1
    steady = [m for step, m in steps.items() if 1 < step < 12 and m["pilot_commit/rounds"] == 0]
    assert steady, "no step was filled from the buffer alone"
    for metrics in steady:
        assert metrics["rollouts/sampled"] == 12 * 6 + 4 * 2  # b_g n_pilot + b_t n_commit
    for metrics in steps.values():
        assert metrics["allocation/min"] == metrics["allocation/max"] == 8
        assert metrics["off_policy/delay_max"] <= 4
        assert "rollout_corr/rollout_is_mean" in metrics
    stale = [metrics for metrics in steady if metrics["off_policy/delay_max"] >= 1]
    assert stale and all(metrics["training/rollout_probs_diff_max"] > 1e-3 for metrics in stale)
    assert optimizer_steps(second.checkpoints, 12) == 12 * UPDATES
    last = load_state(second.checkpoints / "global_step_12")
    assert last["ledger"]["buffered"] == steps[12]["rollouts/buffered"]
    assert json.loads(json.dumps(last))["step"] == 12
    second.assert_requests_replay()


def test_pilot_commit_in_colocate_async(task, tmp_path):
    run = TrainingRun(
        task,
        "pilot_commit",
        tmp_path,
        *PILOT_COMMIT,
        "rollout_policy.s=6",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.total_training_steps=5",
        "trainer.save_freq=5",
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3, 4, 5]
    assert_books_balance(steps)
    assert all(metrics["off_policy/delay_max"] <= 4 for metrics in steps.values())
    assert optimizer_steps(run.checkpoints, 5) == 5 * UPDATES


def test_pilot_commit_with_engines_of_their_own(task, tmp_path):
    """separate_async: weights go over gloo, and the next step's pilots are generated while the actor trains."""
    run = TrainingRun(
        task,
        "pilot_commit",
        tmp_path,
        *PILOT_COMMIT,
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
        "trainer.total_training_steps=6",
        "trainer.save_freq=3",
        "trainer.test_freq=3",
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert_books_balance(steps)
    assert all(metrics["off_policy/delay_max"] <= 4 for metrics in steps.values())
    # Step 4 begins after a checkpoint: with fresh pilots, or with what an earlier step has left.
    assert any(metrics["off_policy/delay_max"] >= 1 for metrics in steps.values())
    assert optimizer_steps(run.checkpoints, 6) == 6 * UPDATES
    saved = load_state(run.checkpoints / "global_step_3")
    assert saved["step"] == 3 and saved["ledger"]["buffered"] == steps[3]["rollouts/buffered"]
    assert any(name.startswith("val-core/") for name in steps[6])
    run.assert_requests_replay()
