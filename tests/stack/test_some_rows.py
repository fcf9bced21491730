"""A policy that trains on some rollouts of its groups, end to end on verl, Ray, vLLM and FSDP."""

from __future__ import annotations

import pytest
from support.training import TrainingRun, assert_books_balance, optimizer_steps

pytestmark = pytest.mark.ray
BATCH, TRAINED, ROUND, UPDATES = 4, 4, 6, 2


def test_reinforce_ada_trains_some_rollouts_with_the_baseline_of_all(task, tmp_path):
    """Waves until a condition holds, rows that leave the queue, and advantages relative to rewards of dropped rows."""
    run = TrainingRun(
        task,
        "reinforce_ada",
        tmp_path,
        f"actor_rollout_ref.rollout.n={TRAINED}",
        f"rollout_policy.M={ROUND}",
        "rollout_policy.N=3",
        "trainer.total_training_steps=4",
        "trainer.save_freq=4",
        forked=True,
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3, 4]
    assert_books_balance(steps)
    for metrics in steps.values():
        assert metrics["rollouts/trained"] == BATCH * TRAINED
        assert metrics["rollouts/sampled"] == BATCH * ROUND * metrics["reinforce_ada/rounds_mean"]
        assert metrics["rollouts/discarded_not_trained"] == metrics["rollouts/sampled"] - BATCH * TRAINED
        assert metrics["off_policy/delay_max"] == 0 and metrics["training/rollout_probs_diff_max"] < 1e-3
    assert any(metrics["reinforce_ada/rounds_mean"] > 1 for metrics in steps.values())
    assert any(metrics["actor/grad_norm"] > 0 for metrics in steps.values())
    assert optimizer_steps(run.checkpoints, 4) == 4 * UPDATES
    run.assert_requests_replay()
