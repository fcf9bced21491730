"""verl's agent loops, with several waves under one group."""

from __future__ import annotations

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

SESSION_OFFSET = "session_offset"


class WaveWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Numbers the sessions of a later wave behind those of the earlier ones.

    verl numbers the sessions of every submission from 0, so a second one under the same uid would overwrite the first.
    """

    def __init__(self, *args, **kwargs):  # without a signature of its own, Ray's wrapping fails
        super().__init__(*args, **kwargs)

    async def _run_agent_loop(self, sampling_params, trajectory, *, session_id, session_offset=0, **kwargs):
        session_id += int(session_offset)
        return await super()._run_agent_loop(sampling_params, trajectory, session_id=session_id, **kwargs)


class WaveManager(AgentLoopManagerTQ):
    """Dispatches to :class:`WaveWorker`, starting with another worker each time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(WaveWorker)

    def generate_sequences(self, prompts) -> None:
        super().generate_sequences(prompts)
        # verl gives chunk i to worker i: small submissions would all go to the first workers.
        used = min(len(prompts), len(self.agent_loop_workers))
        self.agent_loop_workers = self.agent_loop_workers[used:] + self.agent_loop_workers[:used]
