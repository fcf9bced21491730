"""Cost of the driver: our step against verl's own, and a bound pilot+commit step against one wave.

    python benchmarks/step_time.py --task outputs/quickstart_small

Both comparisons are ratios of medians over runs that alternate (A B A B), on the same model, data and number of
rollouts, with a learning rate of 0 so that all runs keep the same model. The first steps are left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated

import hydra
import typer
from omegaconf import OmegaConf
from training import of_recipe, run_training

from verl_ext.lab.table import Table, open_console
from verl_ext.launch import export_environment
from verl_ext.resolvers import register_resolvers

WARM_UP = 3  # steps left out of each run
console = open_console()


def shared(task: Path, steps: int) -> list[str]:
    """Overrides shared by all runs."""
    return [
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/validation.parquet",
        "data.max_prompt_length=96",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.rollout.max_model_len=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=0",
        "reward.custom_reward_function.path=pkg://verl_ext.data.reasoning_gym",
        "trainer.logger=[file]",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={steps}",
    ]


def runs(task: Path, steps: int) -> dict[str, tuple[str, list[str]]]:
    """The recipe and the overrides of each kind of run with our driver."""
    common = shared(task, steps)
    # 24 pilots x 4 + 8 commits x 4 = 128 rollouts; every prompt survives, so each step is the steady state.
    bound = ["data.train_batch_size=8", "rollout_policy.n_pilot=4", "rollout_policy.n_commit=4"]
    bound += ["rollout_policy.p_lower=0", "rollout_policy.p_upper=1", "rollout_policy.p_solve=null"]
    return {
        "ours": ("grpo", [*common, "data.train_batch_size=16", "actor_rollout_ref.rollout.n=8"]),
        "bound": ("pilot_commit", [*common, *bound]),
        "one_wave": ("grpo", [*common, "data.train_batch_size=32", "actor_rollout_ref.rollout.n=4"]),
    }


def verls(overrides: list[str], folder: Path) -> list[str]:
    """verl's own entry point on the config of our grpo."""
    register_resolvers()
    with hydra.initialize_config_module("recipe.grpo.config", version_base=None):
        config = hydra.compose("grpo", overrides=overrides)
    OmegaConf.resolve(config)  # verl does not register our resolvers
    OmegaConf.save(config, folder / "verl_grpo.yaml")
    arguments = ["--config-path", str(folder.resolve()), "--config-name", "verl_grpo"]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]


def compare(title: str, key: str, ours: list[dict], other: list[dict], names: tuple[str, str], limit: float) -> float:
    """Print both medians of ``key`` and their ratio."""
    rows = []
    values = [[step[key] for step in steps] for steps in (ours, other)]
    for name, seconds in zip(names, values, strict=True):
        row = (statistics.median(seconds), min(seconds), max(seconds))
        rows.append((name, *(f"{value:.3f}" for value in row), str(len(seconds))))
    ratio = statistics.median(values[0]) / statistics.median(values[1])
    rows.append(("ratio", f"{ratio:.3f}", "", "", f"target: at most {limit}"))
    console.print(Table(title, ("", "median s", "min s", "max s", "steps"), rows))
    return ratio


def main(
    task: Annotated[Path, typer.Option(help="Folder with model/ and data/, as the quickstart makes it.")],
    out: Annotated[Path, typer.Option(help="Folder for logs and results.")] = Path("outputs/benchmarks"),
    steps: Annotated[int, typer.Option(min=WARM_UP + 2, help="Training steps of each run.")] = 15,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 2,
) -> None:
    """Measure both ratios."""
    export_environment("cpu")
    out.mkdir(parents=True, exist_ok=True)
    of_ours = runs(task.resolve(), steps)
    kinds = {kind: of_recipe(recipe, overrides) for kind, (recipe, overrides) in of_ours.items()}
    kinds["verl"] = verls(of_ours["ours"][1], out)
    measured: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        for kind, command in kinds.items():
            records = run_training(command, out, f"{kind}_{repeat}")
            measured[kind] += [data for step, data in records.items() if step > WARM_UP]
    sampled = {int(step["rollouts/sampled"]) for kind in ("bound", "one_wave") for step in measured[kind][:-1]}
    console.print(f"rollouts per step, bound and one wave: {sorted(sampled)}")
    ratios = {
        "step_ours_over_verl": compare(
            "GRPO, time of a step", "timing_s/step", measured["ours"], measured["verl"], ("ours", "verl"), 1.0
        ),
        "generation_bound_over_one_wave": compare(
            "128 rollouts, time of generation",
            "timing_s/gen",
            [step for step in measured["bound"] if step["rollouts/sampled"] == 128],
            measured["one_wave"],
            ("pilots and commits, bound", "one wave"),
            1.1,
        ),
    }
    (out / "step_time.json").write_text(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    typer.run(main)
