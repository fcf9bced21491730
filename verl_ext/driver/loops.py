"""Agent loops for the rollouts of a worker. verl composes a new loop for every rollout, which takes longer than the
rest of the loop's work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import hydra
from omegaconf import DictConfig, ListConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop


def loop_maker(target: DictConfig | dict[str, Any], **arguments: Any) -> Callable[[], AgentLoopBase]:
    """A function to call for each rollout; it returns the rollout's agent loop.

    verl's own loops keep nothing of a rollout in ``self``, so all rollouts use the same loop. Users' own loops may keep
    state, so each rollout gets its own loop. If the configuration has nested parts, such as an environment with its
    own ``_target_``, hydra composes them anew for each rollout, as under verl: loops may change these parts, too.

    Args:
        target: configuration of the loop, with its class in ``_target_``, as registered with verl.
        arguments: of the loop's constructor.
    """
    if any(isinstance(value, dict | list | DictConfig | ListConfig) for value in target.values()):
        return partial(hydra.utils.instantiate, target, **arguments)
    make = hydra.utils.instantiate(target, _partial_=True, **arguments)
    shared_class = SHARED.get(make.func)
    if shared_class is None:
        return make
    loop = shared_class(*make.args, **make.keywords)
    return lambda: loop


class PromptTokens:
    """The tokens of a group's prompt. The first rollout of the group renders the prompt, the other rollouts wait."""

    def __init__(self) -> None:
        self._messages: list[dict] | None = None
        self._tools: list[dict] | None = None
        self._tokens: asyncio.Future | None = None

    def of(self, messages: list[dict], tools: list[dict] | None, render: Callable[[], Any]) -> Any:
        """The awaitable tokens of ``messages``. Messages that differ from the first rollout's are rendered anew."""
        if self._tokens is None:
            self._messages, self._tools = list(messages), tools  # loops append to their messages
            self._tokens = asyncio.ensure_future(render())
        if (messages, tools) != (self._messages, self._tools):
            return render()
        return asyncio.shield(self._tokens)  # a rollout that is cancelled leaves the tokens to the others


PROMPT_TOKENS: ContextVar[PromptTokens | None] = ContextVar("prompt_tokens", default=None)  # each group is a task


class _SharesPrompt(AgentLoopBase):
    """A loop that renders the prompt of a group once. A prompt with images, videos or sound is rendered per rollout."""

    async def ct_build_initial_tokens(
        self,
        messages: list[dict],
        tools: list[dict] | None = None,
        images: list | None = None,
        videos: list | None = None,
        audios: list | None = None,
        mm_inputs_out: dict[str, Any] | None = None,
    ) -> list[int]:
        group = PROMPT_TOKENS.get()

        async def render() -> list[int]:
            return await super(_SharesPrompt, self).ct_build_initial_tokens(
                messages, tools, images, videos, audios, mm_inputs_out
            )

        if group is None or images or videos or audios:
            return await render()
        return list(await group.of(messages, tools, render))


class SharedSingleTurnLoop(_SharesPrompt, SingleTurnAgentLoop):
    """verl's loop of one turn, for all rollouts of a worker."""


class SharedToolLoop(_SharesPrompt, ToolAgentLoop):
    """verl's loop with tools, for all rollouts of a worker."""


SHARED: dict[type, type[AgentLoopBase]] = {
    SingleTurnAgentLoop: SharedSingleTurnLoop,
    ToolAgentLoop: SharedToolLoop,
}
