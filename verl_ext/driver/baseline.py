"""Advantages of trained rows relative to all rollouts of their group, trained or not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage

from verl_ext.policy import Group


def advantages_over_all(groups: Sequence[Group], algorithm: DictConfig) -> dict[tuple[str, int], float]:
    """Advantages by (group id, index of the rollout), for the groups of which only some rollouts are trained.

    verl's own function is called with all usable rollouts as responses of one token, since the queue holds the trained
    rows alone. This is exact for estimators that read nothing but the rewards of a group.

    Args:
        groups: the batch.
        algorithm: verl's section of this name.
    """
    rollouts = [
        (group.id, index, rollout.reward)
        for group in groups
        if group.trained is not None
        for index, rollout in enumerate(group.rollouts)
        if not rollout.failed
    ]
    if not rollouts:
        return {}
    names, indices, rewards = zip(*rollouts, strict=True)
    scores = torch.tensor(rewards, dtype=torch.float32)[:, None]
    data = DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": torch.ones_like(scores)},
        non_tensors={"uid": np.array(names, dtype=object)},
    )
    data = compute_advantage(
        data,
        adv_estimator=algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    return dict(zip(zip(names, indices, strict=True), data.batch["advantages"][:, 0].tolist(), strict=True))
