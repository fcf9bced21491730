"""The verdict's way to the reward function, through verl's own reward manager."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

from verl_ext.data.swe_reward import SANDBOX_ENDED, VERDICT, compute_score

NOTHING = {"score": 0.0, "acc": 0.0, "submitted": 0.0, SANDBOX_ENDED: 0.0, "timed_out": 0.0, "verifier_error": 0.0}


@pytest.mark.parametrize(
    ("extra_fields", "score"),
    [
        ({VERDICT: True, "turn_scores": []}, NOTHING | {"score": 1.0, "acc": 1.0, "submitted": 1.0}),
        ({VERDICT: False}, NOTHING | {"submitted": 1.0}),
        ({VERDICT: False, "timed_out": 1.0}, NOTHING | {"submitted": 1.0, "timed_out": 1.0}),
        ({VERDICT: False, "verifier_error": 1.0}, NOTHING | {"submitted": 1.0, "verifier_error": 1.0}),
        ({VERDICT: False, SANDBOX_ENDED: True}, NOTHING | {SANDBOX_ENDED: 1.0}),
        ({}, NOTHING),
    ],
)
def test_what_a_tool_leaves_in_the_extra_fields_is_what_the_reward_sees(extra_fields, score):
    """The row as sent by verl's agent loop worker (``AgentLoopWorker._compute_score``)."""
    row = {
        "data_source": "r2e_gym/sympy",
        "reward_model": {"style": "rule", "ground_truth": "0a1b"},
        "extra_info": {"index": 3},
    }
    fields = {name: np.array([value], dtype=object) for name, value in row.items()}
    fields |= {"__num_turns__": np.array([5]), "tool_extra_fields": np.array([extra_fields], dtype=object)}
    tokens = torch.ones(1, 4, dtype=torch.int64)
    batch = TensorDict({"responses": tokens[:, :2], "attention_mask": tokens}, batch_size=1)

    async def reward() -> dict:
        tokenizer = SimpleNamespace(decode=lambda *_, **__: f"{VERDICT}: true")
        manager = NaiveRewardManager(config=None, tokenizer=tokenizer, compute_score=compute_score)
        return await manager.run_single(DataProto(batch=batch, non_tensor_batch=fields))

    result = asyncio.run(reward())
    assert result == {"reward_score": score["score"], "reward_extra_info": score}


def test_without_any_information_nothing_was_submitted():
    assert compute_score("r2e_gym/sympy", "text", "0a1b") == NOTHING
