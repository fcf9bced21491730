"""Logs of a step: a table of its prompts and their rollouts, and the verdicts in verl's log of trained rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking

from verl_ext.controller import RolloutController
from verl_ext.driver.update import Taken
from verl_ext.policy import Group
from verl_ext.prompts import RowKey

NAME = "allocation/prompts"  # in the tracker


class AllocationTables(PPOTrainer):
    """Writes a table every ``rollout_driver.log_allocation_freq`` steps, and verdicts as ``acc`` in the rollout log.

    verl's log holds scores only, and a score can be more than a verdict: a format reward, an overlong penalty.
    """

    controller: RolloutController
    _finished_before: Mapping[str, int] | None = None  # by group, its rollouts of earlier steps
    _taken = Taken({}, (), pd.DataFrame(), {})

    def on_step_begin(self) -> None:
        super().on_step_begin()
        if self._finished_before is None:
            self._finished_before = self._finished()

    def _note_taken(self) -> None:
        """Note the step whose batch has just been taken."""
        step, controller, freq = self.global_steps, self.controller, self.config.rollout_driver.log_allocation_freq
        table = pd.DataFrame()
        if freq > 0 and step % freq == 0:
            table = allocation_table(step, controller, self._finished_before)
        verdicts = {
            group.id: [rollout.correct for rollout in group.rollouts]
            for group, fate in controller.ledger.left
            if fate == "trained"
        }
        self._taken = Taken(controller.metrics(), controller.batch, table, verdicts)
        self._finished_before = self._finished()  # the next step may begin at once, and discard groups

    def _finished(self) -> dict[str, int]:
        return {name: len(group.rollouts) for name, group in self.controller.live.items()}

    def _dump_generations(
        self, inputs: list, outputs: list, gts: list, scores: list, reward_extra_infos_dict: dict, dump_path: str
    ) -> None:
        rows = [RowKey.parse(key) for key in reward_extra_infos_dict["uid"]]
        of_group = self._taken.verdicts
        if any(row.group in of_group for row in rows):  # not a validation
            verdicts = [of_group[row.group][row.session] if row.group in of_group else None for row in rows]
            reward_extra_infos_dict = {**reward_extra_infos_dict, "acc": verdicts}  # None for rows that pad the batch
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        table = self._taken.table
        if table.empty:
            return
        track(self.logger, table, global_steps)
        if self.config.trainer.rollout_data_dir:
            folder = Path(self.config.trainer.rollout_data_dir) / "allocation"
            folder.mkdir(parents=True, exist_ok=True)
            table.to_json(folder / f"{global_steps}.jsonl", orient="records", lines=True)


def allocation_table(step: int, controller: RolloutController, finished_before: Mapping[str, int]) -> pd.DataFrame:
    """One row for each group that left in this step, and for each buffered group.

    The sums of ``sampled`` and ``trained`` are the step's metrics ``rollouts/sampled`` and ``rollouts/trained``.

    Columns:
        step: the training step.
        prompt: :attr:`verl_ext.policy.Prompt.id`.
        row: of the prompt in the training data.
        data_source: of the prompt.
        sampled: rollouts of the group that finished in this step, failed rollouts included.
        rollouts: finished rollouts of the group, those of earlier steps and failed rollouts included.
        trained: rollouts that this step trains on.
        success_rate: share of correct rollouts; missing without verdicts.
        reward_mean: over the rollouts that did not fail.
        fate: ``trained``, ``discarded_<reason>`` or ``buffered``.
    """
    buffered = [(group, "buffered") for group in controller.live.values() if group.rollouts]
    return pd.DataFrame(
        {"step": step, **_row(group, fate, finished_before.get(group.id, 0))}
        for group, fate in (*controller.ledger.left, *buffered)
    )


def _row(group: Group, fate: str, finished_before: int) -> dict[str, object]:
    verdicts, rewards = group.verdicts, group.rewards
    return {
        "prompt": group.prompt.id,
        "row": group.prompt.row,
        "data_source": group.prompt.metadata.get("data_source"),
        "sampled": len(group.rollouts) - finished_before,
        "rollouts": len(group.rollouts),
        "trained": len(group.trained_rollouts) if fate == "trained" else 0,
        "success_rate": sum(verdicts) / len(verdicts) if verdicts else None,
        "reward_mean": rewards.mean() if rewards.size else None,
        "fate": fate,
    }


def track(tracking: Tracking, table: pd.DataFrame, step: int) -> None:
    """Log the table to W&B as a table, and to TensorBoard as text."""
    loggers = tracking.logger
    if "wandb" in loggers:
        shown = table.astype(object).where(table.notna(), None)  # JSON has no nan
        tracking.log({NAME: loggers["wandb"].Table(dataframe=shown)}, step, backend=["wandb"])
    if "tensorboard" in loggers:  # shows Markdown
        header, rows = table.to_csv(sep="|", index=False).split("\n", 1)
        text = "\n".join((header, "|".join(["---"] * table.shape[1]), rows))
        loggers["tensorboard"].writer.add_text(NAME, text, step)
