"""verl's client, load balancer and reward worker with gathered calls, on real Ray actors."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
import ray
import torch
from support.agent_loops import make_tokenizer
from support.configs import compose
from tensordict import TensorDict
from transformers import Qwen2Config
from verl import DataProto
from verl.experimental.reward_loop import RewardLoopWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from vllm.sampling_params import RequestOutputKind

from verl_ext.driver.gathered import GatheredActor
from verl_ext.driver.services import RewardWorker, TokenClient, gather_requests
from verl_ext.driver.transcript import TRANSCRIPT, Transcript, TranscriptClient

REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    if solution_str == "raise":
        raise ValueError(f"no reward for {data_source}")
    return {"score": float(solution_str == ground_truth), "turns": int(extra_info["num_turns"])}
"""


pytestmark = pytest.mark.usefixtures("queue")  # for its Ray


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    Qwen2Config(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    (folder / "reward.py").write_text(REWARD)
    return compose(
        "grpo",
        f"actor_rollout_ref.model.path={folder}",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "actor_rollout_ref.rollout.response_length=8",
    )


@pytest.fixture(scope="module")
def engines():
    """Two engines with verl's signature. Like verl's, they change the sampling parameters of a request."""

    @ray.remote
    class Engine:
        def __init__(self):
            self.requests = 0
            self.interrupted = {96: 0, 97: 2, 98: 0, 99: 2}  # first token of the prompt -> tokens of its first answer

        async def generate(self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None):
            self.requests += 1
            if not prompt_ids:
                raise ValueError("Prompt length leaves no room")
            first = self.interrupted.pop(prompt_ids[0], None)
            aborted = first is not None
            tokens = [prompt_ids[0]] * (first if aborted else sampling_params.pop("max_tokens", 3))
            assert sampling_params.pop("logprobs") and sampling_params.pop("detokenize") is False
            steps = {"global_steps": 4 if aborted else 5}
            return TokenOutput(token_ids=tokens, stop_reason="aborted" if aborted else "completed", extra_fields=steps)

        async def count(self):
            count, self.requests = self.requests, 0
            return count

    return {name: Engine.remote() for name in ("one", "two")}


@pytest.fixture(scope="module")
def balancer(engines):
    return ray.remote(GlobalRequestLoadBalancer).remote(servers=engines)


def used(engines) -> list[int]:
    """Requests of each engine since the last call."""
    return sorted(ray.get([engine.count.remote() for engine in engines.values()]))


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_a_wave_of_requests_is_balanced_over_the_engines_and_released(engines, balancer, config, client_class):
    used(engines)
    client = client_class(config, balancer)
    gather_requests(client, "vllm")
    settings = {"logprobs": True}

    async def main():
        def generate(number):
            prompt_ids = [number] if number else []
            request = f"{client_class.__name__}-{number}"
            return TokenClient(client).generate(request, prompt_ids=prompt_ids, sampling_params=settings)

        outputs = await asyncio.gather(*map(generate, range(50)), return_exceptions=True)
        again = await generate(7)  # a later turn
        address, engine = await client._acquire_server("id")
        assert isinstance(engine, GatheredActor)  # its requests travel together
        client._release_server(address)
        await asyncio.sleep(0.5)  # nobody waits for a release
        return outputs, again

    outputs, again = asyncio.run(main())
    length = 8 if client_class is FullyAsyncLLMServerClient else 3
    assert isinstance(outputs[0], ValueError) and "leaves no room" in str(outputs[0])
    assert [output.token_ids for output in outputs[1:]] == [[number] * length for number in range(1, 50)]
    assert again.token_ids == [7] * length and again.extra_fields["min_global_steps"] == 5
    assert settings == {"logprobs": True}
    assert used(engines) == [25, 26]
    assert ray.get(balancer.get_total_inflight.remote()) == 0


@pytest.mark.parametrize(
    ("engine", "token", "oldest"), [("vllm", 98, 5), ("vllm", 99, 4), ("sglang", 96, 5), ("sglang", 97, 4)]
)
def test_an_interrupted_response_goes_on_with_the_next_weights(balancer, config, engine, token, oldest):
    """A response that was interrupted before its first token has no token of the old weights."""
    client = FullyAsyncLLMServerClient(config, balancer)
    gather_requests(client, engine)

    async def main():
        TRANSCRIPT.set(Transcript())
        return await TokenClient(client).generate("id", prompt_ids=[token], sampling_params={"logprobs": True})

    output = asyncio.run(main())
    assert output.token_ids == [token] * 8
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (oldest, 5)


@pytest.fixture(scope="module")
def server():
    """verl's server with vLLM's ``engine.abort``. A request generates until it is aborted; as in vLLM, an abort that
    comes before the request has no effect. The first request of ``prompt_ids=[99]`` is interrupted by new weights."""

    @ray.remote
    class Server:
        def __init__(self):
            self.engine, self.gates, self.early, self.requests = self, {}, asyncio.Event(), 0

        async def generate(self, prompt_ids, sampling_params, request_id, image_data=None, video_data=None):
            self.requests += 1
            tokens = [7] * len(prompt_ids)
            if prompt_ids != [99]:
                await self.early.wait()
                self.gates[request_id] = asyncio.Event()
                await self.gates[request_id].wait()
            return TokenOutput(
                token_ids=tokens,
                log_probs=[-0.5] * len(tokens),
                stop_reason="aborted",
                extra_fields={"global_steps": 4},
            )

        async def abort(self, request_id):
            self.early.set()
            if request_id in self.gates:
                self.gates[request_id].set()

        async def count(self):
            count, self.requests = self.requests, 0
            self.early.clear()
            return count

    return Server.options(max_concurrency=100).remote()


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_a_cancelled_rollout_ends_its_request_and_keeps_the_count_of_its_tokens(server, config, client_class):
    """verl's client for interrupted rollouts goes on with the next weights. Here it must not."""
    balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers={"only": server})
    client = client_class(config, balancer)
    gather_requests(client, "vllm")
    interrupted = client_class is FullyAsyncLLMServerClient

    async def rollout(prompt_ids, transcript):
        TRANSCRIPT.set(transcript)
        await TranscriptClient(client).generate("id", prompt_ids=prompt_ids, sampling_params={})

    async def main():
        prompts = [[1, 2, 3], [1, 2], [99] if interrupted else [1]]
        transcripts = [Transcript() for _ in prompts]
        rollouts = [asyncio.ensure_future(rollout(*pair)) for pair in zip(prompts, transcripts, strict=True)]
        asked = 0
        while asked < len(prompts) + interrupted:  # verl's client waits a second before it goes on
            await asyncio.sleep(0.05)
            asked += await server.count.remote()
        for transcript, task in zip(transcripts, rollouts, strict=True):
            transcript.cancelled = True
            task.cancel()
        errors = await asyncio.wait_for(asyncio.gather(*rollouts, return_exceptions=True), 60)
        await asyncio.sleep(1.5)
        return errors, [transcript.generated for transcript in transcripts], [t.requests for t in transcripts]

    errors, generated, requests = asyncio.run(main())
    assert [type(error) for error in errors] == [asyncio.CancelledError] * 3
    assert generated == [3, 2, 1 + 2 if interrupted else 1]  # [99], and then [99, 7]
    assert ray.get(server.count.remote()) == 0 and requests == [{}, {}, {}]
    assert ray.get(balancer.get_total_inflight.remote()) == 0


def test_without_an_engine_the_client_says_so(config):
    client = LLMServerClient(config, ray.remote(GlobalRequestLoadBalancer).remote(servers={}))
    gather_requests(client, "vllm")

    async def main():
        await client.generate("id", prompt_ids=[1], sampling_params={})

    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        asyncio.run(main())


def test_a_client_without_a_load_balancer_stays_as_it_is():
    client = LLMServerClient(None)
    gather_requests(client, "vllm")
    assert client._load_balancer is None


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_text_is_decoded_for_stop_strings_only_and_engines_that_are_not_interrupted_answer_once(client_class):
    class Client(client_class):
        def __init__(self):
            self.seen = []

        async def generate(self, request_id, *, prompt_ids, sampling_params):
            self.seen.append(pickle.loads(pickle.dumps(sampling_params)))

    async def main():
        for settings in ({"top_p": 1.0}, {"stop": ["</answer>"]}, {"detokenize": True}):
            await TokenClient(client).generate("id", prompt_ids=[1], sampling_params=settings)

    client = Client()
    asyncio.run(main())
    once = {"output_kind": RequestOutputKind.FINAL_ONLY} if client_class is LLMServerClient else {}
    given = [{"top_p": 1.0, "detokenize": False}, {"stop": ["</answer>"]}, {"detokenize": True}]
    assert client.seen == [once | settings for settings in given]


def sample(text: str, place: int) -> DataProto:
    """A sample as verl's agent-loop worker makes it."""
    prompt, response = (
        torch.tensor([[1, 2, 3]]),
        torch.tensor([make_tokenizer().encode(text, add_special_tokens=False)]),
    )
    ids = torch.cat([prompt, response], dim=1)
    tensors = {"prompts": prompt, "responses": response, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return DataProto(
        TensorDict(tensors, batch_size=1),
        {
            "data_source": np.array([f"source {place}"]),
            "reward_model": np.array([{"ground_truth": str(place)}]),
            "extra_info": np.array([{"index": place}]),
            "__num_turns__": np.array([place]),
        },
    )


def test_a_reward_worker_of_verl_judges_each_sample_and_an_error_is_the_samples_own(config):
    judge = RewardWorker(ray.remote(RewardLoopWorker).remote(config))

    async def main():
        samples = [sample("raise" if place == 2 else str(place - place % 2), place) for place in range(6)]
        return await asyncio.gather(*map(judge.compute_score.remote, samples), return_exceptions=True)

    results = asyncio.run(main())
    error = results.pop(2)
    assert isinstance(error, ValueError) and "no reward for source 2" in str(error)
    assert [result["reward_score"] for result in results] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [result["reward_extra_info"]["turns"] for result in results] == [0, 1, 3, 4, 5]
