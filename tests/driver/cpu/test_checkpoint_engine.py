"""Weights through the CPU's checkpoint engine, between two threads instead of two Ray workers."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from verl_ext.driver.cpu.checkpoint_engine import GlooCheckpointEngine

BUCKET = 64  # bytes
WEIGHTS = {
    "half": torch.randn(3, 4, dtype=torch.bfloat16),
    "large": torch.randn(25, 3),  # 300 bytes: five chunks
    "layers.0.größe": torch.arange(5),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "mask": torch.tensor([[True], [False]]),
}


def transferred() -> tuple[dict[str, torch.Tensor], list[bytes]]:
    """The received weights, and all descriptions of chunks as they were sent."""
    engines = [GlooCheckpointEngine(BUCKET, is_master=rank == 0) for rank in (0, 1)]
    meeting_point, _ = [engine.prepare() for engine in engines]
    sent: list[bytes] = []

    def run(rank: int) -> dict[str, torch.Tensor] | None:
        engine = engines[rank]
        engine.init_process_group(rank, 2, meeting_point)
        broadcast = engine._broadcast
        if rank == 0:
            engine._broadcast = lambda tensor: sent.append(tensor.numpy().tobytes()) or broadcast(tensor)

        async def transfer() -> dict[str, torch.Tensor] | None:
            if rank == 0:
                return await engine.send_weights(iter(WEIGHTS.items()))
            return {name: weight.clone() async for name, weight in engine.receive_weights()}

        received = asyncio.run(transfer())
        engine.finalize()
        return received

    with ThreadPoolExecutor(2) as threads:
        _, received = threads.map(run, (0, 1))
    return received, sent


def test_weights_arrive_with_names_shapes_and_types_and_their_descriptions_are_json():
    received, sent = transferred()
    assert list(received) == list(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert received[name].dtype == weight.dtype and received[name].shape == weight.shape
        assert torch.equal(received[name], weight)
    chunks = {name: -(-weight.nbytes // BUCKET) for name, weight in WEIGHTS.items()}
    assert chunks["large"] == 5
    lengths_and_descriptions = [json.loads(sent[place]) for place in _descriptions(sent)]
    names = [name for name, count in chunks.items() for _ in range(count)]
    assert [fields and fields["name"] for fields in lengths_and_descriptions] == [*names, None]


def test_the_master_listens_before_any_other_worker_knows_its_port():
    master, other = GlooCheckpointEngine(BUCKET, is_master=True), GlooCheckpointEngine(BUCKET)
    host, port = master.prepare()
    assert other.prepare() is None
    with socket.create_connection((host, port), timeout=10):
        pass
    with socket.socket() as taken, pytest.raises(OSError, match="in use"):
        taken.bind((host, port))
    master.finalize()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=10)


def _descriptions(sent: list[bytes]) -> list[int]:
    """Places of the descriptions: each follows its length, and a chunk follows each description but the last."""
    return list(range(1, len(sent), 3))


@pytest.mark.parametrize("ranks", [(1, 1), (2, 3)])
def test_the_first_actor_worker_and_all_engine_workers_meet_at_the_masters_address(ranks):
    actor, rollout = GlooCheckpointEngine.build_topology(*ranks, [("host", 4), None])
    assert actor["rank"] == [0] + [-1] * (ranks[0] - 1)
    assert rollout["rank"] == list(range(1, ranks[1] + 1))
    for side in (actor, rollout):
        assert set(side["world_size"]) == {1 + ranks[1]} and set(side["meeting_point"]) == {("host", 4)}
        assert len({len(values) for values in side.values()}) == 1
