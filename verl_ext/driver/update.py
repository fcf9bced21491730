"""The update: advantages as the policy weighs them, and optimizer steps whose number does not depend on the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.errors import RunError
from verl_ext.policy import Group, RolloutPolicy
from verl_ext.prompts import RowKey
from verl_ext.weights import advantage_factors, are_of_one_size, mini_batch_of_rows, spread_padding

NO_LOSS_TOKEN = "must contain at least one valid token"  # in verl's error


class Taken(NamedTuple):
    """The step whose batch was taken last, as it was then: the next step may begin before this batch is trained.

    Attributes:
        metrics: of the controller.
        groups: the batch.
        table: see :func:`.allocation_table.allocation_table`; empty in a step without a table.
        verdicts: of a trained group's rollouts, by group.
    """

    metrics: Mapping[str, float]
    groups: Sequence[Group]
    table: pd.DataFrame
    verdicts: Mapping[str, list[bool | None]]


class GroupUpdates(PPOTrainer):
    """Scales verl's advantages by the weights of the policy's groups; groups of any size give the same number of
    optimizer steps.

    Attributes:
        policy: its ``prompt_weight`` and ``baseline`` hold for the update.
    """

    policy: RolloutPolicy
    _taken: Taken  # the step in training

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step and PPO epoch, for any number of rows."""
        return self.config.data.train_batch_size // self.config.actor_rollout_ref.actor.ppo_mini_batch_size

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        self._dp_size = dp_size  # verl asks before it computes advantages
        return dp_size * self.updates_per_step

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, **options) -> KVBatchMeta:
        """Spread the rows that pad the batch over the optimizer steps: whole steps could be padding otherwise."""
        batch = super()._balance_batch(batch, metrics, **options)
        padding = [tag.get("is_padding", False) for tag in batch.tags]
        if any(padding):
            batch.reorder(spread_padding(padding, self._dp_size, self.updates_per_step).tolist())
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        try:
            batch = super()._compute_advantage(batch, metrics)
        except ValueError as error:
            if NO_LOSS_TOKEN not in str(error):
                raise
            raise RunError(
                f"step {self.global_steps}: no token of the batch is in the loss, since every rollout was cut off: "
                "raise data.max_response_length or rollout_driver.agent_timeout, or set "
                "rollout_driver.compact_filtering=false"
            ) from error
        rows = [RowKey.parse(key) for key in batch.keys]
        groups = [
            None if tag.get("is_padding", False) else row.group for row, tag in zip(rows, batch.tags, strict=True)
        ]
        clip = self.config.rollout_driver.advantage_clip
        over_all = self.policy.baseline == "all"
        of_whole_groups = advantages_over_all(self._taken.groups, self.config.algorithm) if over_all else {}
        weights = {group.id: group.weight for group in self._taken.groups}
        rollouts = [row.session for row in rows]
        same_weight = are_of_one_size(groups, rollouts) and set(weights.values()) <= {1}
        if clip is None and not of_whole_groups and same_weight:
            return batch  # verl's advantages would not change
        fields = ["advantages", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        masks = data["response_mask"].unbind()
        factors = advantage_factors(
            groups,
            np.array([int(mask.sum()) for mask in masks]),
            mini_batch_of_rows(len(batch), self._dp_size, self.updates_per_step),
            prompt_weight=self.policy.prompt_weight,
            loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
            rollouts=rollouts,
        )
        factors *= [weights.get(group, 1.0) for group in groups]
        advantages = [
            (mask * of_whole_groups[row[:2]]).to(verls.dtype) if row[:2] in of_whole_groups else verls
            for row, mask, verls in zip(rows, masks, data["advantages"].unbind(), strict=True)
        ]
        if clip is not None:
            advantages = [row.clamp(-clip, clip) for row in advantages]
        scaled = [row * factor for row, factor in zip(advantages, factors.tolist(), strict=True)]
        data["advantages"] = torch.nested.as_nested_tensor(scaled, layout=torch.jagged)
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data.select("advantages"))
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Set the mini-batch size in rows, which fixes the number of optimizer steps.

        verl takes mini-batches of ppo_mini_batch_size · rollout.n rows, and groups differ in size.
        """
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        configured = actor.ppo_mini_batch_size, rollout.n
        actor.ppo_mini_batch_size, rollout.n = len(batch) // self.updates_per_step, 1
        try:
            return super()._update_actor(batch, metrics)
        finally:
            actor.ppo_mini_batch_size, rollout.n = configured


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
