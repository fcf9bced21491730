"""Checks an installation in seconds: ``python docker/smoke_test.py --hardware cpu`` (or h200, a800, b200).

The checks cover versions, imports, an allocation, a judged answer, and the composed and validated configuration of
every recipe. They train no model. With a GPU profile but without a GPU (as in the build of an image), the output says
so.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
VERL = "0.9.1"


def main(hardware: Annotated[str, typer.Option(help="A hardware profile: cpu, h200, a800 or b200.")] = "cpu") -> None:
    """Check an installation; the first fault ends with one sentence and exit code 1."""
    sys.path.insert(0, str(ROOT))
    from verl_ext.launch import export_environment

    export_environment(hardware)  # before anything imports verl
    console = Console(highlight=False)
    for check in (_versions, _imports, _allocation, _reward, _recipes, _gpu):
        try:
            console.print(f"{check.__name__.strip('_'):10}  {check(hardware)}", soft_wrap=True)
        except (ImportError, LookupError, ValueError, RuntimeError) as error:
            console.print(f"error: {check.__name__.strip('_')}: {error}", style="red", soft_wrap=True)
            raise typer.Exit(1) from error


def _versions(hardware: str) -> str:
    found = metadata.version("verl")
    if found != VERL:
        raise ValueError(f"verl={found} is installed, and these recipes are for {VERL}.")
    return f"Python {sys.version.split()[0]}, verl {found}, torch {metadata.version('torch')}"


def _imports(hardware: str) -> str:
    modules = ("torch", "ray", "vllm", "transformers", "verl", "verl_ext.driver.compat", "swerex")
    for module in modules:
        import_module(module)
    return ", ".join(modules)


def _allocation(hardware: str) -> str:
    from verl_ext.allocation import knapsack

    counts = knapsack.allocate([0.1, 0.5, 0.9], 24)
    if counts.sum() != 24:
        raise ValueError(f"24 rollouts were divided as {counts.tolist()}.")
    return f"24 rollouts over success rates 0.1, 0.5, 0.9: {counts.tolist()}"


def _reward(hardware: str) -> str:
    from verl_ext.data.math_reward import compute_score

    verdict = compute_score("smoke test", r"so it is \boxed{\frac{1}{2}}", "0.5")
    if verdict["acc"] != 1.0:
        raise ValueError(f"1/2 was compared with 0.5, and the verdict is {verdict}.")
    return "1/2 equals 0.5"


def _recipes(hardware: str) -> str:
    import hydra
    from pyarrow import Table, parquet

    from verl_ext.driver.preflight.validate import validate
    from verl_ext.recipes import recipes
    from verl_ext.resolvers import register_resolvers

    register_resolvers()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {
                "data_source": "x",
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
            f"hardware={hardware}",
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


def _gpu(hardware: str) -> str:
    import torch

    if hardware == "cpu":
        return "none needed"
    if not torch.cuda.is_available():
        return "none in sight, not tried"
    square = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda") @ torch.ones(
        1024, 1024, dtype=torch.bfloat16, device="cuda"
    )
    if square[0, 0].item() != 1024:
        raise RuntimeError(f"a product of ones is {square[0, 0].item()} and not 1024.")
    return torch.cuda.get_device_name()


if __name__ == "__main__":  # the reward's worker processes import this again
    typer.run(main)
