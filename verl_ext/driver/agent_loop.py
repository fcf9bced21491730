"""verl's agent loops for groups with several waves, and for rollouts with a prefix."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import ray
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.rollout_trace import rollout_trace_attr

from verl_ext.allocation.balance import partition, random_dispatch
from verl_ext.driver.loops import PROMPT_TOKENS, PromptTokens, loop_maker
from verl_ext.driver.prefixes import PLAYBACK, PrefixClient, PrefixPlayback, mask_prefix
from verl_ext.driver.prompt_data import id_of
from verl_ext.driver.rows import (
    CANCELLED,
    DIVERGED,
    FAILED,
    GENERATED,
    LATE,
    REPLAYED,
    ROLLOUTS,
    TRUNCATED,
    Rows,
    key_without_row,
)
from verl_ext.driver.services import RewardWorker, TokenClient, gather_requests
from verl_ext.driver.transcript import TRANSCRIPT, WAVE, RunningWave, Transcript, TranscriptClient
from verl_ext.errors import RunError
from verl_ext.prompts import prompt_id_of_group
from verl_ext.trajectory import Trajectory

logger = logging.getLogger(__name__)


class WaveWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Runs verl's agent loops for the waves of a group.

    - verl numbers the sessions of every submission from 0, so a second wave of a group would overwrite the first.
      Here the session numbers of a later wave follow the numbers of the earlier waves.
    - A :class:`PrefixClient` answers the loop; the tokens of the prefix are masked in the loop's output. If the
      environment's answer differs from the record, ``rollout_driver.on_divergence`` decides between a failed rollout
      and a prefix that ends with the new answer.
    - An agent that takes longer than ``rollout_driver.agent_timeout`` has failed its task. Its trajectory so far gets
      reward 0 and stays out of the loss, and its tokens count. If the reward function takes too long, the engine gave
      no turn, or the prefix has not ended, the agent is not to blame, and the rollout is a failed rollout.
    - A cancelled or failed rollout leaves no row. It leaves a key with a tag, because its generated tokens count. A
      rollout whose response is complete can no longer be cancelled: only its reward is missing.
    - Extra fields store facts that the masks do not show, such as the number of generated tokens.
    """

    def __init__(self, *args, **kwargs):  # Ray's wrapping fails without this signature
        super().__init__(*args, **kwargs)
        gather_requests(self.llm_client, self.rollout_config.name)
        client = TokenClient(self.llm_client) if self.rollout_config.name == "vllm" else self.llm_client
        self.llm_client = TranscriptClient(PrefixClient(client, self.rollout_config.response_length))
        if self.reward_loop_worker_handles is not None:
            self.reward_loop_worker_handles = [RewardWorker(worker) for worker in self.reward_loop_worker_handles]
        self._rows = rows = _RolloutRows(self.config.transfer_queue.backend.storage_backend)
        self._verls_run_prompt = rows.given_to(super()._run_prompt.__func__)
        self._verls_postprocess = rows.given_to(super()._agent_loop_postprocess.__func__)
        self._running: dict[str, RunningWave] = {}  # by group
        self._timeout = self.config.rollout_driver.agent_timeout
        self._compact_filtering = self.config.rollout_driver.compact_filtering
        self._loop_maker = cache(self._make_loop_maker)
        longest = self.rollout_config.max_model_len
        self._most_context = None if longest is None else longest - 1  # SGLang keeps the last place free
        self._continues = self.config.rollout_driver.on_divergence == "continue"
        self._tool_parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        PROMPT_TOKENS.set(PromptTokens())
        uid, wave = prompt["uid"], RunningWave()
        WAVE.set(wave)
        self._running[uid] = wave
        try:
            await self._verls_run_prompt(self, prompt, sampling_params, trajectory, trace)
        finally:
            if self._running.get(uid) is wave:  # the group's next wave may have begun
                del self._running[uid]

    async def cancel(self, uids: Iterable[str]) -> None:
        """End the unfinished rollouts of these groups. Groups without a running wave in this worker are ignored."""
        for uid in self._running.keys() & uids:
            self._running[uid].cancel()

    async def _run_agent_loop(
        self,
        sampling_params,
        trajectory,
        *,
        session_id: int,
        session_offset: int = 0,
        rollout_prefix: Mapping | None = None,
        rollout_sampling: Mapping | None = None,
        **kwargs,
    ):
        own = dict(rollout_sampling or {})
        most = min(own.pop("response_length", math.inf), self.rollout_config.response_length)
        sampling_params = {**sampling_params, **own}
        prefix = Trajectory.from_state_dict(rollout_prefix) if rollout_prefix else None
        playback = None if prefix is None else PrefixPlayback(prefix, goes_on=self._continues)
        transcript = Transcript(
            playback, most if most < self.rollout_config.response_length else None, self._most_context
        )
        PLAYBACK.set(playback)
        TRANSCRIPT.set(transcript)
        kwargs["session_id"] = session_id + int(session_offset)
        # Parquet stores null for a row's missing tool if another row has it, and verl's loop fails at the null.
        of_tools = (kwargs.get("tools_kwargs") or {}).items()
        kwargs["tools_kwargs"] = {name: each for name, each in of_tools if each is not None}
        try:
            await self._run_in_time(sampling_params, trajectory, transcript, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException:  # the failures of sandboxes and databases are no Exception
            if not (trajectory["validate"] or transcript.is_stored):
                key, tag = key_without_row(kwargs["uid"], kwargs["session_id"], FAILED, transcript.generated)
                await self._rows.async_kv_put(key, "train", tag)
            raise

    async def _run_in_time(self, sampling_params, trajectory, transcript: Transcript, **kwargs):
        """Run the agent loop until it ends, takes longer than ``rollout_driver.agent_timeout``, or is cancelled."""
        try:
            WAVE.get().begin(transcript)
            with time_limit(self._timeout, transcript):
                return await self._run_new_loop(sampling_params, trajectory, **kwargs)
        except asyncio.CancelledError:
            if transcript.cancelled:
                key, tag = key_without_row(kwargs["uid"], kwargs["session_id"], CANCELLED, transcript.generated)
                await self._rows.async_kv_put(key, "train", tag)
                return
            if not transcript.is_late:
                raise
        # Raised in the handler, an error would keep the cancelled loop with its sandbox until the group has settled.
        playback = PLAYBACK.get()
        in_prefix = playback is not None and not playback.is_over
        if transcript.prompt is None or transcript.loop_has_ended or in_prefix:
            raise asyncio.TimeoutError(f"no trajectory after agent_timeout={self._timeout} s")
        kwargs = {name: value for name, value in kwargs.items() if name not in ("agent_name", "trace")}
        await self._put_timed_out(transcript, validate=trajectory["validate"], **kwargs)

    async def _run_new_loop(self, sampling_params, trajectory, *, agent_name: str | None, trace: bool = True, **kwargs):
        """As verl's ``_run_agent_loop``, with a loop that hydra has not composed anew."""
        with rollout_trace_attr(trace=trace):  # verl's queue worker always asks for no trace
            output = await self._loop_maker(agent_name)().run(sampling_params, **kwargs)
            return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _make_loop_maker(self, agent_name: str | None) -> Callable[[], AgentLoopBase]:
        """Makes agent loops of this name for rollouts, see :func:`.loops.loop_maker`.

        A row has no name if its file lacks the column ``agent_name`` and another file has it: it gets the default loop.
        """
        agent_name = agent_name or self.rollout_config.agent.default_agent_loop
        if agent_name not in _agent_loop_registry:
            raise ValueError(f"agent_name={agent_name!r} is not valid: use one of {', '.join(_agent_loop_registry)}")
        return loop_maker(
            _agent_loop_registry[agent_name],
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )

    async def _put_timed_out(self, transcript: Transcript, *, validate: bool, **kwargs: Any) -> None:
        transcript.loop_has_ended = True
        output = transcript.timed_out(self.rollout_config.response_length, version=int(kwargs["global_steps"]) - 1)
        output.extra_fields |= {GENERATED: transcript.generated, TRUNCATED: True, **_replay(PLAYBACK.get())}
        if validate:
            output.extra_fields["reward_extra_info"] = {}  # verl counts a missing acc as 0 beside an acc
            prompt, seconds = id_of(kwargs), self._timeout
            logger.warning("validation: prompt %s gets reward 0 after agent_timeout=%s s", prompt, seconds)
        await self._verls_postprocess(self, output, validate, **kwargs)

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        playback, transcript = PLAYBACK.get(), TRANSCRIPT.get()
        transcript.loop_has_ended = True
        outputs = [] if validate else output if isinstance(output, list) else [output]
        if not (outputs or validate):
            raise RuntimeError("the agent loop has returned no output")
        for each in outputs:
            if playback is not None:
                mask_prefix(each, playback)
            for name in ("min_global_steps", "max_global_steps"):  # verl fails at a step's metrics if one is missing
                if each.extra_fields.get(name) is None:
                    each.extra_fields[name] = int(kwargs["global_steps"]) - 1
            cut_to(each, transcript.most)
            each.extra_fields |= _replay(playback)
            # A loop that ends within a prefix was ended by a limit, or by a tool.
            cut_short = playback is not None and playback.goes_on and not playback.is_over
            note_ending(
                each,
                truncated=not transcript.ended_by_tool and (cut_short or await self._is_truncated(each, transcript)),
                compact_filtering=self._compact_filtering,
            )
        if outputs:  # tokens in no output, and tokens that verl cuts off a response, were generated, too
            missing = transcript.generated - sum(each.extra_fields[GENERATED] for each in outputs)
            outputs[-1].extra_fields[GENERATED] += max(0, missing)
        return await self._verls_postprocess(self, output, validate, **kwargs)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: Mapping) -> None:
        """Name the prompt of a validation sample in ``trainer.validation_data_dir``: verl's ``uid`` there is a UUID."""
        await super()._compute_score(outputs, kwargs)
        if prompt_id_of_group(kwargs["uid"]) is None:
            extra = outputs[-1].extra_fields
            named = {"prompt_id": id_of(kwargs), "data_source": str(kwargs.get("data_source"))}
            extra["reward_extra_info"] = {**extra.get("reward_extra_info", {}), **named}

    async def _is_truncated(self, output: AgentLoopOutput, transcript: Transcript) -> bool:
        if output.response_ids[-1:] != [self.tokenizer.eos_token_id]:
            most = min(
                transcript.most or self.rollout_config.response_length,
                (transcript.context or math.inf) - len(output.prompt_ids),
            )
            if len(output.response_ids) >= most:
                return True
        # Not every model ends a call with eos, so the last token does not tell whether a call is left unanswered.
        return bool(self.tools) and await has_unanswered_call(output, self._tool_parser)


@contextmanager
def time_limit(seconds: float | None, transcript: Transcript) -> Iterator[None]:
    """Interrupt the current task after ``seconds``, and note that its rollout is late; None: never.

    ``asyncio.wait_for`` would run the rollout as a second task, which goes on alone if the policy cancels the rollout
    after the time limit.
    """
    task = asyncio.current_task()

    def interrupt() -> None:
        transcript.is_late = True
        task.cancel()

    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, interrupt)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def cut_to(output: AgentLoopOutput, most: int | None) -> None:
    """Cut a response to its request's own limit; verl cuts to its configured limit only."""
    if most is not None:
        output.response_ids, output.response_mask = output.response_ids[:most], output.response_mask[:most]
        if output.response_logprobs is not None:
            output.response_logprobs = output.response_logprobs[:most]


def _replay(playback: PrefixPlayback | None) -> dict[str, int | bool]:
    """Extra fields: the number of replayed tokens of the model, and whether the prefix diverged."""
    if playback is None:
        return {REPLAYED: 0, DIVERGED: False}
    return {REPLAYED: playback.turn_tokens, DIVERGED: playback.diverged}


def note_ending(output: AgentLoopOutput, *, truncated: bool, compact_filtering: bool) -> None:
    """Store the number of generated tokens, and whether a limit ended the trajectory, in ``output.extra_fields``.

    With ``compact_filtering`` a truncated trajectory leaves the loss: the whole response mask becomes 0. The reward
    still counts in the group's baseline.
    """
    output.extra_fields |= {GENERATED: sum(output.response_mask), TRUNCATED: truncated}
    if truncated and compact_filtering:
        output.response_mask = [0] * len(output.response_mask)


async def has_unanswered_call(output: AgentLoopOutput, parser: ToolParser) -> bool:
    """Whether the last turn calls a tool: then a limit on the number of turns ended the trajectory, not the policy."""
    if not output.response_mask or not output.response_mask[-1]:
        return False
    # A Trajectory must start with a generated token. A prefix masks this token; the last turn is the same either way.
    last_turn = Trajectory(output.response_ids, [True, *output.response_mask[1:]]).spans[-1]
    return bool((await parser.extract_tool_calls(output.response_ids[last_turn.start :], []))[1])


class _RolloutRows(Rows):
    """Notes that a rollout's rows are being stored: the key of a failed rollout would replace them. Tags late rows."""

    async def async_kv_batch_put(self, **rows: Any) -> None:
        transcript = TRANSCRIPT.get()
        transcript.is_stored = True
        if transcript.is_late:
            rows["tags"] = [tag | {LATE: True} for tag in rows["tags"]]
        await super().async_kv_batch_put(**rows)


class WaveManager(AgentLoopManagerTQ):
    """Dispatches prompts to :class:`WaveWorker`, with about equal numbers of rollouts (Knapsack-RL, Appendix C).

    verl gives chunk i of the prompts to worker i, so workers get equal numbers of prompts only. A worker is a client of
    the engines: verl's load balancer chooses an engine for each response.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(WaveWorker)
        self._submissions = 0

    def generate_sequences(self, prompts) -> None:
        workers = self.agent_loop_workers
        self._submissions += 1
        if self.config.rollout_driver.dispatch == "random":
            owner = random_dispatch(len(prompts), len(workers), seed=self._submissions)
        else:  # in validation, all prompts have equally many rollouts
            counts = prompts[ROLLOUTS].numpy() if ROLLOUTS in prompts else np.ones(len(prompts), dtype=int)
            owner = partition(counts, len(workers))
        # Share 0 is the largest. Rotate the shares over the workers, or worker 0 would get all small submissions.
        owner = (owner + self._submissions) % len(workers)
        rows = [np.flatnonzero(owner == number).tolist() for number in range(len(workers))]
        calls = [
            worker.generate_sequences.remote(tu.index_select_tensor_dict(prompts, own))
            for worker, own in zip(workers, rows, strict=True)
            if own
        ]
        if self._submissions == 1:
            ray.get(calls)  # workers may still be starting, and no rollout can block one yet
        else:
            self._await(calls)

    def cancel(self, uids: list[str]) -> None:
        """End the unfinished rollouts of these groups, wherever they run."""
        self._await([worker.cancel.remote(uids) for worker in self.agent_loop_workers])

    def _await(self, calls: list[ray.ObjectRef]) -> None:
        """Wait until the workers have taken the calls. A worker takes a call at once, however slow its rollouts are.

        Raises:
            RunError: a worker has not taken its call within ``rollout_driver.stall_timeout`` seconds.
        """
        seconds = self.config.rollout_driver.stall_timeout
        try:
            ray.get(calls, timeout=seconds)
        except ray.exceptions.GetTimeoutError as error:
            raise RunError(
                f"an agent-loop worker has not answered for {seconds:.0f} s: an agent loop or a tool blocks the "
                "worker's event loop, for example by time.sleep or a call of requests; use await or asyncio.to_thread, "
                "or raise rollout_driver.stall_timeout"
            ) from error
