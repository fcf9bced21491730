"""An agent loop that never comes to its first turn; verl finds it by ``agent_loops.yaml``."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class NeverAsks(SingleTurnAgentLoop):
    """Every trajectory waits for ever, and the engine generates nothing."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await asyncio.get_running_loop().create_future()
