"""verl's agent loops, with several waves under one group, and prefixes in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu

from verl_ext.allocation.balance import partition, random_dispatch
from verl_ext.driver.outcome import has_unanswered_call, note_outcome
from verl_ext.driver.prefixes import REPLAY, Replay, ReplayClient, mask_replayed
from verl_ext.prompts import prompt_id, prompt_id_of_group
from verl_ext.trajectory import Trajectory

ROLLOUTS = "__rollout_n__"  # verl's own key for the number of rollouts of a prompt
SESSION_OFFSET = "session_offset"
PREFIX = "replayed_prefix"  # of every rollout of a prompt: a trajectory's state, {} for none


class WaveWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Runs verl's agent loops for the waves of a group.

    - verl numbers the sessions of every submission from 0, so a second one under the same uid would overwrite the
      first: those of a later wave are numbered behind the earlier ones.
    - A prefix is replayed by the client that the loop asks, and masked in what the loop returns.
    - What the masks no longer tell, the number of generated tokens for instance, is noted beside the trajectory.
    """

    def __init__(self, *args, **kwargs):  # without a signature of its own, Ray's wrapping fails
        super().__init__(*args, **kwargs)
        self.llm_client = ReplayClient(self.llm_client, self.rollout_config.response_length)
        self._timeout = self.config.rollout_driver.agent_timeout
        self._compact_filtering = self.config.rollout_driver.compact_filtering
        self._tool_parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    async def _run_agent_loop(
        self,
        sampling_params,
        trajectory,
        *,
        session_id: int,
        session_offset: int = 0,
        replayed_prefix: Mapping | None = None,
        **kwargs,
    ):
        if replayed_prefix:
            REPLAY.set(Replay(Trajectory.from_state_dict(replayed_prefix)))
        run = super()._run_agent_loop(
            sampling_params, trajectory, session_id=session_id + int(session_offset), **kwargs
        )
        return await asyncio.wait_for(run, None if trajectory["validate"] else self._timeout)

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        replay = REPLAY.get()
        for each in [] if validate else output if isinstance(output, list) else [output]:
            if replay is not None:
                mask_replayed(each, replay, version=int(kwargs["global_steps"]) - 1)
            note_outcome(
                each,
                truncated=await self._is_truncated(each),
                diverged=replay is not None and replay.diverged,
                compact_filtering=self._compact_filtering,
            )
        return await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: Mapping) -> None:
        """Name the prompt of a validation sample in ``trainer.validation_data_dir``: verl's ``uid`` there is a UUID."""
        await super()._compute_score(outputs, kwargs)
        if prompt_id_of_group(kwargs["uid"]) is None:
            source, extra = kwargs.get("data_source"), outputs[-1].extra_fields
            identity = prompt_id(source, kwargs["raw_prompt"], (kwargs.get("reward_model") or {}).get("ground_truth"))
            named = {"prompt_id": identity, "data_source": str(source)}
            extra["reward_extra_info"] = {**extra.get("reward_extra_info", {}), **named}

    async def _is_truncated(self, output: AgentLoopOutput) -> bool:
        if output.response_ids[-1:] != [self.tokenizer.eos_token_id]:
            return len(output.response_ids) >= self.rollout_config.response_length
        return bool(self.tools) and await has_unanswered_call(output, self._tool_parser)


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
