"""Replays a prefix through verl's own agent loops, unchanged.

An agent loop asks an LLM client for one turn at a time. While a prefix lasts, :class:`PrefixClient` answers with the
recorded turns. The loop parses the turns and runs the tools as always, to rebuild the environment's state. After the
prefix, the client asks the engine.

Source: *Rollout Pass-Rate Control*, §2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_ext.trajectory import Span, Trajectory


class PrefixPlayback:
    """Position of a rollout within the rollout's prefix.

    Args:
        prefix: the trajectory to replay.
        goes_on: if an observation differs from the recorded observation, the prefix ends with the new observation, and
            the model generates from there. Without ``goes_on`` the rollout is lost.

    Attributes:
        diverged: an observation differed from the recorded observation, or the loop ended within the prefix.
        is_over: the model generates from here on.
        length: number of response tokens in front of the model's own: replayed turns and all observations so far.
        turn_tokens: number of tokens of the replayed turns.
    """

    def __init__(self, prefix: Trajectory, *, goes_on: bool = False):
        self.prefix, self.goes_on = prefix, goes_on
        self.diverged = self.is_over = False
        self.length = self.turn_tokens = 0
        self._tokens = prefix.tokens.tolist()
        self._turns = {span.start: span for span in prefix.spans if span.generated}
        self._prompt: list[int] | None = None  # of the first call; later calls append the response so far

    def next_turn(self, prompt_ids: Sequence[int]) -> Span | None:
        """The recorded turn, as the answer to this call; None after the prefix, or if the environment has diverged."""
        if self._prompt is None:
            self._prompt = list(prompt_ids)
        start = len(prompt_ids) - len(self._prompt)
        turn = self._turns.get(start)
        as_recorded = list(prompt_ids) == self._prompt + self._tokens[:start]
        if not as_recorded or (turn is None and start < len(self._tokens)):
            self.diverged, self.is_over = True, self.goes_on
            self.length = start
            return None
        self.length = start if turn is None else turn.stop
        self.turn_tokens += 0 if turn is None else turn.stop - turn.start
        self.is_over = self.length == len(self._tokens)
        return turn


PLAYBACK: ContextVar[PrefixPlayback | None] = ContextVar("playback", default=None)  # each rollout is a task


class PrefixClient:
    """An LLM client whose first answers come from the current rollout's prefix.

    Args:
        client: verl's own client of the engines.
        response_length: most tokens of a response, the prefix included.
    """

    def __init__(self, client: Any, response_length: int):
        self._client, self._response_length = client, response_length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        playback = PLAYBACK.get()
        turn = None
        if playback is not None and not playback.is_over:
            turn = playback.next_turn(prompt_ids)
            if playback.diverged and not playback.is_over:  # any short answer without a tool call ends the loop
                return _recorded(playback.prefix.tokens[:1].tolist(), sampling_params)
        if turn is None:
            return await self._client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        recorded = playback.prefix.tokens[turn.start : turn.stop].tolist()
        room = self._response_length - turn.stop
        if "max_tokens" in sampling_params:  # the request's own limit, from the beginning of the turn
            room = min(room, sampling_params["max_tokens"] - len(recorded))
        if turn.stop < len(playback.prefix) or room < 1:
            return _recorded(recorded, sampling_params)
        # The prefix ends within this turn, so the policy continues the turn.
        output = await self._client.generate(
            request_id,
            prompt_ids=[*prompt_ids, *recorded],
            sampling_params={**sampling_params, "max_tokens": room},
            **kwargs,
        )
        answer = _recorded(recorded, sampling_params)
        log_probs = None if answer.log_probs is None else answer.log_probs + list(output.log_probs)
        tokens = recorded + list(output.token_ids)
        return output.model_copy(update={"token_ids": tokens, "log_probs": log_probs})


def _recorded(tokens: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
    """A recorded turn in the form of the engine's answers, with log-probabilities only if the request asks for them.
    Extra fields are left out: the loop keeps the first extra fields that it gets, and these must be the policy's."""
    log_probs = [0.0] * len(tokens) if sampling_params.get("logprobs") else None
    return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed")


def mask_prefix(output: AgentLoopOutput, playback: PrefixPlayback) -> None:
    """Mask the prefix in the loss; mask the whole response if the rollout ended within the prefix.

    Args:
        output: the agent loop's output; changed in place.
        playback: the rollout's position in the prefix.
    """
    if not playback.is_over:
        playback.diverged = True
    masked = min(playback.length, len(output.response_mask)) if playback.is_over else len(output.response_mask)
    output.response_mask = [0] * masked + list(output.response_mask[masked:])
