"""``python -m verl_ext.hardware MODEL --gpu h200 --gpus 8 --longest 5120``: settings for a model, and why they fit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.checks import choice
from verl_ext.hardware.megatron import megatron_sizes, megatron_use
from verl_ext.hardware.memory import GPU_MEMORY, settings, use
from verl_ext.hardware.shapes import SHAPES, read

ENGINES = ("dp", "megatron")
SHARED_KEYS = {
    "tensor_parallel": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "ppo_max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "log_prob_max_token_len_per_gpu": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
}
FSDP2_KEYS = {
    "sequence_parallel": "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "offload": "actor_rollout_ref.actor.fsdp_config.{param_offload,optimizer_offload}",
}
MEGATRON_KEYS = {
    "tensor_parallel": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "context_parallel": "actor_rollout_ref.actor.megatron.context_parallel_size",
    "offload": "actor_rollout_ref.actor.megatron.{param_offload,optimizer_offload}",
}


def main(
    model: Annotated[str, typer.Argument(help="A model of the papers by its name, or a folder with a config.json.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPU_MEMORY)}.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="In all.")] = 8,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of prompt and response together.")] = 5120,
    engine: Annotated[str, typer.Option(help=f"model_engine: one of {', '.join(ENGINES)}.")] = "dp",
) -> None:
    """Say under which settings a model fits on GPUs, and what takes their memory."""
    try:
        memory = GPU_MEMORY[choice("gpu", gpu, tuple(GPU_MEMORY))]
        shape = SHAPES.get(model) or read(Path(model))
        chosen = settings(shape, memory, gpus, longest)
        if choice("engine", engine, ENGINES) == "megatron":
            sizes = megatron_sizes(shape, memory, gpus, longest, chosen)
            own, held = (MEGATRON_KEYS, sizes), megatron_use(shape, memory, gpus, longest, chosen, sizes)
        else:
            own, held = (FSDP2_KEYS, chosen), use(shape, memory, gpus, longest, chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console, table = Console(), Table("on each GPU", "GB")
    for name, value in asdict(held).items():
        table.add_row(name.replace("_", " "), str(value) if name == "sequences" else f"{value / 1e9:.1f}")
    console.print(f"model_engine={engine}", soft_wrap=True, highlight=False)
    for keys, values in ((SHARED_KEYS, chosen), own):
        for name, key in keys.items():
            console.print(f"{key}={str(getattr(values, name)).lower()}", soft_wrap=True, highlight=False)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
