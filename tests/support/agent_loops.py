"""verl's own agent loops in this process, with real tools and a scripted engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hydra
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from support.configs import compose
from verl_ext.first_run.made_up import END, byte_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with ChatML's own as single tokens."""
    return byte_tokenizer([], CHAT_TEMPLATE)


def sql_call(query: str) -> str:
    """A turn with a call of the tool ``sql``."""
    return f'<tool_call>{{"name": "sql", "arguments": {{"query": "{query}"}}}}</tool_call>'


@dataclass
class ScriptedEngine:
    """Answers each call with the next of its turns, cut off at ``max_tokens``, and records the requests.

    As vLLM, it gives log-probabilities if they are asked for.
    """

    tokenizer: Any
    turns: Iterable[str]
    version: int = 3
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        self.turns = iter(self.turns)

    async def generate(self, request_id: str, *, prompt_ids, sampling_params, **kwargs) -> TokenOutput:
        self.calls.append({"prompt_ids": list(prompt_ids), "sampling_params": dict(sampling_params)})
        tokens = self.tokenizer.encode(next(self.turns) + END, add_special_tokens=False)
        tokens = tokens[: sampling_params.get("max_tokens")]
        steps = {"global_steps": self.version, "min_global_steps": self.version, "max_global_steps": self.version}
        log_probs = [-0.5] * len(tokens) if sampling_params.get("logprobs") else None
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed", extra_fields=steps)


def make_loop(name: str, client: Any, tokenizer: Any, tools: Sequence[Any] = (), *overrides: str) -> AgentLoopBase:
    """A loop, made as in verl's worker."""
    lengths = ["data.max_prompt_length=256", "data.max_response_length=1024"]
    config = compose("prefix_sampling", *lengths, *overrides)
    return hydra.utils.instantiate(
        config=_agent_loop_registry[name],
        trainer_config=DictConfigWrap(config=config),
        server_manager=client,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen2",
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        tools=ToolListWrap(list(tools)),
    )
