"""The comparison's runs on the real stack: verl, Ray, vLLM and FSDP train the quickstart's model on the CPU.

:func:`mostly_solved` makes a second world for them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison_runs import Setting
from training import of_recipe, run_training

from verl_ext.allocation.heuristics import proportional
from verl_ext.data import reasoning_gym, sources
from verl_ext.data.schema import COLUMNS, number_rows, write_rows
from verl_ext.lab.learn.hugging_face import SPLITS, FolderSource, HuggingFaceModel
from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.learn.worlds import CLASSES, HELD_OUT, SEED, WORLDS, World
from verl_ext.lab.method import Method
from verl_ext.lab.report.accuracy import ROLLOUTS, SECONDS, TOKENS

SAVING = "timing_s/save_checkpoint"  # a part of a step's seconds
PROMPTS = 2048  # as in the quickstart
POOL, LETTERS = 6400, {7: 20, 8: 35, 9: 40, 10: 5}  # words to choose from, and the weight of each length
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

    ``folder`` holds the models until they are scored. Metrics and log of the run lie beside it.

    Returns:
        steps, rollouts, tokens, seconds and accuracies of a run, as :class:`~comparison_runs.Kept` keeps them. The
        seconds are those of the steps without writing models, so start-up does not count.
    """
    shutil.rmtree(folder, ignore_errors=True)
    recipe, arguments = overrides(text, setting, seed, rollouts, task)
    command = of_recipe(recipe, [*arguments, f"trainer.default_local_dir={folder}"])
    records = run_training(command, folder.parent, folder.name)
    logged = {step: data for step, data in records.items() if ROLLOUTS in data}
    models = [task.model, *(folder / f"global_step_{step}" / "actor" / "huggingface" for step in logged)]
    world = task.load()
    accuracy = [accuracy_of(model, world) for model in models]
    shutil.rmtree(folder)
    return {
        "steps": [0, *logged],
        "rollouts": [0, *(int(data[ROLLOUTS]) for data in logged.values())],
        "tokens": [0, *(int(data[TOKENS]) for data in logged.values())],
        "seconds": [0.0, *np.cumsum([data[SECONDS] - data[SAVING] for data in logged.values()]).round(2).tolist()],
        "accuracy": [round(each, 4) for each in accuracy],
    }


def accuracy_of(model: Path, world: World) -> float:
    """Mean probability of the correct response over the world's held-out questions, which are encoded already."""
    from transformers import AutoModelForCausalLM

    loaded = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(model))
    return float(success_rates(loaded, world.task, world.held_out, 1.0).mean())


def mostly_solved(model: Path, out: Path) -> dict[Path, int]:
    """Words for a model of the quickstart, with the classes of the world ``mostly_solved`` of ``verl-ext learn``.

    Args:
        model: folder in Hugging Face format.
        out: folder to write, with ``model`` and ``data``.

    Returns:
        the number of words in each file.

    Raises:
        ValueError: a class has too few words.
    """
    pool = out / "pool"
    levels = [
        f"spell_backward:min_word_len={letters},max_word_len={letters}@{part}" for letters, part in LETTERS.items()
    ]
    reasoning_gym.main(pool, levels, train=POOL, validation=len(LETTERS))
    rates = FolderSource(model, pool).load().rates
    rows = list(sources.rows(pool / SPLITS["train"], list(COLUMNS)))
    shutil.rmtree(pool)
    chosen = in_shares(rows, rates, WORLDS["mostly_solved"].shares, {"train": PROMPTS, "held_out": HELD_OUT})
    for split, file in SPLITS.items():
        number_rows(chosen[split], split)
        write_rows(out / "data" / file, chosen[split])
    shutil.copytree(model, out / "model", dirs_exist_ok=True)
    return {out / "data" / file: len(chosen[split]) for split, file in SPLITS.items()}


def in_shares(
    rows: Sequence[dict[str, Any]], rates: np.ndarray, shares: Mapping[str, float], sizes: Mapping[str, int]
) -> dict[str, list[dict[str, Any]]]:
    """Random rows for each split, no row twice, with these shares of the classes in every split.

    Args:
        rows: to choose from.
        rates: (rows,) success probabilities.
        shares: of each class in :data:`~verl_ext.lab.learn.worlds.CLASSES`; they sum to 1.
        sizes: rows of each split.

    Raises:
        ValueError: a class has too few rows.
    """
    order = np.random.default_rng(SEED).permutation(len(rows))
    parts = {split: proportional(list(shares.values()), size, lower=0, upper=size) for split, size in sizes.items()}
    chosen: dict[str, list[dict[str, Any]]] = {split: [] for split in sizes}
    for place, name in enumerate(shares):
        low, high = CLASSES[name]
        fitting = [rows[index] for index in order if low <= rates[index] <= high]
        needed = sum(part[place] for part in parts.values())
        if len(fitting) < needed:
            raise ValueError(f"{needed} rows must be {name}, and {len(fitting)} of {len(rows)} are.")
        for split, part in parts.items():
            chosen[split] += fitting[: part[place]]
            fitting = fitting[part[place] :]
    return chosen
