"""Numbers of workers of a run, by its nodes."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from support.configs import compose

AGENTS, REWARDS = "actor_rollout_ref.rollout.agent.num_workers", "reward.num_workers"
STORAGE = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
SEPARATE = "trainer.v1.trainer_mode=separate_async", "trainer.nnodes=2", "actor_rollout_ref.rollout.nnodes=6"


@pytest.mark.parametrize(
    ("overrides", "agents", "rewards", "storage"),
    [
        (["hardware=h200"], 8, 8, 8),
        (["hardware=a800", "trainer.nnodes=4"], 32, 32, 8),
        (["hardware=b200", "trainer.nnodes=8"], 64, 64, 16),
        (["hardware=h200", *SEPARATE], 64, 64, 16),
        (["hardware=h200", "trainer.nnodes=8", f"{REWARDS}=3", f"{STORAGE}=5"], 64, 3, 5),
        (["hardware=h200", "trainer.nnodes=many"], 8, 8, 8),  # the nodes are refused, not the workers
        (["hardware=verl", "trainer.nnodes=8"], 8, 8, 8),
        (["hardware=cpu", "trainer.nnodes=8"], 1, 1, 1),
    ],
)
def test_workers_grow_with_the_nodes_on_gpus(overrides, agents, rewards, storage):
    config = compose("grpo", *overrides)
    found = [OmegaConf.select(config, key) for key in (AGENTS, REWARDS, STORAGE)]
    assert found == [agents, rewards, storage]
