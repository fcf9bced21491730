"""``verl-ext hardware MODEL --gpu h200 --gpus 8 --longest 5120``: settings under which a model fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_ext.checks import choice
from verl_ext.errors import option_errors
from verl_ext.hardware.megatron import MEGATRON_KEYS, megatron_sizes, megatron_use
from verl_ext.hardware.memory import FSDP2_KEYS, GPU_MEMORY, SHARED_KEYS, settings, use
from verl_ext.hardware.shapes import find

ENGINES = ("dp", "megatron")
POSITIONS_KEYS = (  # of training and vLLM; the experiments beyond a model's limit set them, too
    "model.override_config.max_position_embeddings",
    "rollout.engine_kwargs.vllm.hf_overrides.max_position_embeddings",
)


def main(
    model: Annotated[str, typer.Argument(help="Name of a model, or a folder with a config.json.")],
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(GPU_MEMORY)}.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="Total number of GPUs.")] = 8,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of prompt and response together.")] = 5120,
    engine: Annotated[str, typer.Option(help=f"model_engine of the training: {', '.join(ENGINES)}.")] = "dp",
) -> None:
    """Print settings under which a model fits on GPUs, and how they use the GPUs' memory."""
    with option_errors():
        memory = GPU_MEMORY[choice("gpu", gpu, tuple(GPU_MEMORY))]
        shape = find(model)
        chosen = settings(shape, memory, gpus, longest)
        if choice("engine", engine, ENGINES) == "megatron":
            sizes = megatron_sizes(shape, memory, gpus, longest, chosen)
            own, held = (MEGATRON_KEYS, sizes), megatron_use(shape, memory, gpus, longest, chosen, sizes)
        else:
            own, held = (FSDP2_KEYS, chosen), use(shape, memory, gpus, longest, chosen)
    console, table = Console(), Table("on each GPU", "GB")
    for name, value in asdict(held).items():
        table.add_row(name.replace("_", " "), str(value) if name == "sequences" else f"{value / 1e9:.1f}")
    console.print(f"model_engine={engine}", soft_wrap=True, highlight=False)
    for keys, values in ((SHARED_KEYS, chosen), own):
        for name, key in keys.items():
            console.print(f"{key}={str(getattr(values, name)).lower()}", soft_wrap=True, highlight=False)
    console.print(table)
    if longest > shape.positions:
        raised = "".join(f" +actor_rollout_ref.{key}={longest}" for key in POSITIONS_KEYS)
        note = f"longest={longest} exceeds the model's {shape.positions} positions. To raise its limit, add{raised}"
        Console(stderr=True).print(note, soft_wrap=True, highlight=False, markup=False)
