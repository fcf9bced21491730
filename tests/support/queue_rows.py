"""A real TransferQueue, and the part of verl's agent loops in it: writing rows."""

from __future__ import annotations

import contextlib

import ray
import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from support.configs import changed, compose
from support.forks import with_verl
from verl_ext.driver.rows import CANCELLED, FAILED, key_without_row

CAPACITY = 200  # rows
_running = False


def start_queue() -> None:
    """A queue of ``CAPACITY`` rows in a Ray of its own, unless this process has one: it takes some ten seconds.

    Ray's programs and workers are forks, as in a training: each would import torch and verl anew otherwise.
    """
    global _running
    if not _running:
        with with_verl().starting_ray():
            _start_ray()
        size = f"transfer_queue.backend.SimpleStorage.total_storage_size={CAPACITY}"
        tq.init(changed(compose("grpo"), size).transfer_queue)
        _running = True


def end_queue() -> None:
    """End the queue and the Ray of :func:`start_queue`. Without a queue, nothing happens."""
    global _running
    if _running:
        tq.close()
        ray.shutdown()
        _running = False


def _start_ray(attempts: int = 4) -> None:
    """Start a Ray of one's own. Ray gives its processes 30 seconds to start, which a very busy machine can exceed."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:  # Ray's own has no narrower class
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def stored(partition: str) -> dict[str, dict]:
    """Keys and tags of the partition's rows."""
    return (tq.kv_list(partition) or {}).get(partition, {})


def clear(*partitions: str) -> None:
    for partition in partitions:
        if left := list(stored(partition)):
            tq.kv_clear(keys=left, partition_id=partition)


def register(uids) -> None:
    """Register the prompts of a wave with one write, as verl does."""
    prompt = {"is_prompt": True, "status": "pending", "global_steps": 1}
    tq.kv_batch_put(keys=uids, partition_id="train", tags=[prompt] * len(uids))


def store(partition, keys, fields, tags) -> bool:
    """As an agent loop does; False if the queue is full."""
    with contextlib.suppress(RuntimeError):
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags)
        return True
    return False


class QueueWriter:
    """An engine that writes the same data as an agent-loop worker: rows with rewards, then the prompt's final status.

    A session has ``outputs`` rows, written from the last to the first. Only the last row has the session's reward, as
    in verl, and may be marked as diverged; only the first may be marked as truncated.

    Attributes:
        versions: (session, output) -> version of the oldest weights; ``version`` for all other rows.
        prefix_tokens: session -> tokens of its replayed turns; 0 for all other sessions.
        reported: session -> the reward function's further numbers; the verdict for all other sessions.
        silent: whether prompts are registered without any answer; :meth:`write` answers later.
        cancelled: groups of the calls of :meth:`cancel`.
    """

    def __init__(self, reward=lambda session: float(session % 2), outputs=1, missing=(), silent=False):
        self.reward, self.outputs, self.missing, self.silent = reward, outputs, missing, silent
        self.truncated, self.diverged, self.untagged = set(), set(), set()
        self.cancelled = []
        self.version, self.versions, self.reported, self.prefix_tokens = 0, {}, {}, {}

    def submit(self, requests):
        register([group.id for group, _ in requests])
        for group, count in requests:
            if not self.silent:
                first = len(group.rollouts)
                self.write(group.id, [n for n in range(first, first + count) if n not in self.missing])

    def cancel(self, groups):
        self.cancelled += groups

    def write_cancelled(self, uid, finished, cancelled):
        """End a cancelled wave: ``finished`` sessions get rows, and session k of ``cancelled`` a tag with k tokens."""
        ended = (key_without_row(uid, session, CANCELLED, tokens=session) for session in cancelled)
        keys, tags = zip(*ended, strict=True)
        tq.kv_batch_put(keys=list(keys), partition_id="train", tags=list(tags))
        self.write(uid, finished)

    def write_failed(self, uid, failed, tokens):
        """Tags of rollouts that failed after they had generated ``tokens``."""
        keys, tags = zip(*(key_without_row(uid, session, FAILED, tokens) for session in failed), strict=True)
        tq.kv_batch_put(keys=list(keys), partition_id="train", tags=list(tags))

    def write(self, uid, sessions):
        """All rows in one write, or each session's by itself where the queue has no room for all, as a worker does."""
        together = [session for session in sessions if session not in self.untagged]
        taken = self._put(uid, together) or all([self._put(uid, [session]) for session in together])
        for session in self.untagged.intersection(sessions):
            self._put(uid, [session])
        status = "finished" if taken and not self.missing else "failure"
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": status}])

    def _put(self, uid, sessions):
        rows = [(session, index) for session in sessions for index in reversed(range(self.outputs))]
        tags = [
            {"status": "success", "min_global_steps": self.versions.get(row, self.version)}
            | {"max_global_steps": self.version}
            for row in rows
        ]
        keys, fields = [f"{uid}_{session}_{index}" for session, index in rows], [self.row(*row) for row in rows]
        return not rows or store("train", keys, fields, None if self.untagged.intersection(sessions) else tags)

    def row(self, session, index):
        length, is_last = 3 + session, index == self.outputs - 1
        reward = self.reward(session) if is_last else -5.0
        scores = torch.zeros(length)
        scores[-1] = reward
        mask = torch.ones(length, dtype=torch.int64)
        mask[1] = 0  # a tool's token: part of the response, not generated
        reported = self.reported.get(session, {"acc": reward == 1.0})
        extra = {
            "reward_extra_info": {"score": reward, **reported},
            "generated_tokens": length - 1,
            "prefix_tokens": self.prefix_tokens.get(session, 0),
            "truncated": session in self.truncated and index == 0,
            "diverged": session in self.diverged and is_last,
        }
        return {"rm_scores": scores, "response_mask": mask, "responses": torch.arange(length), "extra_fields": extra}

    def release(self, groups):
        self.buffer._clear_groups("train", {group.id for group in groups})
