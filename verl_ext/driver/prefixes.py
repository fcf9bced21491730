"""Replaying a prefix through verl's own agent loops, which know nothing of it.

An agent loop asks an LLM client for one turn at a time. While a prefix lasts, :class:`ReplayClient` answers with the
turns that were recorded, so that the loop parses them and runs its tools as it always does: the environment's state is
reconstructed by execution. Then it asks the engine.

Source: *Rollout Pass-Rate Control*, §2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_ext.trajectory import Span, Trajectory


class Replay:
    """One rollout's way through its prefix.

    Attributes:
        prefix: what is replayed.
        diverged: an observation was not the recorded one.
    """

    def __init__(self, prefix: Trajectory):
        self.prefix, self.diverged = prefix, False
        self._tokens = prefix.tokens.tolist()
        self._turns = {span.start: span for span in prefix.spans if span.generated}
        self._prompt: list[int] | None = None  # of the first call; later calls carry the response behind it
        self._replayed = 0  # tokens of the prefix that the loop has accepted, observations included

    @property
    def is_over(self) -> bool:
        """Everything was replayed, and the environment answered as recorded."""
        return self._replayed == len(self._tokens)

    def next_turn(self, prompt_ids: Sequence[int]) -> Span | None:
        """The recorded turn that answers this call, or None where it is the policy's turn, or things have diverged."""
        if self._prompt is None:
            self._prompt = list(prompt_ids)
        start = len(prompt_ids) - len(self._prompt)
        as_recorded = list(prompt_ids) == self._prompt + self._tokens[:start]
        turn = self._turns.get(start)
        if not as_recorded or (turn is None and start < len(self._tokens)):
            self.diverged = True
            return None
        self._replayed = start if turn is None else turn.stop
        return turn


REPLAY: ContextVar[Replay | None] = ContextVar("replay", default=None)  # every rollout is an asyncio task of its own


class ReplayClient:
    """An LLM client that answers from the current rollout's prefix first.

    Args:
        client: verl's.
        response_length: tokens of a response at most, replayed ones included.
    """

    def __init__(self, client: Any, response_length: int):
        self._client, self._response_length = client, response_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        replay = REPLAY.get()
        turn = None
        if replay is not None and not replay.is_over:
            turn = replay.next_turn(prompt_ids)
            if replay.diverged:  # any short answer that is no tool call ends the loop
                return _recorded(replay.prefix.tokens[:1].tolist())
        if turn is None:
            return await self._client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        recorded = replay.prefix.tokens[turn.start : turn.stop].tolist()
        room = self._response_length - turn.stop
        if turn.stop < len(replay.prefix) or room < 1:
            return _recorded(recorded)
        # The prefix ends within this turn: the policy goes on where it does.
        output = await self._client.generate(
            request_id,
            prompt_ids=[*prompt_ids, *recorded],
            sampling_params={**sampling_params, "max_tokens": room},
            **kwargs,
        )
        log_probs = None if output.log_probs is None else [0.0] * len(recorded) + list(output.log_probs)
        tokens = recorded + list(output.token_ids)
        return output.model_copy(update={"token_ids": tokens, "log_probs": log_probs})


def _recorded(tokens: list[int]) -> TokenOutput:
    """Without extra fields: the loop takes those of the first answer that has any, which must be the policy's."""
    return TokenOutput(token_ids=tokens, log_probs=[0.0] * len(tokens), stop_reason="completed")


def mask_replayed(output: AgentLoopOutput, replay: Replay, version: int) -> None:
    """Take what was replayed out of the loss; of a replay that diverged, or did not get to its end, everything.

    Args:
        output: of the agent loop; changed in place.
        replay: this rollout's.
        version: policy version to record where the policy was never asked.
    """
    if not replay.is_over:
        replay.diverged = True
    masked = len(output.response_mask) if replay.diverged else min(len(replay.prefix), len(output.response_mask))
    output.response_mask = [0] * masked + list(output.response_mask[masked:])
    for name in ("min_global_steps", "max_global_steps"):
        output.extra_fields.setdefault(name, version)
