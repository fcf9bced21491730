"""The trainer of real_queue.py: real TransferQueue, agent loops and reward worker, and an engine that answers
at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hydra
import pandas as pd
import psutil
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop import RewardLoopManager
from verl.workers.rollout.replica import TokenOutput

from verl_ext.driver.agent_loop import WaveManager
from verl_ext.driver.modes import TRAINER_MODES, PolicyTrainerSync
from verl_ext.launch import register_resolvers

DRIVER = "driver"
PARTS = {
    "agent loops": "ray::WaveWorker",
    "reward worker": "ray::RewardLoopWorker",
    "queue": "ray::SimpleStorageUnit",
    "its controller": "ray::TransferQueueController",
}


@dataclass(frozen=True)
class Usage:
    """Processor time of one process in seconds, its resident memory in bytes, and its number of open files."""

    seconds: float
    memory: int
    files: int


class Look(NamedTuple):
    """The state after a step: seconds on the clock, usage of each process, rollouts that the step has sampled, and
    rows in the queue."""

    clock: float
    usage: dict[str, Usage]
    sampled: int
    rows: int


class InstantEngine:
    """Answers every request at once with ``tokens`` equal tokens."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    async def generate(self, request_id: str, **_: Any) -> TokenOutput:
        versions = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=[5] * self.tokens, log_probs=[-1.0] * self.tokens, stop_reason="completed", extra_fields=versions
        )


class LoadedTrainer(PolicyTrainerSync):
    """The driver's part of a step; there are no actor and no rollout engines."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self.reward_loop_manager = RewardLoopManager(config=self.config, rm_resource_pool=None)

    def on_init_end(self) -> None:
        """Skip the checks of nodes and weights: there are none."""

    def get_llm_client(self) -> InstantEngine:
        return InstantEngine(self.config.data.max_response_length)

    def agent_loops(self) -> Any:
        """What generates and writes the rows."""
        return WaveManager.create(
            config=self.config,
            llm_client=self.get_llm_client(),
            reward_loop_worker_handles=self.get_reward_handles(),
        )

    def generate_step(self, step: int) -> int:
        """Request a step's rollouts, wait for them and take the batch; returns the number of rollouts sampled."""
        self.global_steps = step
        self.prepare_step()
        batch, _ = self.replay_buffer.sample(step, "train", self.config.data.train_batch_size)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        return self.controller.ledger.step["rollouts/sampled"]


Trainer = TypeVar("Trainer", bound=LoadedTrainer)


def make_config(
    recipe: str, model: Path, prompts: int, rollouts: int, tokens: int, steps: int, folder: Path, *further: str
) -> DictConfig:
    """Write twice the prompts of a step; returns the config for training on them, with ``further`` overrides."""
    rows = [
        {
            "data_source": "load",
            "prompt": [{"role": "user", "content": f"{number}"}],
            "reward_model": {"ground_truth": str(number % 2)},
            "extra_info": {"index": number},
        }
        for number in range(2 * prompts)
    ]
    pd.DataFrame(rows).to_parquet(folder / "data.parquet")
    overrides = [
        "hardware=cpu",
        f"data.train_files={folder}/data.parquet",
        f"data.val_files={folder}/data.parquet",
        f"data.train_batch_size={prompts}",
        f"data.max_response_length={tokens}",
        "data.max_prompt_length=32",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.rollout.max_model_len={tokens + 32}",
        f"actor_rollout_ref.rollout.n={rollouts}",
        "reward.custom_reward_function.path=pkg://verl_ext.first_run.coin",
        f"trainer.total_training_steps={steps + 1}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.rollout_data_dir={folder}/rollouts",
        *further,
    ]
    register_resolvers()
    with hydra.initialize_config_module(f"recipe.{recipe}.config", version_base=None):
        config = hydra.compose(recipe, overrides)
    OmegaConf.resolve(config)
    config.trainer.v1.trainer_mode = TRAINER_MODES["sync"]
    config.transfer_queue.enable = True
    return config


def usage() -> dict[str, Usage]:
    """Usage of the driver (this process) and of each of PARTS."""
    found = {DRIVER: psutil.Process()}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
            name = "".join(process.cmdline()[:1])
            found |= {part: process for part, title in PARTS.items() if name.startswith(title)}
    return {
        part: Usage(sum(process.cpu_times()[:2]), process.memory_info().rss, process.num_fds())
        for part, process in found.items()
    }


@contextlib.contextmanager
def loaded_trainer(
    recipe: str,
    model: Path,
    *further: str,
    prompts: int,
    rollouts: int,
    tokens: int,
    steps: int,
    kind: type[Trainer] = LoadedTrainer,
) -> Iterator[Trainer]:
    """A trainer of this ``kind`` with its own Ray, TransferQueue, agent loops and reward worker."""
    benchmarks = Path(__file__).resolve().parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(benchmarks.parent), str(benchmarks)])  # workers run elsewhere
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(recipe, model, prompts, rollouts, tokens, steps, Path(folder), *further)
        ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
        try:
            tq.init(config.transfer_queue)
            trainer = kind(config)
            trainer.init()
            trainer.agent_loop_manager = trainer.agent_loops()
            yield trainer
            tq.close()
        finally:
            ray.shutdown()


def looks(
    recipe: str, model: Path, prompts: int, rollouts: int, tokens: int, steps: int, every: int = 1
) -> Iterator[Look]:
    """Yields a look after the warm-up step, and after each ``every``-th of ``steps`` further steps."""
    with loaded_trainer(recipe, model, prompts=prompts, rollouts=rollouts, tokens=tokens, steps=steps) as trainer:
        for step in range(steps + 1):
            sampled = trainer.generate_step(step + 1)
            if step % every == 0:
                yield Look(time.perf_counter(), usage(), sampled, rows())


def rows() -> int:
    """Rows in the queue, over all partitions."""
    return sum(map(len, (tq.kv_list() or {}).values()))
