"""Checks an installation in seconds: ``python docker/smoke_test.py --hardware cpu`` (or a profile of GPUs).

The checks cover versions, imports, the packages of the chosen engines, an allocation, a judged answer, and the composed
and validated configuration of every recipe. They train no model. With a GPU profile but without a GPU (as on a login
node), the engines' packages are found, not imported, and the output says so; ``--need-gpu`` refuses such a machine.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
VERL = "0.9.1"


@dataclass(frozen=True)
class Setup:
    """The installation to check: a hardware profile, the engine of the rollouts, and whether Megatron is in it.

    ``need_gpu``: a machine without a GPU in sight is a fault.
    """

    hardware: str
    engine: str
    megatron: bool
    need_gpu: bool

    @property
    def overrides(self) -> list[str]:
        """Choices on the command line of a recipe."""
        trainer = ["model_engine=megatron", "actor_engine=megatron"] if self.megatron else []
        return [f"hardware={self.hardware}", f"actor_rollout_ref.rollout.name={self.engine}", *trainer]


def main(
    hardware: Annotated[str, typer.Option(help="A hardware profile.")] = "cpu",
    engine: Annotated[str, typer.Option(help="Engine of the rollouts: vllm or sglang.")] = "vllm",
    megatron: Annotated[int, typer.Option(help="1: Megatron is installed.", max=1)] = 0,
    need_gpu: Annotated[bool, typer.Option("--need-gpu", help="A machine without a GPU in sight is a fault.")] = False,
) -> None:
    """Check an installation; the first fault ends with one sentence and exit code 1."""
    sys.path.insert(0, str(ROOT))
    from verl_ext.driver.preflight.packages import ENGINES
    from verl_ext.launch import GPUS, collect_rarely, export_environment

    for option, value, valid in (("--hardware", hardware, ("cpu", *GPUS)), ("--engine", engine, tuple(ENGINES))):
        if value not in valid:
            raise typer.BadParameter(f"{option}={value} is not valid: use {', '.join(valid)}.")

    collect_rarely()
    export_environment(hardware)  # before anything imports verl
    console, setup = Console(highlight=False), Setup(hardware, engine, bool(megatron), need_gpu)
    for check in CHECKS:
        try:
            console.print(f"{check.__name__.strip('_'):10}  {check(setup)}", soft_wrap=True)
        except (ImportError, LookupError, OSError, ValueError, RuntimeError) as error:
            console.print(f"error: {check.__name__.strip('_')}: {error}", style="red", soft_wrap=True)
            raise typer.Exit(1) from error


def _versions(setup: Setup) -> str:
    found = metadata.version("verl")
    if found != VERL:
        raise ValueError(f"verl={found} is installed, and these recipes are for {VERL}.")
    return f"Python {sys.version.split()[0]}, verl {found}, torch {metadata.version('torch')}"


def _imports(setup: Setup) -> str:
    modules = ("torch", "ray", setup.engine, "transformers", "verl", "verl_ext.driver.compat", "swerex")
    for module in modules:
        import_module(module)
    return ", ".join(modules)


def _packages(setup: Setup) -> str:
    import hydra
    import torch

    from verl_ext.driver.preflight.packages import missing_packages, needed_modules
    from verl_ext.resolvers import register_resolvers

    register_resolvers()
    # The mode that needs the most packages: weights go to engines on other GPUs.
    separate = ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"]
    with hydra.initialize_config_module("recipe.grpo.config", version_base=None):
        config = hydra.compose("grpo", [*setup.overrides, *separate])
    if missing := missing_packages(config):
        raise RuntimeError(" ".join(missing))
    modules = [module for _, _, module in needed_modules(config)]
    if not torch.cuda.is_available():
        return f"{', '.join(modules)} (found, not imported)"
    for module in modules:
        import_module(module)
    return ", ".join(modules)


def _allocation(setup: Setup) -> str:
    from verl_ext.allocation import knapsack

    counts = knapsack.allocate([0.1, 0.5, 0.9], 24)
    if counts.sum() != 24:
        raise ValueError(f"24 rollouts were divided as {counts.tolist()}.")
    return f"24 rollouts over success rates 0.1, 0.5, 0.9: {counts.tolist()}"


def _reward(setup: Setup) -> str:
    from verl_ext.data.math_reward import compute_score

    verdict = compute_score("smoke test", r"so it is \boxed{\frac{1}{2}}", "0.5")
    if verdict["acc"] != 1.0:
        raise ValueError(f"1/2 was compared with 0.5, and the verdict is {verdict}.")
    return "1/2 equals 0.5"


def _recipes(setup: Setup) -> str:
    import hydra
    from pyarrow import Table, parquet

    from verl_ext.driver.preflight.validate import validate
    from verl_ext.recipes import recipes
    from verl_ext.resolvers import register_resolvers

    register_resolvers()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {
                "data_source": "math",
                "prompt": [{"role": "user", "content": f"{number}?"}],
                "reward_model": {"ground_truth": "1"},
            }
            for number in range(8)
        ]
        parquet.write_table(Table.from_pylist(rows), f"{folder}/rows.parquet")
        (Path(folder) / "config.json").write_text('{"model_type": "qwen2"}')
        for name in ("model.safetensors", "tokenizer.json"):
            (Path(folder) / name).touch()
        overrides = [
            *setup.overrides,
            f"data.train_files={folder}/rows.parquet",
            f"data.val_files={folder}/rows.parquet",
            f"actor_rollout_ref.model.path={folder}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        ]
        for recipe in recipes():
            with hydra.initialize_config_module(f"recipe.{recipe}.config", version_base=None):
                validate(hydra.compose(recipe, overrides))
    return ", ".join(recipes())


def _gpu(setup: Setup) -> str:
    import torch

    if setup.hardware == "cpu":
        return "none needed"
    if not torch.cuda.is_available():
        if setup.need_gpu:
            raise RuntimeError("no GPU is in sight: the driver is missing or too old, or the container has no GPUs.")
        return "none in sight, not tried"
    square = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda") @ torch.ones(
        1024, 1024, dtype=torch.bfloat16, device="cuda"
    )
    if square[0, 0].item() != 1024:
        raise RuntimeError(f"a product of ones is {square[0, 0].item()} and not 1024.")
    return torch.cuda.get_device_name()


CHECKS = (_versions, _imports, _packages, _allocation, _reward, _recipes, _gpu)

if __name__ == "__main__":  # the reward's worker processes import this again
    typer.run(main)
