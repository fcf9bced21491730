"""An agent loop with the same rollouts in every run; verl finds it by ``agent_loops.yaml``."""

from __future__ import annotations

import random
import string
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

FAILED = 0.1  # share of the rollouts


class SameRollouts(SingleTurnAgentLoop):
    """The engine generates, and then letters that depend only on prompt and session take the place of its tokens.

    Responses differ in length, and some rollouts fail, so groups differ in size.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        draw = random.Random(f"rollout {kwargs['session_id']} of prompt {kwargs['extra_info']['index']}")
        if draw.random() < FAILED:
            raise RuntimeError("this rollout fails in every run")
        letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, self.response_length - 1)))
        output.response_ids = [*self.tokenizer.encode(letters, add_special_tokens=False), self.tokenizer.eos_token_id]
        output.response_mask = [1] * len(output.response_ids)
        output.response_logprobs = [0.0] * len(output.response_ids)
        return output
