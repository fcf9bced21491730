"""verl's agent loops, with several waves under one group."""

from __future__ import annotations

import numpy as np
import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_ext.allocation.balance import partition, random_dispatch

ROLLOUTS = "__rollout_n__"  # verl's own key for the number of rollouts of a prompt
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
    """Dispatches to :class:`WaveWorker`, so that each has about as many rollouts to run (Knapsack-RL Appendix C).

    verl gives chunk i of the prompts to worker i, which is even in prompts only. A worker is a client: which engine
    generates a response is up to verl's load balancer, one response at a time.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(WaveWorker)
        self._submissions = 0

    def generate_sequences(self, prompts) -> None:
        workers = self.agent_loop_workers
        self._submissions += 1
        if ROLLOUTS not in prompts or len(workers) == 1:  # validation: the same for every prompt
            super().generate_sequences(prompts)
            return
        if self.config.rollout_driver.dispatch == "random":
            owner = random_dispatch(len(prompts), len(workers), seed=self._submissions)
        else:
            owner = partition(prompts[ROLLOUTS].numpy(), len(workers))
        # The fullest share is worker 0's: another worker each time, or small submissions would all go to the first.
        owner = (owner + self._submissions) % len(workers)
        try:
            for number, worker in enumerate(workers):
                rows = np.flatnonzero(owner == number)
                if rows.size:
                    self.agent_loop_workers = [worker]
                    super().generate_sequences(tu.index_select_tensor_dict(prompts, rows.tolist()))
        finally:
            self.agent_loop_workers = workers
