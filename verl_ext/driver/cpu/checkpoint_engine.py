"""Weights from the actor to engines in other processes, on CPUs: verl's ``nccl`` for machines without a GPU.

verl imports this module because ``hardware=cpu`` sets ``checkpoint_engine.custom_backend_module`` to the module's name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

TIMEOUT = timedelta(minutes=10)


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts each weight, in chunks, from the actor's first worker to every worker of the engines.

    The process group lives for one update. The actor's other workers send nothing: they only help to gather the
    weights.

    Args:
        bucket_size: largest chunk, in bytes.
        is_master: whether this worker is the actor's first.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size, self.is_master = bucket_size, is_master
        self.rank = -1
        self.store: TCPStore | None = None
        self.group: ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """The master's host and port, where the group meets; None from all other workers.

        The master listens from here on, so no other program can take the port.
        """
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
        return host, self.store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 is the actor's first worker, and the engines' workers follow; -1 means: not in the group."""
        size = 1 + rollout_world_size
        actor_ranks = [0] + [-1] * (actor_wg_world_size - 1)
        return tuple(
            {"rank": ranks, "world_size": [size] * len(ranks), "meeting_point": [metadata[0]] * len(ranks)}
            for ranks in (actor_ranks, list(range(1, size)))
        )

    def init_process_group(self, rank: int, world_size: int, meeting_point: tuple[str, int]) -> None:
        self.rank = rank
        if rank > 0:
            self.store = TCPStore(*meeting_point, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
        if rank >= 0:
            self.group = ProcessGroupGloo(self.store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        self.group = self.store = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            if self.rank == 0:
                self._send_meta(meta)
                self._broadcast(chunk.contiguous())
        if self.rank == 0:
            self._send_meta(None)

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        async for name, weight in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield name, weight

    async def _chunks(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        while (meta := self._receive_meta()) is not None:
            yield meta, self._broadcast(torch.empty(meta.chunk_size, dtype=torch.uint8))

    def _send_meta(self, meta: TensorMeta | None) -> None:
        content = torch.frombuffer(bytearray(_to_json(meta)), dtype=torch.uint8)
        self._broadcast(torch.tensor([content.numel()]))
        self._broadcast(content)

    def _receive_meta(self) -> TensorMeta | None:
        length = int(self._broadcast(torch.empty(1, dtype=torch.int64)))
        return _from_json(self._broadcast(torch.empty(length, dtype=torch.uint8)).numpy().tobytes())

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self.group.broadcast(tensor, 0).wait()
        return tensor


def _to_json(meta: TensorMeta | None) -> bytes:
    """The description of a chunk; None, the end of the weights, is ``null``."""
    fields = meta and asdict(meta) | {"shape": list(meta.shape), "dtype": str(meta.dtype).removeprefix("torch.")}
    return json.dumps(fields).encode()


def _from_json(content: bytes) -> TensorMeta | None:
    """Inverse of :func:`_to_json`. JSON instead of verl's pickles: a peer can send numbers and names, but no code."""
    fields = json.loads(content)
    if fields is None:
        return None
    return TensorMeta(**fields | {"shape": torch.Size(fields["shape"]), "dtype": getattr(torch, fields["dtype"])})
