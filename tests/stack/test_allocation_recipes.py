"""HORA, VIP and Knapsack-RL end to end on verl, Ray, vLLM and FSDP."""

from __future__ import annotations

import pytest
from support.training import TrainingRun, assert_books_balance, optimizer_steps

from verl_ext.driver.checkpoint import load_state

pytestmark = pytest.mark.stack
BATCH, ROLLOUTS, UPDATES = 4, 8, 2


def assert_budget_is_spent(steps: dict[int, dict[str, float]], batch: int = BATCH) -> None:
    assert_books_balance(steps)
    for step, metrics in steps.items():
        assert metrics["rollouts/sampled"] == metrics["rollouts/trained"] == batch * ROLLOUTS, f"step {step}"
        assert metrics["allocation/mean"] == ROLLOUTS
        assert metrics["allocation/seconds"] > 0


def killed_and_resumed(
    task, recipe: str, folder, *overrides: str, batch: int = BATCH
) -> tuple[dict, dict, TrainingRun]:
    """Four steps with a checkpoint after the second, SIGKILL in the third or fourth, then to the end."""
    overrides = [
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"data.train_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch // UPDATES}",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        *overrides,
    ]
    first = TrainingRun(task, recipe, folder, *overrides)
    first.wait_for_step(3)
    first.kill()
    second = TrainingRun(task, recipe, folder, *overrides)
    before, after = first.steps(), second.finish()
    assert list(after) == [3, 4]
    for steps in (before, after):
        assert_budget_is_spent(steps, batch)
    assert optimizer_steps(second.checkpoints, 4) == 4 * UPDATES
    second.assert_requests_replay()
    return before, after, second


def test_a_killed_hora_run_does_not_warm_up_again(task, tmp_path):
    """With shards of six prompts, so that they do not all have the same number of successes."""
    warm_up = ["rollout_policy.warm_up_component=acc", "rollout_policy.warm_up_threshold=0"]
    before, after, _ = killed_and_resumed(
        task,
        "hora",
        tmp_path,
        "rollout_policy.G0=4",
        "rollout_policy.shards=2",
        *warm_up,
        "rollout_policy.warm_up_cycles=2",
        batch=12,
    )
    for step in (1, 2):
        assert before[step]["allocation/min"] == before[step]["allocation/max"] == ROLLOUTS
    for metrics in after.values():
        assert metrics["hora/warm_up"] == 0 and metrics["allocation/min"] >= 4
        shares = [value for name, value in metrics.items() if name.startswith("hora/share_of_rollouts_c")]
        assert sum(shares) == pytest.approx(1)
    assert any(metrics["allocation/min"] < metrics["allocation/max"] for metrics in after.values())


def test_a_killed_vip_run_keeps_its_beliefs(task, tmp_path):
    """With sentence embeddings, made once."""
    cache = f"+rollout_policy.estimator_options.cache={tmp_path}/embeddings"
    before, after, _ = killed_and_resumed(task, "vip", tmp_path, cache)
    assert before[1]["allocation/min"] == before[1]["allocation/max"]  # the prior says one half for all
    assert "vip/prediction_correlation" not in before[1]
    # The first step after the restart predicts different rates: what the two before it taught is still there.
    assert "vip/prediction_correlation" in after[3]
    assert any(metrics["allocation/min"] < metrics["allocation/max"] for metrics in after.values())
    assert all(0 <= metrics["vip/prediction_mae"] <= 1 for metrics in after.values())
    assert len(list((tmp_path / "embeddings").glob("*.npy"))) == 1


def test_a_killed_knapsack_run_remembers(task, tmp_path):
    overrides = [
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "data.train_max_samples=8",  # two steps an epoch: from the third on, rates are known
        "trainer.total_training_steps=6",
        "trainer.save_freq=2",
    ]
    first = TrainingRun(task, "knapsack", tmp_path, *overrides)
    first.wait_for_step(3)
    first.kill()
    before = first.steps()
    latest = int((first.checkpoints / "latest_checkpointed_iteration.txt").read_text())
    saved = load_state(first.checkpoints / f"global_step_{latest}")["policy"]["state"]
    assert len(saved["estimator"]["estimator"]["groups"]) == 8

    second = TrainingRun(task, "knapsack", tmp_path, *overrides)
    after = second.finish()
    assert list(after) == list(range(latest + 1, 7))
    for steps in (before, after):
        assert_budget_is_spent(steps)
    assert before[1]["allocation/min"] == before[1]["allocation/max"] == ROLLOUTS  # the first epoch is uniform
    assert any(metrics["allocation/min"] < metrics["allocation/max"] for metrics in after.values())
    last = load_state(second.checkpoints / "global_step_6")["policy"]["state"]
    transitions = sum(map(sum, last["transitions"]))
    assert transitions == 6 * BATCH - 8  # every prompt but for its first time, across the restart
    assert optimizer_steps(second.checkpoints, 6) == 6 * UPDATES
    second.assert_requests_replay()


def test_an_unusual_pair_in_colocate_async(task, tmp_path):
    """HORA's two waves, priors remembered as by Knapsack-RL, divided as by VIP."""
    run = TrainingRun(
        task,
        "hora",
        tmp_path,
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "rollout_policy.G0=3",
        "rollout_policy.estimator=history",
        "rollout_policy.allocator=gradient_variance",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3]
    assert_budget_is_spent(steps)
    assert optimizer_steps(run.checkpoints, 3) == 3 * UPDATES
    run.assert_requests_replay()
