"""Waits for rollouts and hands them to the policy. The policy chooses the groups to train on."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_ext.controller import WHY_ROLLOUTS_FAIL, RolloutController
from verl_ext.driver.rows import (
    CANCELLED,
    DIVERGED,
    FAILED,
    GENERATED,
    LATE,
    REPLAYED,
    TRUNCATED,
    key_without_row,
)
from verl_ext.errors import EveryRolloutFailed, RunError
from verl_ext.policy import Group, Rollout, without_noise
from verl_ext.prompts import RowKey
from verl_ext.trajectory import Trajectory

logger = logging.getLogger(__name__)

PARTITION = "train"
POLL_SHARE = 4  # shortest sleep between two reads of the queue, in multiples of the time of a read
# Fields of a row for the update alone. verl makes the step's metrics and rollout logs of the other fields.
UPDATE_ONLY = {
    *("input_ids", "attention_mask", "position_ids", "loss_mask", "multi_modal_inputs", "log_probs", "entropy"),
    *("old_log_probs", "rollout_log_probs", "ref_log_prob", "rollout_is_weights", "teacher_ids", "teacher_logprobs"),
}


class GroupReplayBuffer(ReplayBuffer):
    """verl's replay buffer, but the policy chooses the groups. Validation is verl's own, with a time limit.

    Args:
        poll_interval: seconds between two reads of TransferQueue.
        stall_timeout: seconds without a finished rollout until the run ends with RunError.
        drain: return only when no rollout is being generated, because the engines will sleep. The last step always
            waits.
        drop_diverged: a rollout whose prefix diverged is a failed rollout.
        kwargs: as for verl's ``ReplayBuffer``.
    """

    controller: RolloutController  # set once the data is loaded

    def __init__(
        self, *, poll_interval: float, stall_timeout: float, drain: bool, drop_diverged: bool = True, **kwargs
    ):
        super().__init__(poll_interval=poll_interval, **kwargs)
        self.stall_timeout, self.drain, self.drop_diverged = stall_timeout, drain, drop_diverged
        self._shortest_interval = poll_interval
        self._step, self._last_progress = 0, 0.0  # of the current call of sample
        self._seen = 0, 0  # stored rows and ended prompts at the last look
        self.validated = 0  # rollouts of the validations so far, without the failed ones
        self.late = 0  # rollouts among them that took longer than rollout_driver.agent_timeout

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        self._step, self._seen, self._last_progress = global_steps, (0, 0), time.monotonic()
        if partition_id != PARTITION:
            batch, metrics = self._stored(*super().sample(global_steps, partition_id, batch_size))
            self.validated += len({RowKey.parse(key)[:2] for key in batch.keys})
            self.late += sum(tag.get(LATE, False) for tag in batch.tags)
            return batch, metrics
        # Rollouts still in generation after the last step would never be counted.
        drain = self.drain or global_steps >= self.controller.policy.total_steps
        groups: list[Group] = []
        last_debug = time.time()
        while True:
            started = time.perf_counter()
            self._sync_metadata_from_transfer_queue()
            finished = self.finished_waves()
            self.poll_interval = max(self._shortest_interval, POLL_SHARE * (time.perf_counter() - started))
            self.controller.finish_waves(finished)
            groups = groups or self.controller.take_batch()
            if groups and not (drain and self.controller.outstanding):
                self._drop_untrained(groups)
                ids = [group.id for group in groups]
                return self._materialize_batch(PARTITION, ids, self._in_random_order(ids)), {}
            if not groups:
                self.controller.check_progress()
            last_debug = self._wait_for_next_poll(PARTITION, last_debug)

    def _in_random_order(self, groups: list[str]) -> dict[str, dict]:
        """The rows of these groups with their tags, groups in a random order that depends on the step alone.

        verl takes rows in the order in which their rollouts finished: the first mini-batches of a step would hold the
        short responses, or the pilots. The rows of a group stay together, so mini-batches hold whole prompts where
        groups have one size.
        """
        shuffled = np.random.default_rng(self._step).permutation(sorted(groups)).tolist()
        place = {group: position for position, group in enumerate(shuffled)}
        rows = ((RowKey.parse(key), key, tag) for key, tag in self.partitions[PARTITION].items())
        ordered = sorted((place[row.group], *row[1:], key, tag) for row, key, tag in rows if row.group in place)
        return {key: tag for *_, key, tag in ordered}

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Raise RunError if no rollout has finished for ``stall_timeout`` seconds. Every loop that waits for rollouts,
        here and in verl, calls this method."""
        terminal = len(self.finished_keys[partition_id]) + len(self.failure_keys[partition_id])
        seen = len(self.partitions[partition_id]), terminal  # a failed rollout leaves no row
        if seen != self._seen:
            self._seen, self._last_progress = seen, time.monotonic()
        elif time.monotonic() - self._last_progress > self.stall_timeout:
            prompts = len(self.pending_keys[partition_id]) + len(self.running_keys[partition_id])
            training = partition_id == PARTITION
            raise RunError(
                f"{'' if training else 'validation at '}step {self._step}: no rollout has finished for "
                f"{self.stall_timeout:.0f} s while {self.controller.outstanding if training else f'{prompts} prompts'} "
                "are outstanding; see the logs of the rollout engines and reward workers, or raise "
                "rollout_driver.stall_timeout if single responses take longer"
            )
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _stored(self, batch: KVBatchMeta, metrics: dict) -> tuple[KVBatchMeta, dict]:
        """The batch without rows missing in TransferQueue: verl would ask for the fields of these rows."""
        stored = {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if tag}
        self._drop_unstored(batch.partition_id, [key for key in batch.keys if key not in stored])
        if not stored:
            raise EveryRolloutFailed(
                f"validation at step {self._step}: all rollouts of a batch (data.val_batch_size prompts) failed; "
                f"{WHY_ROLLOUTS_FAIL}"
            )
        return KVBatchMeta(partition_id=batch.partition_id, keys=list(stored), tags=list(stored.values())), metrics

    def finished_waves(self) -> list[tuple[str, list[Rollout]]]:
        """(group id, new rollouts of the group) for every wave ended since the last call."""
        terminal = self.finished_keys[PARTITION] | self.failure_keys[PARTITION]
        ended = {uid: group for uid, group in self.controller.live.items() if group.outstanding and uid in terminal}
        if not ended:
            return []
        sessions: dict[str, dict[int, list[str]]] = {uid: defaultdict(list) for uid in ended}
        unstored = []
        for key, tag in self.partitions[PARTITION].items():
            row = RowKey.parse(key)
            if row.group in ended and row.session >= len(ended[row.group].rollouts):
                if tag:
                    sessions[row.group][row.session].append(key)
                else:
                    unstored.append(key)
        self._drop_unstored(PARTITION, unstored)
        keys = [key for by_session in sessions.values() for rows in by_session.values() for key in rows]
        rows = self._read_rows(keys)
        waves = [(uid, self._rollouts(group, sessions[uid], rows)) for uid, group in ended.items()]
        failed = [
            key
            for uid, rollouts in waves
            for session, rollout in enumerate(rollouts, len(ended[uid].rollouts))
            if rollout.failed
            for key in sessions[uid].get(session, [])
        ]
        if failed:  # their rows must not reach the update; the queue takes milliseconds for each call
            self._drop(PARTITION, failed)
        return waves

    def _read_rows(self, keys: list[str]) -> dict[str, Rollout]:
        """One rollout for each row. It has failed if its reward is not finite, or if its prefix has diverged under
        ``drop_diverged``. Keys with the status CANCELLED or FAILED have a tag and no row."""
        tags = self.partitions[PARTITION]
        rows = {
            key: self._without_row(tags[key][GENERATED], cancelled=tags[key]["status"] == CANCELLED)
            for key in keys
            if tags[key]["status"] in (CANCELLED, FAILED)
        }
        keys = [key for key in keys if key not in rows]
        if not keys:
            return rows
        fields = ["rm_scores", "extra_fields"]
        if self.controller.policy.reads_trajectories:
            fields += ["responses", "response_mask"]
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields)
        rewards = [float(scores.sum()) for scores in data["rm_scores"].unbind()]
        trajectories: list[Trajectory | None] = [None] * len(keys)
        if "responses" in fields:
            pairs = zip(data["responses"].unbind(), data["response_mask"].unbind(), strict=True)
            trajectories = [Trajectory(ids.numpy(), mask.numpy()) if mask[0] else None for ids, mask in pairs]
        extras = data.pop("extra_fields").tolist()
        for key, reward, extra, trajectory in zip(keys, rewards, extras, trajectories, strict=True):
            failed = not math.isfinite(reward) or (extra[DIVERGED] and self.drop_diverged)
            version, components = tags[key]["min_global_steps"], _components(extra)
            rows[key] = Rollout(
                reward=math.nan if failed else reward,
                correct=_verdict(components),
                tokens=extra[GENERATED],
                policy_version=self.controller.step - 1 if version is None else int(version),
                prefix_tokens=extra[REPLAYED],
                failed=failed,
                truncated=extra[TRUNCATED],
                diverged=extra[DIVERGED],
                components=components,
                trajectory=trajectory,
            )
        return rows

    def _without_row(self, tokens: int, *, cancelled: bool = False) -> Rollout:
        """A failed rollout that has no row in the queue."""
        return Rollout(math.nan, None, tokens, self.controller.step - 1, failed=True, cancelled=cancelled)

    def _rollouts(self, group: Group, sessions: dict[int, list[str]], rows: dict[str, Rollout]) -> list[Rollout]:
        """One rollout per session of the wave. The reward belongs to the session's last row. A session without rows is
        a failed rollout."""
        rollouts = []
        first = len(group.rollouts)
        for session in range(first, first + group.outstanding):
            keys = sorted(sessions.get(session, []), key=lambda key: RowKey.parse(key).output)
            outputs = [rows[key] for key in keys] or [self._without_row(tokens=0)]
            rollouts.append(
                replace(
                    outputs[-1],
                    tokens=sum(output.tokens for output in outputs),
                    policy_version=min(output.policy_version for output in outputs),
                    truncated=any(output.truncated for output in outputs),
                    trajectory=outputs[0].trajectory if len(outputs) == 1 else None,
                )
            )
        return rollouts

    def end_cancelled(self, partition_id: str) -> None:
        """After a restart, end the waves that were being cancelled: rollouts without a row in the queue are lost."""
        stored = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        tags: dict[str, dict] = {}
        for uid in self.controller.cancelled:
            group = self.controller.live[uid]
            sessions = range(len(group.rollouts), len(group.rollouts) + group.outstanding)
            lost = [key_without_row(uid, session, CANCELLED, tokens=0) for session in sessions]
            tags |= {key: tag for key, tag in lost if key not in stored} | {uid: {"status": "finished"}}
        if tags:
            tq.kv_batch_put(keys=list(tags), partition_id=partition_id, tags=list(tags.values()))

    def _drop_untrained(self, groups: list[Group]) -> None:
        """Drop the rows of untrained rollouts, which count only in their group's baseline, if at all."""
        trained = {group.id: set(group.trained) for group in groups if group.trained is not None}
        rows = [(key, RowKey.parse(key)) for key in self.partitions[PARTITION]] if trained else []
        keys = [key for key, row in rows if row.group in trained and row.session not in trained[row.group]]
        if keys:
            self._drop(PARTITION, keys)

    def _drop_unstored(self, partition_id: str, keys: list[str]) -> None:
        """Drop rows whose put failed or was cancelled: TransferQueue registers the key first and the tags last."""
        if keys:
            logger.warning(
                "step %d: %d rollouts are not in TransferQueue, so they have failed; the log of the agent-loop workers "
                "says why (a full queue: raise transfer_queue.backend.SimpleStorage.total_storage_size)",
                self._step,
                len({RowKey.parse(key)[:2] for key in keys}),
            )
            self._drop(partition_id, keys)

    def _drop(self, partition_id: str, keys: list[str]) -> None:
        """Remove rows from TransferQueue and from ``partitions``, the local copy."""
        tq.kv_clear(keys=keys, partition_id=partition_id)
        for key in keys:
            self.partitions[partition_id].pop(key, None)


@contextlib.contextmanager
def set_aside(batch: KVBatchMeta | None, unread: Collection[str] = ()) -> Iterator[None]:
    """Keeps the rows of a trained batch out of TransferQueue, and so out of a checkpoint of TransferQueue.

    verl saves a checkpoint between the update and the step's metrics and rollout logs. The rows are therefore put back,
    without the fields that only the update reads.

    Args:
        batch: None, or a batch that verl has already cleared, changes nothing.
        unread: further fields that nothing will read.
    """
    if batch is None or batch.keys[0] not in (tq.kv_list(batch.partition_id) or {}).get(batch.partition_id, {}):
        yield
        return
    names = set(tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id).keys())
    fields = sorted(names - UPDATE_ONLY - set(unread))
    rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    yield
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=rows, tags=batch.tags)


def _components(extra_fields: dict) -> dict[str, float]:
    """The finite numbers reported by the reward function, including the score."""
    reported = extra_fields.get("reward_extra_info", {})
    numbers = (bool, int, float, np.bool_, np.number)
    values = {name: float(value) for name, value in reported.items() if isinstance(value, numbers)}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _verdict(components: dict[str, float]) -> bool | None:
    """The verifier's verdict, if the reward function reports the verdict as ``acc``; otherwise None."""
    accuracy = without_noise(components.get("acc", math.nan))
    return bool(accuracy) if accuracy in (0, 1) else None
