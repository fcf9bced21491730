"""The remote services of a rollout - load balancer, engines, reward workers - called for many rollouts at once."""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_ext.driver.gathered import GatheredActor
from verl_ext.driver.transcript import TRANSCRIPT, Transcript

TURN = 0.002  # seconds; requests to an engine within this time travel together
SCORE = 0.005  # seconds; samples for a reward worker within this time travel together


def gather_requests(client: LLMServerClient, engine_name: str) -> None:
    """Make verl's client send its requests to the load balancer, and then to the engines, together.

    A client that does without verl's load balancer stays as it is.
    """
    if getattr(client, "_load_balancer", None) is not None:
        make = VllmEngine if engine_name == "vllm" else Engine
        client._load_balancer = GatheredBalancer(client._load_balancer, make)


class GatheredBalancer(GatheredActor):
    """verl's load balancer. Requests to the engines that the load balancer chooses travel together, too.

    Args:
        balancer: its handle.
        make_engine: class of the engines.
    """

    def __init__(self, balancer: ray.actor.ActorHandle, make_engine: type[GatheredActor]):
        super().__init__(balancer, is_async=False)
        self._make_engine = make_engine
        self._engines: dict[ray.actor.ActorHandle, GatheredActor] = {}

    def _received(self, name: str, result: Any) -> Any:
        if name != "acquire_server":
            return result
        address, engine = result
        if engine not in self._engines:
            self._engines[engine] = self._make_engine(engine, TURN)
        return address, self._engines[engine]


class Engine(GatheredActor):
    """verl's server of an engine.

    verl's client records the policy version of a response's first answer as the response's oldest version. An answer
    that was aborted before its first token is empty, so the answer's policy version is removed.
    """

    def _asked(self, name: str, kwargs: dict[str, Any], answer: asyncio.Future) -> None:
        if name == "generate":
            answer.add_done_callback(_note_empty)


class VllmEngine(Engine):
    """verl's server of a vLLM engine. A cancelled rollout can end its request, whose answer has the tokens so far."""

    def _asked(self, name: str, kwargs: dict[str, Any], answer: asyncio.Future) -> None:
        super()._asked(name, kwargs, answer)
        transcript = TRANSCRIPT.get()
        if name == "generate" and transcript is not None:
            # verl's own abort_request does not find the request, because vLLM adds to the request's name.
            transcript.requests[answer] = partial(getattr(self, "engine.abort").remote, kwargs["request_id"])
            answer.add_done_callback(partial(_note_end, transcript))


def _has_output(answer: asyncio.Future) -> bool:
    return not answer.cancelled() and answer.exception() is None


def _note_empty(answer: asyncio.Future) -> None:
    if _has_output(answer) and not answer.result().token_ids and answer.result().stop_reason in ("aborted", "abort"):
        answer.result().extra_fields["global_steps"] = None


def _note_end(transcript: Transcript, answer: asyncio.Future) -> None:
    """Replace a cancelled request's stop reason: after "aborted", verl's client would go on with the next weights."""
    del transcript.requests[answer]
    if _has_output(answer) and transcript.cancelled:
        answer.result().stop_reason = "cancelled"


class TokenClient:
    """A client of vLLM engines that asks for tokens alone, and for one answer to each request.

    verl reads no text, and vLLM would decode every token. verl reads the last answer, and vLLM would give one for every
    token. Before verl's server interrupts an engine, it waits for an answer to each request, or a minute: engines that
    are interrupted give all answers. vLLM's ``stream_interval`` cannot make them fewer: vLLM heeds this setting only if
    each answer holds just the new tokens. verl keeps the last answer, and would lose the tokens before it.

    Args:
        client: verl's client. Requests with stop strings need the text.
    """

    def __init__(self, client: LLMServerClient):
        self._client = client
        is_interrupted = isinstance(client, FullyAsyncLLMServerClient)  # goes on with interrupted responses
        self._settings = {} if is_interrupted else {"output_kind": _FinalOnly()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **kwargs: Any) -> TokenOutput:
        sampling_params = self._settings | sampling_params
        if not sampling_params.get("stop"):
            sampling_params.setdefault("detokenize", False)
        return await self._client.generate(request_id, sampling_params=sampling_params, **kwargs)


class _FinalOnly:
    """Is unpickled as vLLM's name for one answer to a request, so that the server imports vLLM, and an agent loop does
    not (4 s)."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return pkgutil.resolve_name, ("vllm.sampling_params:RequestOutputKind.FINAL_ONLY",)


class RewardWorker(GatheredActor):
    """A reward worker of verl."""

    def __init__(self, worker: ray.actor.ActorHandle):
        super().__init__(worker, SCORE)

    def _sent(self, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return tuple(_Light(each) if isinstance(each, DataProto) else each for each in args), kwargs


class _Light:
    """Data that are pickled as plain bytes and arrive as verl's own. verl's ``torch.save`` of a sample takes longer
    than judging most samples."""

    def __init__(self, data: DataProto):
        self._data = data

    def __reduce__(self) -> tuple[Callable, tuple]:
        tensors = {
            name: (tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape)
            for name, tensor in self._data.batch.items()
        }
        return _unpacked, (tensors, len(self._data), self._data.non_tensor_batch, self._data.meta_info)


def _unpacked(tensors: dict[str, tuple], rows: int, non_tensor_batch: dict[str, Any], meta_info: dict) -> DataProto:
    batch = {
        name: torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        for name, (data, dtype, shape) in tensors.items()
    }
    return DataProto(TensorDict(batch, batch_size=rows), non_tensor_batch, meta_info)
