"""Waits for rollouts and hands them to the policy, which says what to train on."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_ext.controller import RolloutController
from verl_ext.driver.outcome import DIVERGED, GENERATED, TRUNCATED
from verl_ext.policy import Group, Rollout
from verl_ext.trajectory import Trajectory

PARTITION = "train"
POLL_SHARE = 4  # sleep at least this many times as long as a look takes, so that looking stays cheap


class RolloutStall(RuntimeError):
    """No rollout has finished for longer than rollout_driver.stall_timeout."""


@dataclass(frozen=True)
class _Row:
    """One trajectory in the queue; as it stands, one that never came."""

    reward: float = math.nan
    tokens: int = 0
    truncated: bool = False
    diverged: bool = False
    components: Mapping[str, float] = field(default_factory=dict)
    trajectory: Trajectory | None = None


class GroupReplayBuffer(ReplayBuffer):
    """verl's replay buffer, sampling what the policy takes. Validation is verl's own.

    Args:
        poll_interval: seconds between two looks at TransferQueue.
        stall_timeout: seconds without a finished rollout after which :class:`RolloutStall` is raised.
        drain: wait until nothing is being generated before returning, because the engines will sleep. The last step
            always does.
        kwargs: as for verl's ``ReplayBuffer``.
    """

    controller: RolloutController  # set once the data is loaded

    def __init__(self, *, poll_interval: float, stall_timeout: float, drain: bool, **kwargs):
        super().__init__(poll_interval=poll_interval, **kwargs)
        self.stall_timeout, self.drain = stall_timeout, drain
        self._shortest_interval = poll_interval

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        if partition_id != PARTITION:
            return super().sample(global_steps, partition_id, batch_size)
        # What the last step leaves in generation would never be counted.
        drain = self.drain or global_steps >= self.controller.policy.total_steps
        groups: list[Group] = []
        last_debug = last_progress = time.time()
        rows_seen = -1
        while True:
            started = time.perf_counter()
            self._sync_metadata_from_transfer_queue()
            self.controller.finish_waves(self.finished_waves())
            groups = groups or self.controller.take_batch()
            if groups and not (drain and self.controller.outstanding):
                return self._materialize_batch(
                    PARTITION, [group.id for group in groups], self.partitions[PARTITION]
                ), {}
            if not groups:
                self.controller.check_progress()
            if (rows := len(self.partitions[PARTITION])) != rows_seen:
                rows_seen, last_progress = rows, time.time()
            elif time.time() - last_progress > self.stall_timeout:
                raise RolloutStall(
                    f"step {global_steps}: no rollout has finished for {self.stall_timeout:.0f} s while "
                    f"{self.controller.outstanding} are outstanding; see the logs of the rollout engines, or raise "
                    "rollout_driver.stall_timeout if single responses take that long"
                )
            self.poll_interval = max(self._shortest_interval, POLL_SHARE * (time.perf_counter() - started))
            last_debug = self._wait_for_next_poll(PARTITION, last_debug)

    def finished_waves(self) -> list[tuple[str, list[Rollout]]]:
        """(group id, its new rollouts) of every wave that has ended since the last look."""
        terminal = self.finished_keys[PARTITION] | self.failure_keys[PARTITION]
        ended = {uid: group for uid, group in self.controller.live.items() if group.outstanding and uid in terminal}
        if not ended:
            return []
        sessions: dict[str, dict[int, list[str]]] = {uid: defaultdict(list) for uid in ended}
        for key in self.partitions[PARTITION]:
            uid, session, _ = key.split("_")
            if uid in ended and int(session) >= len(ended[uid].rollouts):
                sessions[uid][int(session)].append(key)
        keys = [key for by_session in sessions.values() for rows in by_session.values() for key in rows]
        rows = self._read_rows(keys)
        return [(uid, self._rollouts(group, sessions[uid], rows)) for uid, group in ended.items()]

    def _read_rows(self, keys: list[str]) -> dict[str, _Row]:
        """What is known of each trajectory."""
        if not keys:
            return {}
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
        return {
            key: _Row(
                reward=reward,
                tokens=extra[GENERATED],
                truncated=extra[TRUNCATED],
                diverged=extra[DIVERGED],
                components=_components(extra),
                trajectory=trajectory,
            )
            for key, reward, extra, trajectory in zip(keys, rewards, extras, trajectories, strict=True)
        }

    def _rollouts(self, group: Group, sessions: dict[int, list[str]], rows: dict[str, _Row]) -> list[Rollout]:
        """One rollout per session of the wave; one without rows, with a non-finite reward or that diverged, failed."""
        rollouts = []
        first = len(group.rollouts)
        prefix_tokens = 0 if group.prefix is None else int(group.prefix.generated.sum())
        for session in range(first, first + group.outstanding):
            keys = sorted(sessions.get(session, []), key=lambda key: int(key.split("_")[2]))
            tags = [self.partitions[PARTITION][key] for key in keys]
            version = min(
                (tag["min_global_steps"] for tag in tags if tag["min_global_steps"] is not None), default=None
            )
            version = self.controller.step - 1 if version is None else int(version)
            last = rows[keys[-1]] if keys else _Row()
            failed = not math.isfinite(last.reward) or last.diverged
            if failed and keys:  # it must not reach the update
                tq.kv_clear(keys=keys, partition_id=PARTITION)
                for key in keys:
                    del self.partitions[PARTITION][key]
            rollouts.append(
                Rollout(
                    reward=math.nan if failed else last.reward,
                    correct=_verdict(last.components),
                    tokens=sum(rows[key].tokens for key in keys),
                    policy_version=version,
                    prefix_tokens=prefix_tokens if keys else 0,
                    failed=failed,
                    truncated=any(rows[key].truncated for key in keys),
                    diverged=last.diverged,
                    components=last.components,
                    trajectory=last.trajectory if len(keys) == 1 else None,
                )
            )
        return rollouts


def _components(extra_fields: dict) -> dict[str, float]:
    """The numbers that the reward function reports beside the score."""
    reported = extra_fields.get("reward_extra_info", {})
    numbers = (bool, int, float, np.bool_, np.number)
    return {name: float(value) for name, value in reported.items() if isinstance(value, numbers)}


def _verdict(components: dict[str, float]) -> bool | None:
    """The verifier's verdict, where the reward function reports one as ``acc``."""
    accuracy = components.get("acc")
    return bool(accuracy) if accuracy in (0.0, 1.0) else None
