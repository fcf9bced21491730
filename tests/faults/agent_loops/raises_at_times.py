"""A faulty agent loop; verl finds it by ``agent_loops.yaml``."""

from __future__ import annotations

import itertools
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

_calls = itertools.count()  # in the only agent-loop worker


class RaisesAtTimes(SingleTurnAgentLoop):
    """Every tenth trajectory of training ends with an error, after its tokens were generated."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        if kwargs["extra_info"]["split"] == "train" and next(_calls) % 10 == 3:
            raise RuntimeError("the environment has a fault")
        return output
