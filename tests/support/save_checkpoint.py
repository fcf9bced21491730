"""Shards a model in Hugging Face format with FSDP2 over several ranks, and lets verl save a training checkpoint.

The first argument is the model, the second the run's folder, the third the step, the fourth the number of ranks. Each
rank is a fork of this process, after verl has been imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from verl_ext.launch import collect_rarely


def main(rank: int, source: str, run: Path, step: int, ranks: int) -> None:
    store = torch.distributed.FileStore(str(run / "ranks"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = FSDPCheckpointManager(model, optimizer, processing_class=AutoTokenizer.from_pretrained(source))
    manager.save_checkpoint(str(run / f"global_step_{step}/actor"), global_step=step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    collect_rarely()
    source, run, step, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.multiprocessing.start_processes(main, (source, run, step, ranks), ranks, start_method="fork")
    (run / "ranks").unlink()
