"""Gathered writes, in a real TransferQueue."""

from __future__ import annotations

import asyncio

import pytest
import torch
import transfer_queue as tq
from support.agent_loops import ScriptedEngine, make_tokenizer
from support.configs import compose
from support.queue_rows import clear, stored
from transformers import Qwen2Config
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from verl_ext.driver.agent_loop import WaveWorker
from verl_ext.driver.rows import MOST, Rows

VERLS = AgentLoopWorkerTQ.__ray_actor_class__
TRAJECTORY = {"step": 3, "sample_index": 0, "rollout_n": 0, "validate": False}


@pytest.fixture(autouse=True)
def empty_queue(queue):
    yield
    clear("train")


@pytest.fixture
def written(monkeypatch):
    """Number of keys of each write to TransferQueue."""
    written, put = [], tq.async_kv_batch_put

    async def counted(keys, **further):
        written.append(len(keys))
        return await put(keys=keys, **further)

    monkeypatch.setattr(tq, "async_kv_batch_put", counted)
    return written


def row(number: int) -> dict:
    return {"responses": torch.arange(number % 3 + 1), "extra_fields": {"number": number, "acc": 1.0}}


def read(keys: list[str]) -> list[dict]:
    data = tq.kv_batch_get(keys=keys, partition_id="train")
    columns = {name: data[name].unbind() if torch.is_tensor(data[name]) else list(data[name]) for name in data.keys()}  # noqa: SIM118
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def put(rows: Rows, number: int):
    tag = {"status": "success", "number": number}
    return rows.async_kv_batch_put(keys=[f"k_{number}_0"], fields=[row(number)], tags=[tag], partition_id="train")


def test_rows_are_written_before_the_ends_of_prompts(monkeypatch):
    """The driver takes a session whose prompt has ended and whose row is missing for failed."""
    written, store = [], tq.async_kv_batch_put

    async def noted(keys, **further):
        written.extend(keys)
        return await store(keys=keys, **further)

    monkeypatch.setattr(tq, "async_kv_batch_put", noted)

    async def main():
        rows = Rows("SimpleStorage")
        ends = [rows.async_kv_put(key=key, partition_id="train", tag={"status": "finished"}) for key in "ab"]
        await asyncio.gather(ends[0], put(rows, 1), ends[1], put(rows, 2))

    asyncio.run(main())
    assert sorted(written[:2]) == ["k_1_0", "k_2_0"] and sorted(written[2:]) == ["a", "b"]


def test_rows_of_one_moment_are_written_together(written):
    async def main():
        rows = Rows("SimpleStorage")
        await asyncio.gather(*(put(rows, number) for number in range(30)))

    asyncio.run(main())
    assert written == [30]
    assert {key: tag["number"] for key, tag in stored("train").items()} == {f"k_{n}_0": n for n in range(30)}
    for number, found in enumerate(read([f"k_{n}_0" for n in range(30)])):
        assert found["responses"].tolist() == row(number)["responses"].tolist()
        assert found["extra_fields"] == row(number)["extra_fields"]


def test_writes_that_differ_in_kind_are_apart_and_the_parts_are_bounded(written):
    async def main():
        rows = Rows("SimpleStorage")
        tags = [rows.async_kv_put(f"p{n}", "train", {"status": "running"}) for n in range(MOST + 5)]
        fewer = [{"extra_fields": {"number": 0}}]
        other = rows.async_kv_batch_put(keys=["o_0_0"], fields=fewer, tags=[{}], partition_id="train")
        await asyncio.gather(*tags, other, put(rows, 1))

    asyncio.run(main())
    assert sorted(written) == [1, 1, 5, MOST]
    assert read(["k_1_0"])[0]["responses"].tolist() == row(1)["responses"].tolist()


def test_a_checkpoint_holds_each_row_once(tmp_path):
    """Also if they have one length: a view of a row brings the whole tensor of its write."""
    fields = [{"responses": torch.full((2000,), number)} for number in range(64)]

    async def main():
        rows = Rows("SimpleStorage")
        writes = (rows.async_kv_batch_put([f"k_{n}_0"], [row], [{}], "train") for n, row in enumerate(fields))
        await asyncio.gather(*writes)

    asyncio.run(main())
    tq.save_checkpoint(tmp_path / "queue")
    content = sum(row["responses"].nbytes for row in fields)
    assert content < sum(file.stat().st_size for file in tmp_path.rglob("*.pkl")) < 1.5 * content
    clear("train")
    tq.load_checkpoint(tmp_path / "queue")
    assert all(
        found["responses"].tolist() == [n] * 2000 for n, found in enumerate(read([f"k_{n}_0" for n in range(64)]))
    )


def test_a_row_that_does_not_fit_fails_alone():
    async def main():
        rows = Rows("SimpleStorage")
        return await asyncio.gather(*(put(rows, number) for number in range(250)), return_exceptions=True)

    results = asyncio.run(main())
    failed = {f"k_{number}_0" for number, result in enumerate(results) if result is not None}
    assert 0 < len(failed) <= 250 - 150  # 200 rows, spread over the storage units
    assert all("Storage capacity exceeded" in str(result) for result in results if result is not None)
    assert failed == {key for key, tag in stored("train").items() if not tag}


def test_a_rollout_that_is_cancelled_leaves_the_rows_of_others_alone():
    async def main():
        rows = Rows("SimpleStorage")
        writes = [asyncio.ensure_future(put(rows, number)) for number in range(3)]
        await asyncio.sleep(0)
        writes[1].cancel()
        return await asyncio.gather(*writes, return_exceptions=True)

    first, cancelled, last = asyncio.run(main())
    assert first is None is last and isinstance(cancelled, asyncio.CancelledError)
    assert all(stored("train")[f"k_{number}_0"] for number in (0, 2))


def test_a_row_is_the_row_that_verl_writes(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    lengths = "data.max_prompt_length=64", "data.max_response_length=64"
    config = compose("grpo", f"actor_rollout_ref.model.path={tmp_path}", *lengths)

    class VerlsWorker(WaveWorker):
        """Ours, but verl writes the rows."""

        def __init__(self, *args):
            super().__init__(*args)
            self._verls_run_prompt, self._verls_postprocess = VERLS._run_prompt, VERLS._agent_loop_postprocess

    async def main():
        for name, worker_class in (("ours", WaveWorker), ("verls", VerlsWorker)):
            worker = worker_class(config, ScriptedEngine(tokenizer, ["one", "longer"]))
            prompt = {"uid": name, "agent_name": "single_turn_agent", "global_steps": 3, "index": torch.tensor(5)}
            prompt |= {"raw_prompt": [{"role": "user", "content": "say it"}], "__rollout_n__": 2, "empty": {}}
            prompt |= {"extra_info": {"pair": (1, 2.5), "none": None}, "reward_model": {"ground_truth": "one"}}
            await worker._run_prompt(prompt, {"logprobs": True}, TRAJECTORY)

    asyncio.run(main())
    tags = stored("train")
    assert tags.pop("ours") == tags.pop("verls") == {"status": "finished"}
    for session in (0, 1):
        keys = [f"{name}_{session}_0" for name in ("ours", "verls")]
        ours, verls = (read([key])[0] for key in keys)
        assert tags[keys[0]] == tags[keys[1]] and tags[keys[0]]["min_global_steps"] == 3
        assert (ours.pop("uid"), verls.pop("uid")) == ("ours", "verls")
        ours.pop("metrics"), verls.pop("metrics")  # seconds
        assert ours.keys() == verls.keys() >= {"responses", "rollout_log_probs", "position_ids", "extra_info"}
        for name, value in ours.items():
            assert type(value) is type(verls[name])
            assert torch.equal(value, verls[name]) if torch.is_tensor(value) else value == verls[name], name
