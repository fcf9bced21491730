"""The trainers of verl's three modes, under the names with which verl finds them."""

from __future__ import annotations

import logging

from omegaconf import open_dict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayResourcePool
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_ext.driver.stop import stop_requested
from verl_ext.driver.trainer import PolicyTrainer
from verl_ext.policy import MODES

# The user's trainer.v1.trainer_mode -> the name our trainer is registered under. Any name but "sync" makes verl keep
# prompts in the queue and save the queue in checkpoints; both are needed to carry groups across steps.
TRAINER_MODES = {mode: f"policy_{mode}" for mode in MODES}


@register_trainer(TRAINER_MODES["sync"])
class PolicyTrainerSync(PolicyTrainer, PPOTrainerSync):
    """Engines sleep during the update, so every rollout in generation must finish first."""

    drain = True


@register_trainer(TRAINER_MODES["colocate_async"])
class PolicyTrainerColocateAsync(PolicyTrainer, PPOTrainerColocateAsync):
    """When the batch is complete, unfinished rollouts are interrupted; they continue with the next weights."""

    drain = False


@register_trainer(TRAINER_MODES["separate_async"])
class PolicyTrainerSeparateAsync(PolicyTrainer, PPOTrainerSeparateAsync):
    """Engines on separate devices generate while the actor is trained.

    The next step begins as soon as this step's batch is taken, so the next step's first rollouts are trained with a
    delay of 1 policy version. Before a checkpoint the next step waits: the saved state lies between two steps, and the
    engines finish their rollouts.
    """

    drain = shares_devices = False
    begins_ahead = True
    _begun_ahead: int | None = None  # the last step that began while the step before was trained

    def __init__(self, config):
        with open_dict(config):  # verl asserts this value: weights are sent after the updates of one batch
            updates = config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size
            config.trainer.v1.separate_async.parameter_sync_step = updates
        super().__init__(config)

    def _setup(self) -> None:
        # With actor_rollout_ref.hybrid_engine=false, verl 0.9.1 calls logger.info with an argument of print and fails.
        verls = logging.getLogger(PPOTrainerSeparateAsync.__module__)
        level = verls.level
        verls.setLevel(logging.WARNING)
        try:
            super()._setup()
        finally:
            verls.setLevel(level)

    def _pools(self) -> list[RayResourcePool]:
        engines = self.standalone_server_manager.get_replicas()  # each engine has its own pool
        return [*super()._pools(), *(engine.resource_pool for engine in engines)]

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # verl's class first copies the model to host memory, for the later local updates of a step. A step has one.
        return super(PPOTrainerSeparateAsync, self)._compute_old_log_prob(batch, metrics)

    def prepare_step(self) -> dict:
        # self.controller.step would be wrong: if data was used up, a checkpoint holds the step that was not filled.
        return {} if self._begun_ahead == self.global_steps else super().prepare_step()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        if not self._saves_checkpoint() and not stop_requested():
            self._begun_ahead = self.global_steps + 1
            self.controller.begin_step(self._begun_ahead)

    def _save_late(self) -> None:
        if self.current_mode == HybridEngineMode.ROLLOUT:  # a validation has woken the engines on the actor's devices
            self.switch_to_trainer()
        super()._save_late()

    @property
    def _last_begun(self) -> int:  # if the next step has begun before the request to stop, the next step is the last
        return self.global_steps + (self._begun_ahead == self.global_steps + 1)

    def _saves_checkpoint(self) -> bool:
        """Whether verl saves a checkpoint after this step. After the last step verl always does."""
        save_freq = self.config.trainer.save_freq
        is_last = self.global_steps >= self.total_training_steps
        return is_last or (save_freq > 0 and self.global_steps % save_freq == 0)
