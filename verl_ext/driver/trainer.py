"""verl's trainers, with a rollout policy to choose the rollouts to generate and the groups to train on."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayResourcePool
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_ext.checks import InvalidValue
from verl_ext.controller import WHY_ROLLOUTS_FAIL, RolloutController
from verl_ext.driver.agent_loop import WaveManager
from verl_ext.driver.allocation_table import AllocationTables
from verl_ext.driver.checkpoint import (
    BadCheckpoint,
    begin_anew,
    check_owner,
    claim,
    load_state,
    prune,
    save_state,
    unloadable,
    unwritten,
    weights_before_kept,
    weights_to_keep,
)
from verl_ext.driver.cluster import check_queue_full
from verl_ext.driver.liveness import EngineWatch, check_workers, forget_workers, note_nodes, note_workers
from verl_ext.driver.prompt_data import PromptDataset, PromptTexts, endless_rows, fetch, prompt_loader
from verl_ext.driver.replay_buffer import PARTITION, GroupReplayBuffer, set_aside
from verl_ext.driver.rows import PREFIX, ROLLOUTS, SAMPLING, SESSION_OFFSET
from verl_ext.driver.step_line import VALIDATION_FAILED, step_line
from verl_ext.driver.stop import stop_requested
from verl_ext.driver.stoppable import StoppableTrainer
from verl_ext.driver.update import GroupUpdates
from verl_ext.driver.validation_metrics import bootstrap_at_once
from verl_ext.driver.weight_sync import WeightTurns
from verl_ext.errors import BadConfig, CannotFillBatch, EveryRolloutFailed
from verl_ext.policy import Group, Prompt, RolloutPolicy
from verl_ext.prompts import RowKey
from verl_ext.record import RecordingController

logger = logging.getLogger(__name__)


class PolicyTrainer(StoppableTrainer, AllocationTables, GroupUpdates, WeightTurns):
    """Base class of the trainers of all modes; comes before verl's trainer in the method resolution order.

    verl's ``fit`` and ``step`` run unchanged. :meth:`prepare_step` asks the policy, and so does the replay buffer while
    verl waits for rollouts. The trainer is also the controller's :class:`~verl_ext.controller.Engine`.
    """

    drain: bool  # whether every rollout must have finished before the update
    budget_spent: int | None = None  # the rollout budget, once its last step is saved
    _budget_step: int | None = None  # the last step within the budget, once known
    _owner: str | None = None  # this start, once it owns the folder of checkpoints

    def __init__(self, config):
        self.policy: RolloutPolicy = hydra.utils.instantiate(config.rollout_policy)
        self._trained: KVBatchMeta | None = None  # the batch of the step, once it is trained
        super().__init__(config)

    # ---- data ----

    def _build_replay_buffer(self) -> GroupReplayBuffer:
        driver, sampler = self.config.rollout_driver, self.config.trainer.v1.sampler
        return GroupReplayBuffer(
            poll_interval=driver.poll_interval,
            stall_timeout=driver.stall_timeout,
            drain=self.drain,
            drop_diverged=driver.on_divergence == "drop",
            trainer_mode=self.trainer_mode,
            trainer_config={},
            max_off_policy_threshold=None,  # delay is the policy's business
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
        )

    def _init_dataloader(self) -> None:
        try:
            super()._init_dataloader()
        except ValueError:  # a data loader refuses an empty data set, so both sizes are checked first
            if hasattr(self, "val_dataset"):
                self._check_prompts()
            raise
        self._check_prompts()
        if self.total_training_steps > self.steps_per_epoch * self.config.trainer.total_epochs:
            # verl also stops after total_epochs of train_batch_size prompts, without validating or saving.
            with open_dict(self.config):
                self.config.trainer.total_epochs = math.ceil(self.total_training_steps / self.steps_per_epoch)
        prompts = PromptDataset(self.train_dataset)
        self.train_dataloader = prompt_loader(prompts, self.train_dataloader.sampler)
        threads = torch.get_num_threads()
        # The policy may embed all prompts. Ray gives the task runner one thread, and all other parts of the run wait.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            self.policy.start_run(self.total_training_steps, PromptTexts(self.train_dataset))
        except InvalidValue as error:  # such as a file of features for another number of prompts
            raise BadConfig(str(error)) from error
        finally:
            torch.set_num_threads(threads)
        rows = endless_rows(self.train_dataloader)
        self.controller = self._make_controller(rows, len(prompts))
        self.replay_buffer.controller = self.controller

    def _check_prompts(self) -> None:
        size, remedy = self.config.data.train_batch_size, "use more data or raise data.max_prompt_length"
        if len(self.train_dataset) < size:
            raise BadConfig(
                f"data.train_files holds {len(self.train_dataset)} prompts after filtering, a training step needs "
                f"data.train_batch_size={size} different prompts: {remedy}"
            )
        if not len(self.val_dataset):
            raise BadConfig(f"data.val_files holds 0 prompts after filtering, verl needs at least one: {remedy}")

    def _make_controller(self, rows: Iterator[Prompt], rows_per_epoch: int) -> RolloutController:
        record = self.config.rollout_driver.record
        if record is None:
            return RolloutController(self.policy, rows, rows_per_epoch, engine=self)
        config = OmegaConf.to_container(self.config.rollout_policy, resolve=True)
        return RecordingController(self.policy, rows, rows_per_epoch, self, path=record, config=config)

    def on_init_end(self) -> None:
        note_nodes(group for pool in self._pools() for group in pool.get_placement_groups())
        super().on_init_end()

    def _pools(self) -> list[RayResourcePool]:
        """The run's pools of devices."""
        return list(self.resource_pool_manager.resource_pool_dict.values())

    def fit(self, agent_loop_manager: WaveManager) -> None:
        note_workers()
        gc.freeze()  # each step makes Python search for garbage; objects that exist already are left out from here on
        try:
            self._fit_until_used_up(agent_loop_manager)
        except Exception as error:
            check_workers()  # a lost worker is the cause of any other error, so report the loss instead
            if not isinstance(error, ray.exceptions.RayActorError):
                forget_workers()  # verl now stops the workers, and the watch would report them as lost
            check_queue_full(error, self.config)
            raise
        forget_workers()

    def _fit_until_used_up(self, agent_loop_manager: WaveManager) -> None:
        """verl's ``fit``; data that is used up after the first step ends the run.

        If most rollouts of the step that cannot be filled have failed, the failures are at fault, and not the data.
        """
        try:
            with EngineWatch():
                super().fit(agent_loop_manager)
        except CannotFillBatch as error:
            check_workers()
            counts = self.controller.ledger.step
            sampled, failed = counts["rollouts/sampled"], counts["rollouts/failed"]
            sentence = f"{error}; {failed:,} of its {sampled:,} rollouts failed" if failed else str(error)
            if 2 * failed > sampled:
                raise EveryRolloutFailed(f"{sentence}; {WHY_ROLLOUTS_FAIL}") from error
            if self.global_steps <= 1:  # nothing was learned, so the settings are at fault
                raise CannotFillBatch(sentence) from error
            self.end_used_up(CannotFillBatch(f"{sentence}; its {sampled:,} rollouts are in the metrics of no step"))

    # ---- methods called by the controller ----

    def submit(self, requests: list[tuple[Group, int]]) -> None:
        """Start generating the requests in one submission: each prompt carries its own number of rollouts."""
        groups = [group for group, _ in requests]
        fields = collate_fn(fetch(self.train_dataset, (group.prompt for group in groups)))
        fields["uid"] = np.array([group.id for group in groups], dtype=object)
        batch = tu.get_tensordict(fields)
        batch[ROLLOUTS] = torch.tensor([count for _, count in requests])
        batch[SESSION_OFFSET] = torch.tensor([len(group.rollouts) for group in groups])
        prefixes = [{} if group.prefix is None else group.prefix.state_dict() for group in groups]
        tu.assign_non_tensor_stack(batch, PREFIX, prefixes)
        sampling = [{} if group.sampling is None else group.sampling.state_dict() for group in groups]
        tu.assign_non_tensor_stack(batch, SAMPLING, sampling)
        tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        self._submit_batch_to_rollout(batch)

    def release(self, groups: list[Group]) -> None:
        """Drop the groups' rows from the queue."""
        self.replay_buffer._clear_groups(PARTITION, {group.id for group in groups})

    def cancel(self, groups: list[Group]) -> None:
        """End the groups' rollouts in the agent-loop workers, and their requests in vLLM."""
        self.agent_loop_manager.cancel([group.id for group in groups])

    # ---- the step ----

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._trained = None
        self._trained = super().step(metrics, timing_raw)
        return self._trained

    def on_train_begin(self) -> None:
        """Submit no warm-up batches: the policy alone decides on rollouts. End the run if no step is left."""
        done, budget = self.global_steps - 1, self.config.rollout_driver.rollout_budget
        sampled = self.controller.ledger.total["rollouts/sampled"]
        if None not in (budget, self.budget_spent) and budget <= max(self.budget_spent, sampled):
            self.total_training_steps = done
            logger.warning(
                "nothing to train: rollout_driver.rollout_budget=%d was reached at step %d, with %d rollouts; raise it "
                "to go on",
                budget,
                done,
                sampled,
            )
            return
        self.budget_spent = None
        self._end_within_budget(done)
        if self.global_steps > self.total_training_steps:
            logger.warning(
                "nothing to train: the checkpoint is at step %d of %d; raise trainer.total_training_steps to go on",
                done,
                self.total_training_steps,
            )
        elif stop_requested():
            self.stop(after=self.global_steps - 1)

    def prepare_step(self) -> dict:
        self.replay_buffer._sync_metadata_from_transfer_queue()
        self.controller.begin_step(self.global_steps)
        return {}

    def _validate(self) -> dict[str, float]:
        """verl's metrics, and two counts: failed rollouts, which verl counts in ``acc`` only, as 0, and late rollouts,
        which have reward 0."""
        n, buffer = self.config.actor_rollout_ref.rollout.val_kwargs.n, self.replay_buffer
        before, late = buffer.validated, buffer.late
        metrics = super()._validate()
        failed = len(self.val_dataset) * n - (buffer.validated - before)
        return metrics | {VALIDATION_FAILED: float(failed), "val-aux/rollouts_late": float(buffer.late - late)}

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with bootstrap_at_once():
            return super()._val_metrics_update(*args, **kwargs)

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._note_taken()
        self._end_within_budget(done=self.global_steps)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        metrics.update(self._taken.metrics)
        budget = self.config.rollout_driver.rollout_budget
        logger.info(step_line(global_steps, self.policy.total_steps, metrics, budget))

    def _end_within_budget(self, done: int) -> None:
        """Make the next step the last if the count of rollouts after the next step is expected to be nearer to
        rollout_driver.rollout_budget than the count after the step after next."""
        budget, ledger = self.config.rollout_driver.rollout_budget, self.controller.ledger
        cost = self.policy.step_cost()
        # ``expected`` is half-way between the two counts, if each step samples as many rollouts as the last step did.
        # Before the first step, the policy says what a step costs.
        if done:
            expected = ledger.total["rollouts/sampled"] + 1.5 * ledger.step["rollouts/sampled"]
        else:
            expected = 0.0 if cost is None else 1.5 * cost.usual
        if budget is not None and expected > budget and done + 1 < self.total_training_steps:
            logger.info(
                "step %d is the last: its count is expected to be nearest to rollout_driver.rollout_budget=%d",
                done + 1,
                budget,
            )
            self.total_training_steps = self.policy.total_steps = done + 1
            self._budget_step = done + 1

    # ---- checkpoints ----

    def _save_checkpoint(self) -> None:
        run = Path(self.config.trainer.default_local_dir)
        if self._owner is None:
            self._owner = claim(run)
        else:
            check_owner(run, self._owner)
        # The policy's state goes first: verl's part ends by naming this checkpoint the latest, so a kill in between
        # leaves the checkpoint before as the latest.
        folder, trainer = self._checkpoint_folder(), self.config.trainer
        named = Path(trainer.resume_from_path) if trainer.resume_from_path else None
        if self.global_steps == self._budget_step:
            self.budget_spent = self.config.rollout_driver.rollout_budget
        begin_anew(folder, self._saved_step)
        save_state(folder, self.controller.state_dict() | {"budget_spent": self.budget_spent, **self._kl_state()})
        reads_experts = self.config.actor_rollout_ref.rollout.get("moe_load_balance_metrics_interval", 0) > 0
        with set_aside(self._trained, unread=() if reads_experts else ("routed_experts",)):
            try:
                with weights_before_kept(trainer):
                    super()._save_checkpoint()
            except (ray.exceptions.RayTaskError, OSError, RuntimeError) as error:  # in a worker, here, by torch
                raise unwritten(folder, error) from error
        prune(folder, weights_to_keep(trainer), but=named)

    def _kl_state(self) -> dict[str, float]:
        """The coefficient of ``use_kl_in_reward``, if verl adapts it: verl saves it nowhere."""
        algorithm = self.config.algorithm
        is_adapted = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
        return {"kl_coef": float(self.kl_ctrl_in_reward.value)} if is_adapted else {}

    def _load_checkpoint(self) -> None:
        mode, weights_alone = self.trainer_mode, self.config.trainer.val_only
        if self.config.trainer.save_freq > 0 and not weights_alone:  # other runs own the folder from their first save
            self._owner = claim(Path(self.config.trainer.default_local_dir))
        if weights_alone:
            self.trainer_mode = "sync"  # verl then restores no queue, which may need other storage units
        try:
            super()._load_checkpoint()
        finally:
            self.trainer_mode = mode
        if not weights_alone and self.global_steps > 0:
            folder = self._checkpoint_folder(resuming=True)
            state = load_state(folder)
            try:
                self.controller.load_state_dict(state)
            except Exception as error:  # a policy that was edited since the save can fail in any way
                raise unloadable(folder, self.controller.policy_name, error) from error
            self.budget_spent = state.get("budget_spent")
            if self._kl_state() and "kl_coef" in state:
                self.kl_ctrl_in_reward.value = state["kl_coef"]
            self._loaded_step = self._saved_step = self.global_steps

    def _checkpoint_folder(self, resuming: bool = False) -> Path:
        trainer = self.config.trainer
        if resuming and trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path)
        return Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _reissue_inflight_prompts(self, partition_id: str = PARTITION) -> int:
        """Remove rows that belong to no restored group or to an unfinished wave, and generate these waves anew.

        The restored queue also holds trained rows not yet cleared, and parts of unfinished waves.
        """
        self.replay_buffer.end_cancelled(partition_id)
        rows = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        live = self.controller.live
        finished: dict[str, set[int]] = {uid: set() for uid in live}  # a rollout can have several rows
        foreign = []
        for key, tag in rows.items():
            uid, session, _ = RowKey.parse(key)
            unfinished = uid in live and not tag.get("is_prompt") and session >= len(live[uid].rollouts)
            if uid not in live or (unfinished and uid not in self.controller.cancelled):
                foreign.append(key)
            elif not (unfinished or tag.get("is_prompt")):
                finished[uid].add(session)
        lost = [uid for uid, sessions in finished.items() if len(sessions) < len(live[uid].usable)]
        if lost:
            raise BadCheckpoint(
                f"the restored queue misses rollouts of {len(lost)} groups (first: {lost[0]}); "
                "resume from an earlier checkpoint with trainer.resume_mode=resume_path"
            )
        if foreign:
            tq.kv_clear(keys=foreign, partition_id=partition_id)
        return self.controller.resubmit_unfinished()
