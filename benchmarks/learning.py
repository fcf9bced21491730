"""Trains seven recipes on the CPU task, at equal rollouts, over several seeds.

    python benchmarks/learning.py --task outputs/spelling

Finished runs are skipped, so the benchmark can be stopped and restarted at any time. Each run's metrics are
``<name>_<seed>.jsonl`` in ``--out``; ``verl-ext report`` and ``benchmarks/decisions.py`` read them.

``--name prefix_ada --name prefix_fix`` is a separate comparison: Prefix Sampling with and without its controller, on
data with many very easy and many very hard prompts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from training import of_recipe, run_training

PROMPTS, ROLLOUTS = 32, 8  # per step and per prompt: 256 rollouts a step for methods with one wave
TEMPERATURE = 1.5  # in training and validation; at 1 the model has little left to learn from so few rollouts
TRAINING_PROMPTS = 256  # eight steps an epoch, so that remembered success rates can matter
PREFIX_CONTROL = [  # the constants of the published runs, which are older than the recipe's defaults
    "rollout_policy.initial_ratio=0.3",
    "rollout_policy.dead_zone=0.075",
    "rollout_policy.step=0.05",
]
RECIPES = {
    "grpo": [f"actor_rollout_ref.rollout.n={ROLLOUTS}"],
    "dynamic_sampling": [f"actor_rollout_ref.rollout.n={ROLLOUTS}", "trainer.test_freq=2"],  # further rollouts per step
    "pilot_commit": ["rollout_policy.n_pilot=4", "rollout_policy.n_commit=4", "trainer.test_freq=2"],
    "hora": [f"actor_rollout_ref.rollout.n={ROLLOUTS}", "rollout_policy.G0=4"],
    "vip": [f"actor_rollout_ref.rollout.n={ROLLOUTS}"],
    "knapsack": [
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",  # as grpo; clipping and prompt weights are its own
    ],
    "prefix_sampling": [f"actor_rollout_ref.rollout.n={ROLLOUTS}", *PREFIX_CONTROL],
}
"""Overrides of each recipe: group sizes that fit the task."""
STEERED = [
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    "actor_rollout_ref.actor.optim.lr=3e-5",
    "data.train_max_samples=1024",
    *PREFIX_CONTROL,
    "trainer.test_freq=-1",
]
VARIANTS = {"prefix_ada": STEERED, "prefix_fix": [*STEERED, "rollout_policy.adaptive=false"]}
console = Console()


def overrides(name: str, seed: int, rollouts: int, task: Path) -> list[str]:
    """The command line of one run."""
    return [
        "hardware=cpu",
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/validation.parquet",
        f"data.train_max_samples={TRAINING_PROMPTS}",
        f"data.seed={seed}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={task}/model",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.max_model_len=64",
        f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        f"actor_rollout_ref.rollout.val_kwargs.temperature={TEMPERATURE}",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
        "reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym",
        "trainer.logger=[file]",
        "trainer.resume_mode=disable",
        "trainer.save_freq=-1",
        "trainer.test_freq=6",
        "trainer.total_training_steps=10000",
        f"rollout_driver.rollout_budget={rollouts}",
        *(RECIPES | VARIANTS)[name],
    ]


def train(name: str, seed: int, rollouts: int, task: Path, out: Path) -> None:
    """Train a method with a seed, unless this command line has finished before."""
    recipe = "prefix_sampling" if name in VARIANTS else name
    arguments = overrides(name, seed, rollouts, task)
    name = f"{name}_{seed}"
    done = out / f"{name}.done"
    command_line = "\n".join(arguments)
    if done.is_file() and done.read_text() == command_line:
        console.print(f"{name}: finished before ({out}/{name}.jsonl)")
        return
    done.unlink(missing_ok=True)
    start = time.monotonic()
    run_training(of_recipe(recipe, [*arguments, f"trainer.default_local_dir={out}/{name}"]), out, name)
    done.write_text(command_line)
    console.print(f"{name}: {time.monotonic() - start:.0f} s")


def main(
    task: Annotated[Path, typer.Option(help="Folder with model/ and data/, made as docs/results.md says.")],
    out: Annotated[Path, typer.Option(help="Folder for metrics and logs.")] = Path("outputs/benchmarks/learning"),
    name: Annotated[
        list[str] | None, typer.Option(help=f"A recipe or variant, repeatable. Default: {', '.join(RECIPES)}.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 1, 2, ... of data order and sampling.")] = 3,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each run, pilots included.")] = 4608,
) -> None:
    """Train every chosen recipe on every seed, one after the other."""
    names = name or list(RECIPES)
    if unknown := set(names) - set(RECIPES | VARIANTS):
        raise typer.BadParameter(f"--name {', '.join(sorted(unknown))}: use some of {', '.join(RECIPES | VARIANTS)}")
    for seed in range(1, seeds + 1):
        for run in names:
            train(run, seed, rollouts, task.resolve(), out.resolve())


if __name__ == "__main__":
    typer.run(main)
