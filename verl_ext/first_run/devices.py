"""``python -m verl_ext.first_run.devices RANKS``: one process per GPU computes, and all exchange a message.

Prints JSON: the versions of CUDA and NCCL that torch was built with, and of each rank its GPU and the GPU's bytes. With
``--cpu`` the ranks talk over gloo.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed

NUMBERS = 1 << 20  # of each message
SIZE = 512  # of the matrices that are multiplied


class NoGPU(Exception):
    """torch sees fewer GPUs than asked for, or none at all."""


def rank(number: int, ranks: int, store: str, on_gpus: bool) -> tuple[int, str, int]:
    """Multiply matrices on a device and sum a message over all ranks; the rank, and the device's name and bytes.

    Raises:
        RuntimeError: torch or NCCL fails, or a result is wrong.
    """
    device = torch.device("cuda", number) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    product = torch.ones(SIZE, SIZE, device=device) @ torch.ones(SIZE, SIZE, device=device)
    backend = "nccl" if on_gpus else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=number, world_size=ranks)
    message = torch.full((NUMBERS,), float(number + 1), device=device)
    torch.distributed.all_reduce(message)
    torch.distributed.destroy_process_group()
    if product[0, 0].item() != SIZE or message[-1].item() != ranks * (ranks + 1) / 2:
        raise RuntimeError(f"rank {number} computed {product[0, 0].item():g} and received {message[-1].item():g}")
    if not on_gpus:
        return number, "CPU", 0
    found = torch.cuda.get_device_properties(device)
    return number, found.name, found.total_memory


def look(ranks: int, on_gpus: bool) -> dict[str, Any]:
    """The content of the JSON that the module prints.

    Raises:
        NoGPU: torch is built without CUDA, or a GPU is missing.
    """
    if on_gpus and torch.version.cuda is None:
        raise NoGPU(f"torch {torch.__version__} is built without CUDA: bash examples/install_gpu.sh")
    if on_gpus and (seen := torch.cuda.device_count()) < ranks:
        raise NoGPU(f"torch sees {seen} GPUs of {ranks}")
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as pool:
        task = partial(rank, ranks=ranks, store=f"{folder}/store", on_gpus=on_gpus)
        # By completion: the first error leaves the block, which ends the ranks that wait for the failed one.
        devices = [found[1:] for found in sorted(pool.imap_unordered(task, range(ranks)))]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpus else None
    return {"cuda": torch.version.cuda, "nccl": nccl, "devices": devices}


def main(arguments: list[str]) -> None:
    """Print the result, or one line ``error: ...`` and exit with 1."""
    try:
        sys.stdout.write(json.dumps(look(int(arguments[0]), "--cpu" not in arguments)) + "\n")
    except (NoGPU, RuntimeError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(sys.argv[1:])
