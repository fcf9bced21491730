"""Prefix Sampling end to end on verl, Ray, vLLM and FSDP."""

from __future__ import annotations

import pytest
from support.training import TrainingRun, assert_books_balance, optimizer_steps

from verl_ext.driver.checkpoint import load_state

pytestmark = pytest.mark.ray
BATCH, ROLLOUTS, UPDATES, STEPS = 8, 8, 2, 5


def test_prefixes_of_one_step_are_replayed_in_the_next(task, tmp_path):
    run = TrainingRun(
        task,
        "prefix_sampling",
        tmp_path,
        f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // UPDATES}",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        forked=True,
    )
    steps = run.finish()
    assert list(steps) == list(range(1, STEPS + 1))
    assert_books_balance(steps)
    for step, metrics in steps.items():
        assert metrics["rollouts/sampled"] % (BATCH * ROLLOUTS) == 0  # one round, unless no group had any signal
        assert metrics["groups/effective_ratio"] == 1 and metrics["rollouts/failed"] == 0
        # A prefix token has no log-probability from vLLM: the stored value agrees only where the mask excludes it.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        if step > 1:
            assert metrics["prefix_sampling/rerollouts"] == steps[step - 1]["prefix_sampling/store"]
    assert max(metrics["prefix_sampling/rerollouts"] for metrics in steps.values()) > 0
    last = steps[STEPS]
    assert last["tokens/prefix_total"] > 0
    seen = sum(value for name, value in last.items() if name.startswith("prefix_sampling/from_k"))
    assert seen == sum(metrics["prefix_sampling/rerollouts"] for metrics in steps.values())
    saved = load_state(run.checkpoints / f"global_step_{STEPS}")["policy"]["state"]
    assert len(saved["store"]) == last["prefix_sampling/store"]
    assert optimizer_steps(run.checkpoints, STEPS) == STEPS * UPDATES
    run.assert_requests_replay()


def test_an_agent_replays_its_interactions_and_divergence_is_dropped(agent_task, tmp_path):
    """verl's own tool agent. Most tasks answer a repeated step of a prefix differently. The training ends once some
    prefixes have diverged and others have not."""
    run = TrainingRun(
        agent_task,
        "prefix_sampling",
        tmp_path,
        f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // UPDATES}",
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.max_model_len=224",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={agent_task.folder}/data/tools.yaml",
        "reward.custom_reward_function.path=pkg://verl_ext.data.sql_tasks",
        "rollout_driver.agent_timeout=60",
        "trainer.v1.trainer_mode=colocate_async",
        "rollout_policy.initial_ratio=0.9",
        "trainer.total_training_steps=8",
        forked=True,
    )

    def some_diverged(steps):
        last = steps[max(steps)] if steps else {}
        return 0 < last.get("rollouts/diverged_total", 0) < last["rollouts/with_prefix_total"]

    steps = run.wait_until(some_diverged)
    run.process.terminate()
    run.end()
    assert list(steps) == list(range(1, len(steps) + 1))
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["rollouts/sampled"] % (BATCH * ROLLOUTS) == 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-3  # over several turns, without the turns of prefixes
        assert metrics["rollouts/failed"] == metrics.get("rollouts/diverged", 0)
    replayed = ROLLOUTS * sum(metrics["prefix_sampling/rerollouts"] for metrics in steps.values())
    assert steps[len(steps)]["rollouts/with_prefix_total"] <= replayed
