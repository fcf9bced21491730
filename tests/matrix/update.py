"""What a training's optimizer has done, from the shards of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

SHARDS = "optim_world_size_*_rank_*.pt"


def first_moments(checkpoint: Path) -> list[torch.Tensor]:
    """Adam's first moments, whole, in the order of the parameters: weighted sums of the gradients so far."""
    shards = sorted((checkpoint / "actor").glob(SHARDS), key=lambda file: int(file.stem.rpartition("_")[2]))
    states = [torch.load(file, weights_only=False)["state"] for file in shards]
    names = range(len(states[0]))
    return [torch.cat([_local(state[name]["exp_avg"]) for state in states]) for name in names]


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference of two numbers at the same place, relative to the largest number.

    Raises:
        ValueError: the tensors differ in shape.
    """
    shapes = [[tuple(tensor.shape) for tensor in moments] for moments in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"tensors of shapes {shapes[0]} and {shapes[1]}")
    largest = max(float(tensor.abs().max()) for tensor in one)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) / largest


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows: FSDP2 splits the first dimension, in the order of the ranks."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
