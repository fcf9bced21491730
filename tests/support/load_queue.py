"""Real TransferQueue, agent loops and reward worker, and an engine that answers at once: benchmarks/load_queue.py."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import ray
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop import RewardLoopManager
from verl.workers.rollout.replica import TokenOutput

from support.configs import compose
from verl_ext.driver.agent_loop import WaveManager
from verl_ext.driver.trainer import TRAINER_MODES, PolicyTrainerSync

ROLLOUTS = 16  # per prompt
STEPS = 2  # the first warms up
PARTS = {"agent loops": "ray::WaveWorker", "reward worker": "ray::RewardLoopWorker", "queue": "ray::SimpleStorageUnit"}


class InstantEngine:
    """Answers with so many tokens, at once."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    async def generate(self, request_id: str, **_: Any) -> TokenOutput:
        versions = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=[5] * self.tokens, log_probs=[-1.0] * self.tokens, stop_reason="completed", extra_fields=versions
        )


class LoadedTrainer(PolicyTrainerSync):
    """The driver's side of a step, without actor and engines."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self.reward_loop_manager = RewardLoopManager(config=self.config, rm_resource_pool=None)

    def on_init_end(self) -> None:
        """No nodes and weights to look after."""

    def get_llm_client(self) -> InstantEngine:
        return InstantEngine(self.config.data.max_response_length)

    def generate_step(self, step: int) -> int:
        """Ask, wait, and take the batch; returns how many rollouts there were."""
        self.global_steps = step
        self.prepare_step()
        batch, _ = self.replay_buffer.sample(step, "train", self.config.data.train_batch_size)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        return self.controller.ledger.step["rollouts/sampled"]


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, float]:
    """verl's reward function: every other prompt is right."""
    return {"score": float(ground_truth), "acc": float(ground_truth)}


def make_config(recipe: str, model: Path, prompts: int, tokens: int, folder: Path) -> DictConfig:
    """Twice as many prompts as a step takes, and the config that trains on them."""
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
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        f"trainer.total_training_steps={STEPS + 1}",
    ]
    config = compose(recipe, *overrides)
    OmegaConf.resolve(config)
    config.trainer.v1.trainer_mode = TRAINER_MODES["sync"]
    config.transfer_queue.enable = True
    return config


def processes() -> dict[str, psutil.Process]:
    """Of this run, by what they do."""
    children = psutil.Process().children(recursive=True)
    titles = {process: "".join(process.cmdline()[:1]) for process in children if process.is_running()}
    return {
        part: process for part, title in PARTS.items() for process, name in titles.items() if name.startswith(title)
    }


def processor_seconds() -> dict[str, float]:
    """So far, of each part."""
    return {part: sum(process.cpu_times()[:2]) for part, process in processes().items()}


def measure(recipe: str, model: Path, prompts: int, tokens: int) -> list[str]:
    """Recipe, prompts, and of the last step: rollouts, seconds, ms of processor time per rollout of the driver and of
    each of PARTS, MiB of the driver and of the queue."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(recipe, model, prompts, tokens, Path(folder))
        ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
        try:
            tq.init(config.transfer_queue)
            trainer = LoadedTrainer(config)
            trainer.init()
            trainer.agent_loop_manager = WaveManager.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            for step in range(1, STEPS + 1):
                before = processor_seconds()
                started, own = time.perf_counter(), time.process_time()
                rollouts = trainer.generate_step(step)
                own, seconds = time.process_time() - own, time.perf_counter() - started
                after = processor_seconds()
            queue = processes()["queue"].memory_info().rss
            tq.close()
        finally:
            ray.shutdown()
    costs = [1e3 * (after[part] - before.get(part, 0.0)) / rollouts for part in PARTS]
    return [
        recipe,
        f"{prompts:,}",
        f"{rollouts:,}",
        f"{seconds:.0f}",
        f"{1e3 * own / rollouts:.2f}",
        *(f"{cost:.2f}" for cost in costs),
        f"{psutil.Process().memory_info().rss / 2**20:,.0f}",
        f"{queue / 2**20:,.0f}",
    ]
