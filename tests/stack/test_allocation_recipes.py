"""HORA, VIP and Knapsack-RL end to end on verl, Ray, vLLM and FSDP."""

from __future__ import annotations

import pytest
from support.training import TrainingRun, assert_books_balance, optimizer_steps

from verl_ext.driver.checkpoint import load_state

pytestmark = pytest.mark.ray
BATCH, ROLLOUTS, UPDATES = 4, 8, 2


def assert_budget_is_spent(steps: dict[int, dict[str, float]], batch: int = BATCH) -> None:
    assert_books_balance(steps)
    for step, metrics in steps.items():
        assert metrics["rollouts/sampled"] == metrics["rollouts/trained"] == batch * ROLLOUTS, f"step {step}"
        assert metrics["allocation/mean"] == ROLLOUTS
        assert metrics["allocation/seconds"] > 0


def train(task, recipe: str, folder, steps: int, *overrides: str, batch: int = BATCH) -> tuple[dict, TrainingRun]:
    run = TrainingRun(
        task,
        recipe,
        folder,
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"data.train_batch_size={batch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch // UPDATES}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        *overrides,
        forked=True,
    )
    metrics = run.finish()
    assert list(metrics) == list(range(1, steps + 1))
    assert_budget_is_spent(metrics, batch)
    assert optimizer_steps(run.checkpoints, steps) == steps * UPDATES
    run.assert_requests_replay()
    return metrics, run


def test_hora_warms_up_and_then_allocates(task, tmp_path):
    """With shards of six prompts, so the shards differ in their number of successes."""
    warm_up = ["rollout_policy.warm_up_component=acc", "rollout_policy.warm_up_threshold=0"]
    groups = ["rollout_policy.G0=4", "rollout_policy.shards=2", "rollout_policy.warm_up_cycles=2"]
    steps, _ = train(task, "hora", tmp_path, 4, *groups, *warm_up, batch=12)
    for step in (1, 2):
        assert steps[step]["allocation/min"] == steps[step]["allocation/max"] == ROLLOUTS
    for step in (3, 4):
        assert steps[step]["hora/warm_up"] == 0 and steps[step]["allocation/min"] >= 4
        shares = [value for name, value in steps[step].items() if name.startswith("hora/share_of_rollouts_c")]
        assert sum(shares) == pytest.approx(1)
    assert any(steps[step]["allocation/min"] < steps[step]["allocation/max"] for step in (3, 4))


def test_vip_predicts_from_sentence_embeddings_that_are_made_once(task, tmp_path):
    steps, _ = train(
        task, "vip", tmp_path, 4, f"+rollout_policy.estimator_options.cache={tmp_path}/embeddings", batch=8
    )
    assert steps[1]["allocation/min"] == steps[1]["allocation/max"]  # the prior says one half for all
    assert "vip/prediction_correlation" not in steps[1]
    later = [metrics for step, metrics in steps.items() if step > 1]
    assert any("vip/prediction_correlation" in metrics for metrics in later)  # undefined where all rates are the same
    assert any(metrics["allocation/min"] < metrics["allocation/max"] for metrics in later)
    assert all(0 <= metrics["vip/prediction_mae"] <= 1 for metrics in later)
    assert len(list((tmp_path / "embeddings").glob("*.npy"))) == 1


def test_knapsack_is_uniform_until_rates_are_known(task, tmp_path):
    steps, run = train(task, "knapsack", tmp_path, 6, "data.train_max_samples=8")  # two steps an epoch
    for step in (1, 2):
        assert steps[step]["allocation/min"] == steps[step]["allocation/max"] == ROLLOUTS
    assert any(metrics["allocation/min"] < metrics["allocation/max"] for metrics in steps.values())
    state = load_state(run.checkpoints / "global_step_6")["policy"]["state"]
    assert len(state["estimator"]["estimator"]["groups"]) == 8
    assert sum(map(sum, state["transitions"])) == 6 * BATCH - 8  # every prompt but for its first time
