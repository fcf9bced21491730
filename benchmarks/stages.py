"""The trainer of large_step.py: every stage of verl's training step in the driver, measured one by one.

verl's stages run unchanged, below ours, in the order of verl's ``fit``. :class:`Answers` writes the rows of the agent
loops, which real_queue.py measures, and :class:`Actor` the fields of the actor's workers.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
import transfer_queue as tq
from queue_trainer import DRIVER, LoadedTrainer, usage
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.driver.checkpoint import QUEUE
from verl_ext.driver.rows import DIVERGED, GENERATED, REPLAYED, ROLLOUTS, TRUNCATED, Columns

WORKERS = 8  # data-parallel workers of the actor
AT_ONCE = 256  # rows written at once, as by an agent-loop worker
PROMPT = 32  # tokens
LOOK = 0.01  # seconds between two looks at the memory


@dataclass
class Meter:
    """Measures each stage: seconds, processor seconds of the driver and of the queue's storage, and the bytes by which
    the driver's resident memory grows at the stage's peak."""

    seconds: dict[str, float] = field(default_factory=dict)
    driver: dict[str, float] = field(default_factory=dict)
    queue: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        process, ended, before = psutil.Process(), threading.Event(), usage()
        first = highest = process.memory_info().rss

        def look() -> None:
            nonlocal highest
            while not ended.wait(LOOK):
                highest = max(highest, process.memory_info().rss)

        looking = threading.Thread(target=look)
        looking.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - started
            ended.set()
            looking.join()
            after = usage()
            self.driver[name] = after[DRIVER].seconds - before[DRIVER].seconds
            self.queue[name] = after["queue"].seconds - before["queue"].seconds
            self.peaks[name] = highest - first


class Answers:
    """In place of the agent loops: rows with verl's fields, responses of full length, rewards of 0 or 1."""

    def __init__(self, tokens: int):
        self.tokens, self.random = tokens, np.random.default_rng(0)

    def generate_sequences(self, batch: TensorDict) -> None:
        fields = {name: part.tolist() for name, part in batch.items() if not isinstance(part, NonTensorData)}
        prompts = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
        sessions = [(prompt, number) for prompt in prompts for number in range(prompt[ROLLOUTS])]
        for start in range(0, len(sessions), AT_ONCE):
            some = sessions[start : start + AT_ONCE]
            keys = [f"{prompt['uid']}_{session}_0" for prompt, session in some]
            versions = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
            lengths = {"prompt_len": PROMPT, "response_len": self.tokens, "seq_len": PROMPT + self.tokens}
            tags = [{"status": "success", **lengths, **versions} for _ in some]
            rows = Columns([prompt | self.row() for prompt, _ in some])
            tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=tags)
        ended = [{"status": "finished"} for _ in prompts]
        tq.kv_batch_put(keys=[prompt["uid"] for prompt in prompts], partition_id="train", tags=ended)

    def row(self) -> dict[str, Any]:
        """Fields of a rollout, of the types that verl's agent loops write."""
        reward = float(self.random.integers(2))
        ids = torch.from_numpy(self.random.integers(5, 100, PROMPT + self.tokens))
        scores, mask = torch.zeros(self.tokens), torch.ones(self.tokens, dtype=torch.int64)
        scores[-1] = reward
        whole = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "multi_modal_inputs": {}, "num_turns": 2}
        own = {GENERATED: self.tokens, REPLAYED: 0, TRUNCATED: False, DIVERGED: False}
        return whole | {
            "prompts": ids[:PROMPT].clone(),
            "responses": ids[PROMPT:].clone(),
            "response_mask": mask,
            "loss_mask": mask,
            "rm_scores": scores,
            "rollout_log_probs": torch.full((self.tokens,), -1.0),
            "extra_fields": {"reward_extra_info": {"score": reward, "acc": reward}, **own},
        }


class Actor:
    """In place of the actor's workers: writes their fields, computes nothing."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": list(range(WORKERS))}

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Log-probabilities and entropies of all tokens, which the workers write in parallel."""
        for start in range(0, len(batch), AT_ONCE):
            tags, keys = batch.tags[start : start + AT_ONCE], batch.keys[start : start + AT_ONCE]
            rows = [dict.fromkeys(("log_probs", "entropy"), torch.full((tag["seq_len"],), -1.0)) for tag in tags]
            tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=Columns(rows))
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        return {"metrics": {"mfu": [0.0], "grad_norm": [1.0]}}

    def save_checkpoint(self, folder: str, *_: Any, **__: Any) -> None:
        Path(folder).mkdir(parents=True)

    def sleep_replicas(self) -> None:
        """Do nothing, since there are no engines."""


class VerlsStages(PPOTrainer):
    """verl's own part of the stages that this project extends; below all classes of this project."""

    meter: Meter

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.meter.stage("advantages: verl's part"):
            return super()._compute_advantage(batch, metrics)

    def _save_checkpoint(self) -> None:
        with self.meter.stage("checkpoint: verl's part"):
            super()._save_checkpoint()


class MeasuredTrainer(LoadedTrainer, VerlsStages):
    """A step of verl's ``fit`` with every stage measured."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.meter = Meter()
        self.actor_rollout_wg = self.checkpoint_manager = Actor()
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: WORKERS)
        self.curr_step_profile = False
        self._init_dump_executor()

    def agent_loops(self) -> Answers:
        return Answers(self.config.data.max_response_length)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, **named: Any) -> KVBatchMeta:
        with self.meter.stage("padding rows, balance"):
            return super()._balance_batch(batch, metrics, **named)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.meter.stage("old log-probs"):
            return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.meter.stage("advantages"):
            return super()._compute_advantage(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self.meter.stage("update: dispatch"):
            return super()._update_actor(batch, metrics)

    def whole_step(self, step: int) -> KVBatchMeta:
        """Generate, train, save and log step ``step`` in the order of verl's ``fit``."""
        self.global_steps, metrics, self.timing_raw = step, {}, {}
        with self.meter.stage("step"):
            batch = self.step(metrics, self.timing_raw)
        folder = self._checkpoint_folder()
        with self.meter.stage("snapshot with the trained rows"):
            tq.save_checkpoint(folder / "whole_queue")
        self.whole_queue = size_of(folder / "whole_queue")
        shutil.rmtree(folder)
        with self.meter.stage("checkpoint"):
            self._save_checkpoint()
        self.saved_queue = size_of(folder / QUEUE)
        shutil.rmtree(folder)
        self.timing_raw["step"] = self.meter.seconds["step"]
        with self.meter.stage("metrics"):
            self._compute_metrics(batch, metrics, self.timing_raw, global_steps=step, epoch=0)
        with self.meter.stage("rollout logs"):
            self._log_rollout_data(batch, self.timing_raw, self.config.trainer.rollout_data_dir)
        with self.meter.stage("rollout logs: file"):
            self._shutdown_dump_executor()
            self._init_dump_executor()
        with self.meter.stage("clearing"):
            tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        return batch


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
