"""A trainer able to end early: on request (:mod:`.stop`, which imports no verl), or because its data is used up."""

from __future__ import annotations

import logging
from functools import cached_property

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.driver.stop import StopTime, stop_requested
from verl_ext.errors import CannotFillBatch, DataUsedUp

logger = logging.getLogger(__name__)


class StoppableTrainer(PPOTrainer):
    """Saves a checkpoint and ends when asked to, at any ``save_freq`` and ``total_training_steps`` of verl.

    This checkpoint too holds buffered and unfinished rollouts: the policy does not know about the end.
    """

    shares_devices = True  # whether engines are on the actor's devices, and sleep during the update
    begins_ahead = False  # whether a step can begin before the step before has ended
    stopped_after: int | None = None  # the last step done, once the run is stopped
    used_up: DataUsedUp | None = None  # set once the data cannot fill another step
    _saved_step: int | None = None  # the last step whose checkpoint is on disk
    _loaded_step: int | None = None  # the step of the checkpoint that the run resumed from

    @cached_property
    def _stop_time(self) -> StopTime:
        return StopTime(self.begins_ahead)

    def stop(self, after: int) -> None:
        """Begin no step after step ``after``."""
        self.stopped_after = self.total_training_steps = after

    def end_used_up(self, error: CannotFillBatch) -> None:
        """Save and validate the last trained step, as verl does after a last step, unless that has been done."""
        self.global_steps -= 1
        trainer, done = self.config.trainer, self.global_steps
        saves = trainer.save_freq > 0 and self._saved_step != done
        if saves:
            self._save_late()
        validated = trainer.val_before_train and self._loaded_step == done
        if trainer.test_freq > 0 and done % trainer.test_freq and not validated:
            if saves and self.shares_devices:
                super().on_step_end()  # wakes the engines
            self.on_validate_begin()
            metrics = self._validate()
            self.on_validate_end()
            self.logger.log(data=metrics, step=done)
        self._shutdown_dump_executor()
        self.used_up = DataUsedUp(f"the data is used up: step {done} is the last of this run, since {error}")

    def on_step_end(self) -> None:
        if self._is_asked():
            self.config.trainer.test_freq = -1  # time is short
        if not self._is_to_stop():
            return super().on_step_end()
        self._save_and_stop()  # the engines get no new weights

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        self._stop_time.note(timing_raw)
        self._stop_time.publish()
        if self._is_to_stop():  # the request came after on_step_end: validation can take minutes
            self._save_and_stop(late=True)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _save_late(self) -> None:
        """Save after ``on_step_end``, where verl never saves.

        First, engines on the actor's devices go to sleep, as before verl's own saving: Megatron needs their memory.
        """
        super().on_sample_end()
        self._save_checkpoint()

    @property
    def _last_begun(self) -> int:
        """The last step that has begun."""
        return self.global_steps

    def _is_asked(self) -> bool:
        """Whether the run has been asked to stop, and is to end before its last planned step."""
        return self.stopped_after is None and self._last_begun < self.total_training_steps and stop_requested()

    def _is_to_stop(self) -> bool:
        return self._last_begun == self.global_steps and self._is_asked()

    def _save_and_stop(self, late: bool = False) -> None:
        logger.info("asked to stop: step %d is the last of this run", self.global_steps)
        if self._saved_step != self.global_steps:
            self._save_late() if late else self._save_checkpoint()
        self.stop(after=self.global_steps)
