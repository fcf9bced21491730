"""The comparison's runs on the real stack: verl, Ray, vLLM and FSDP train the quickstart's model on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from comparison_results import Setting

from verl_ext.lab.learn.hugging_face import FolderSource
from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.method import Method
from verl_ext.lab.report.runs import read_run
from verl_ext.lab.report.summary import ROLLOUTS

TIMEOUT = 3600  # seconds of a training
FIXED = [
    "hardware=cpu",
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    "actor_rollout_ref.rollout.max_model_len=64",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    "reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=10000",
]
"""Overrides of every run, as in examples/quickstart.sh, with the model of every step in place of validations."""


def overrides(text: str, setting: Setting, seed: int, rollouts: int, task: FolderSource) -> tuple[str, list[str]]:
    """The recipe of a run, and its overrides.

    Args:
        text: a recipe, whose policy divides the n rollouts of a prompt by itself, or a recipe with keys of its policy.
        setting: learning rate, rollouts per prompt and prompts per step.
        seed: of the data's order, the policy and the engine.
        rollouts: the run's budget.
        task: model and data.
    """
    recipe, *own = text.split()
    method = Method.parse(recipe, setting.prompts)
    settings = method.policy_class.settings_for(setting.prompts, setting.n, seed) or {}
    divided = [] if own else [f"rollout_policy.{key}={value}" for key, value in settings.items() if key != "seed"]
    return recipe, [
        *FIXED,
        f"data.train_files={task.data}/train.parquet",
        f"data.val_files={task.data}/validation.parquet",
        f"data.seed={seed}",
        f"data.train_batch_size={setting.prompts}",
        f"actor_rollout_ref.model.path={task.model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={setting.prompts}",
        f"actor_rollout_ref.actor.optim.lr={setting.lr}",
        f"actor_rollout_ref.rollout.n={setting.n}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"rollout_driver.rollout_budget={rollouts}",
        *divided,
        *(f"rollout_policy.{word}" for word in own),
    ]


def train(text: str, setting: Setting, seed: int, rollouts: int, task: FolderSource, folder: Path) -> dict[str, Any]:
    """Train on the stack, and score the model of every step exactly, as ``verl-ext learn`` does.

    Returns:
        steps, rollouts, tokens and accuracies of a run, as :class:`~comparison_results.Kept` keeps them.

    Raises:
        RuntimeError: the training failed; names its log.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recipe, arguments = overrides(text, setting, seed, rollouts, task)
    metrics, log, checkpoints = folder / "metrics.jsonl", folder / "log", folder / "checkpoints"
    with log.open("w") as file:
        code = subprocess.call(
            [sys.executable, "-m", f"recipe.{recipe}", *arguments, f"trainer.default_local_dir={checkpoints}"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
            timeout=TIMEOUT,
        )
    if code:
        raise RuntimeError(f"{recipe} with {setting} and seed {seed} ended with {code}; {log} has the reason.")
    logged = {step: data for step, data in read_run([metrics]).records.items() if ROLLOUTS in data}
    models = [task.model, *(checkpoints / f"global_step_{step}" / "actor" / "huggingface" for step in logged)]
    accuracy = [accuracy_of(model, task) for model in models]
    shutil.rmtree(checkpoints)
    return {
        "steps": [0, *logged],
        "rollouts": [0, *(int(data[ROLLOUTS]) for data in logged.values())],
        "tokens": [0, *(int(data["tokens/sampled_total"]) for data in logged.values())],
        "accuracy": [round(each, 4) for each in accuracy],
    }


def accuracy_of(model: Path, task: FolderSource) -> float:
    """Mean probability of the correct response over the task's held-out questions."""
    world = FolderSource(model, task.data).load()
    return float(success_rates(world.make_model(), world.task, world.held_out, 1.0).mean())
