"""The agent-loop worker with verl's own loops, a scripted engine, and a clock set by its tools."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import hydra
import pytest
import transfer_queue as tq
from support.agent_loops import END, ScriptedEngine, make_tokenizer, sql_call
from support.configs import compose
from transformers import Qwen2Config
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_ext.driver.agent_loop import WaveWorker
from verl_ext.driver.loops import SharedSingleTurnLoop
from verl_ext.driver.rows import LATE
from verl_ext.driver.tools.sqlite import SqliteTool
from verl_ext.driver.transcript import end_trajectory
from verl_ext.sandbox.databases import DatabaseFailure
from verl_ext.trajectory import Trajectory

TIMEOUT = 1200.0
UID = "cbf2f5c0150fb418-17"
SCRIPT = "CREATE TABLE r(a INTEGER); INSERT INTO r VALUES(7);"
ADD, WAIT, SUBMIT = sql_call("UPDATE r SET a=a+4 RETURNING a"), sql_call("wait"), sql_call("submit")
BREAK = sql_call("break")


class Clock:
    """The time of an event loop, in seconds; stands still unless somebody advances it."""

    def __init__(self):
        self.now = 0.0

    def run(self, coroutine):
        loop = asyncio.SelectorEventLoop()
        loop.time = lambda: self.now
        try:
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()
            asyncio.set_event_loop(None)


class GreetingLoop(SingleTurnAgentLoop):
    """A user's own loop with a setting of its own; all loops made are noted."""

    made: list[GreetingLoop] = []  # noqa: RUF012 - each test starts with its own list

    def __init__(self, *args, greeting, **kwargs):
        super().__init__(*args, **kwargs)
        self.greeting, self.prompts = greeting, []
        self.made.append(self)

    async def run(self, sampling_params, **kwargs):
        self.prompts.append(kwargs["raw_prompt"][0]["content"])
        return await super().run(sampling_params, **kwargs)


class SilentLoop(SingleTurnAgentLoop):
    """A user's own loop that does not pass on the engine's versions, as if it had not asked the engine."""

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        return output.model_copy(update={"extra_fields": {}})


class TurnsLoop(SingleTurnAgentLoop):
    """A user's own loop, which asks for two turns, and whose outputs are some of these turns."""

    outputs: tuple[int, ...]

    async def run(self, sampling_params, **kwargs):
        turns = [await super(TurnsLoop, self).run(sampling_params, **kwargs) for _ in range(2)]
        for turn in turns:
            turn.reward_score, turn.extra_fields["reward_extra_info"] = 1.0, {}
        return [turns[place] for place in self.outputs]


class TestTool(SqliteTool):
    """SQL, and three commands: ``wait`` never answers, ``submit`` ends the trajectory, ``break`` fails the rollout."""

    __test__ = False

    def __init__(self, clock: Clock):
        super().__init__({"type": "native"})
        self.clock = clock

    async def execute(self, instance_id, parameters, *, agent_data, **kwargs):
        if parameters["query"] == "wait":
            self.clock.now += TIMEOUT
            await asyncio.Event().wait()
        if parameters["query"] == "break":
            raise DatabaseFailure("no process for a database could be started")
        if parameters["query"] == "submit":
            end_trajectory()
            parameters = {"query": "SELECT 'submitted'"}
        return await super().execute(instance_id, parameters, agent_data=agent_data, **kwargs)


class SlowEngine(ScriptedEngine):
    """The engine needs longer than the agent has for its turn number ``slow``, and some passes of the event loop."""

    clock: Clock
    slow: int = -1

    async def generate(self, request_id, **kwargs):
        answer = await super().generate(request_id, **kwargs)
        if len(self.calls) - 1 == self.slow:
            self.clock.now += TIMEOUT
            for _ in range(20):
                await asyncio.sleep(0)
        return answer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    Qwen2Config(architectures=["Qwen2ForCausalLM"], vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture
def queue(monkeypatch):
    """The last tags and fields of every key that the worker puts into TransferQueue."""
    tags: dict[str, dict] = {}
    rows: dict[str, dict] = {}

    async def put(keys, partition_id, fields, **further):
        tags.update(zip(keys, further["tags"], strict=True))
        if fields is not None:
            rows.update((key, {name: fields[name][place] for name in fields}) for place, key in enumerate(keys))

    monkeypatch.setattr(tq, "init", lambda: None)
    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    return tags, rows


@pytest.fixture
def roll_out(queue, model, tokenizer):
    """Run a wave, of one rollout by default; returns (status of its group, the stored row or None, the engine).

    Once ``cancel_when`` is true of the worker and the engine, the wave is cancelled. ``engine.tags`` holds all tags.
    """

    def run(
        turns,
        *,
        slow=-1,
        prefix=None,
        timeout=TIMEOUT,
        compact_filtering=False,
        on_divergence="drop",
        script=SCRIPT,
        tools_kwargs=False,
        worker_class=WaveWorker,
        engine_class=SlowEngine,
        sampling=None,
        max_model_len=None,
        most_turns=None,
        rollouts=1,
        cancel_when=None,
        validate=False,
    ):
        config = compose(
            "grpo",
            f"actor_rollout_ref.model.path={model}",
            "data.max_prompt_length=256",
            "data.max_response_length=1024",
            f"actor_rollout_ref.rollout.max_model_len={max_model_len or 'null'}",
            f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={most_turns or 'null'}",
            f"rollout_driver.agent_timeout={timeout or 'null'}",
            f"rollout_driver.compact_filtering={str(compact_filtering).lower()}",
            f"rollout_driver.on_divergence={on_divergence}",
        )
        clock = Clock()
        engine = engine_class(tokenizer, turns)
        engine.clock, engine.slow = clock, slow

        of_script = {"sql": {"create_kwargs": {"script": script}}}

        async def main():
            worker = worker_class(config, engine)
            worker.clock, worker.tools = clock, [TestTool(clock)]
            prompt = {
                "uid": UID,
                "agent_name": "tool_agent",
                "raw_prompt": [{"role": "user", "content": "+4"}],
                "tools_kwargs": of_script if tools_kwargs is False else tools_kwargs,
                "global_steps": 6,
                "index": 0,
                "session_offset": 2,
                "rollout_prefix": {} if prefix is None else prefix.state_dict(),
                "rollout_sampling": sampling or {},
                "__rollout_n__": rollouts,
            }
            trajectory = {"step": 6, "sample_index": 0, "rollout_n": 0, "validate": validate}
            wave = asyncio.ensure_future(worker._run_prompt(prompt, {"temperature": 1.0, "logprobs": True}, trajectory))
            if cancel_when is not None:
                while not cancel_when(worker, engine):
                    await asyncio.sleep(0)
                for _ in range(2):  # the second changes nothing
                    await worker.cancel(["of another worker", UID])
            await wave
            assert not worker._running

        clock.run(main())
        tags, rows = (dict(each) for each in queue)
        for each in queue:
            each.clear()
        assert set(rows) <= {f"{UID}_2_0"}
        row = None
        for key, fields in rows.items():
            row = {**fields, "tag": tags[key]}
        engine.tags = tags
        return tags[UID]["status"], row, engine

    return run


def length_of(tokenizer, *turns: str) -> int:
    return sum(len(tokenizer.encode(turn + END, add_special_tokens=False)) for turn in turns)


def extra(row) -> dict:
    return row["extra_fields"]


@pytest.mark.parametrize("compact_filtering", [True, False])
def test_an_agent_whose_tool_takes_too_long_has_failed_its_task(roll_out, tokenizer, compact_filtering):
    status, row, engine = roll_out([ADD, WAIT, "never asked"], compact_filtering=compact_filtering)
    assert status == "finished" and len(engine.calls) == 2
    fields = extra(row)
    assert float(row["rm_scores"].sum()) == 0.0 and fields["reward_extra_info"] == {"acc": 0.0}
    assert fields["truncated"] and not fields["diverged"]
    assert fields["generated_tokens"] == length_of(tokenizer, ADD, WAIT)  # its tokens are paid for
    assert int(row["response_mask"].sum()) == 0  # and in no loss
    text = tokenizer.decode(row["responses"].tolist())
    assert text.startswith(ADD) and "<tool_response>11</tool_response>" in text and text.endswith(WAIT + END)
    assert row["prompts"].tolist() == engine.calls[0]["prompt_ids"]
    assert (
        row["prompts"].tolist() + row["responses"].tolist()[: -length_of(tokenizer, WAIT)]
        == (engine.calls[1]["prompt_ids"])
    )
    assert len(row["rollout_log_probs"]) == len(row["responses"]) == len(row["rm_scores"])
    assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (3, 3)


def test_a_late_rollout_of_a_validation_gets_reward_0_too(roll_out, tokenizer, caplog):
    """Its row names no verdict: with one, verl would report accuracies of a reward function that reports none."""
    status, row, engine = roll_out([ADD, WAIT, "never asked"], validate=True)
    assert status == "finished" and len(engine.calls) == 2
    assert float(row["rm_scores"].sum()) == 0.0 and "acc" not in extra(row)["reward_extra_info"]
    assert row["tag"][LATE]  # counted in val-aux/rollouts_late
    (record,) = [each for each in caplog.records if each.name == "verl_ext.driver.agent_loop"]
    assert record.getMessage().endswith(f" gets reward 0 after agent_timeout={TIMEOUT} s")


def test_a_turn_in_generation_is_finished_and_counted(roll_out, tokenizer):
    status, row, engine = roll_out([ADD, "the answer is 11"], slow=1)
    assert status == "finished" and len(engine.calls) == 2
    assert extra(row)["generated_tokens"] == length_of(tokenizer, ADD, "the answer is 11")
    assert extra(row)["truncated"] and float(row["rm_scores"].sum()) == 0.0 == float(row["response_mask"].sum())


def test_prefix_tokens_of_a_late_rollout_are_not_counted_as_generated(roll_out, tokenizer):
    _, row, _ = roll_out([ADD, ADD, WAIT])
    first = Trajectory(row["responses"], [True] + [False] * (len(row["responses"]) - 1))
    turn, total = length_of(tokenizer, ADD), len(first)
    observation = (total - length_of(tokenizer, ADD, ADD, WAIT)) // 2
    generated = ([True] * turn + [False] * observation) * 2 + [True] * length_of(tokenizer, WAIT)
    prefix = Trajectory(row["responses"], generated).prefix(0.9)
    assert len(prefix) == turn + observation
    status, row, engine = roll_out([WAIT], prefix=prefix)
    assert status == "finished" and len(engine.calls) == 1
    assert extra(row)["generated_tokens"] == length_of(tokenizer, WAIT)
    assert row["responses"].tolist()[: len(prefix)] == prefix.tokens.tolist()


@pytest.mark.parametrize("on_divergence", ["drop", "continue"])
def test_late_while_the_prefix_is_replayed(roll_out, tokenizer, on_divergence, caplog):
    prefix = Trajectory(
        tokenizer.encode(WAIT + END + "x", add_special_tokens=False), [True] * length_of(tokenizer, WAIT) + [False]
    )
    status, row, engine = roll_out(["never asked"], prefix=prefix, on_divergence=on_divergence)
    assert (status, row, engine.calls) == ("failure", None, [])  # the model was not asked
    assert engine.tags[f"{UID}_2_0"] == without_row("failed", 0)
    (error,) = (record.exc_info[1] for record in caplog.records if record.exc_info)
    assert isinstance(error, TimeoutError) and error.__context__ is None  # its frames would hold the agent's sandbox


@pytest.fixture
def prefix(roll_out, tokenizer):
    """One interaction: the database answers 11."""
    _, row, _ = roll_out([ADD, "11"])
    return Trajectory(row["responses"], row["response_mask"]).prefix(0.9)


OTHER = SCRIPT.replace("7", "1234567")  # answers 1234571


@pytest.mark.parametrize(("script", "diverged"), [(SCRIPT, False), (OTHER, True)])
@pytest.mark.parametrize("on_divergence", ["drop", "continue"])
def test_what_a_rollout_with_a_prefix_reports(roll_out, tokenizer, prefix, on_divergence, script, diverged):
    lost = diverged and on_divergence == "drop"
    status, row, engine = roll_out([ADD, "the end"], prefix=prefix, on_divergence=on_divergence, script=script)
    generated = 0 if lost else length_of(tokenizer, ADD, "the end")
    assert status == "finished" and len(engine.calls) == (0 if lost else 2)
    assert (extra(row)["diverged"], extra(row)["truncated"]) == (diverged, False)
    assert extra(row)["prefix_tokens"] == length_of(tokenizer, ADD)
    assert extra(row)["generated_tokens"] == int(row["response_mask"].sum()) == generated
    version = 5 if lost else engine.version  # without a token of the model, that of the request
    assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (version, version)
    if not lost:
        assert ("1234571" in tokenizer.decode(row["responses"].tolist())) == diverged
        start = len(engine.calls[0]["prompt_ids"]) - len(row["prompts"])
        assert start == len(prefix) + 5 * diverged and not row["response_mask"][:start].any()
        assert not row["rollout_log_probs"][:start].any() and row["rollout_log_probs"][start] == -0.5


def test_late_after_a_divergence(roll_out, tokenizer, prefix):
    status, row, engine = roll_out([WAIT], prefix=prefix, on_divergence="continue", script=OTHER)
    assert status == "finished" and len(engine.calls) == 1
    assert extra(row)["truncated"] and extra(row)["diverged"]
    assert extra(row)["generated_tokens"] == length_of(tokenizer, WAIT)
    assert extra(row)["prefix_tokens"] == length_of(tokenizer, ADD)
    assert float(row["rm_scores"].sum()) == 0.0 == float(row["response_mask"].sum())


@pytest.mark.parametrize(("on_divergence", "truncated"), [("drop", False), ("continue", True)])
def test_a_new_answer_that_leaves_no_room(roll_out, tokenizer, on_divergence, truncated):
    thought = "x" * 800
    turn = thought + sql_call("SELECT a FROM r")
    _, row, _ = roll_out([turn, "7"])
    prefix = Trajectory(row["responses"], row["response_mask"]).prefix(0.9)
    long = f"CREATE TABLE r(a TEXT); INSERT INTO r VALUES('{'y' * 199}');"
    status, row, engine = roll_out(["never asked"], prefix=prefix, on_divergence=on_divergence, script=long)
    assert status == "finished" and engine.calls == [] and len(row["responses"]) == length_of(tokenizer, turn)
    assert extra(row)["generated_tokens"] == 0 == int(row["response_mask"].sum())
    assert extra(row)["diverged"] and extra(row)["truncated"] == truncated


def without_row(status: str, tokens: int) -> dict:
    return {"status": status, "generated_tokens": tokens, "min_global_steps": None}


def test_the_agent_is_not_to_blame_for_an_engine_that_fails_too_late(roll_out, tokenizer):
    def turns():
        yield ADD
        raise RuntimeError("the engine has a fault")

    class Engine(SlowEngine):
        async def generate(self, request_id, **kwargs):
            self.clock.now += TIMEOUT * (len(self.calls) == 1)
            await asyncio.sleep(0)
            return await super().generate(request_id, **kwargs)

    status, row, engine = roll_out(turns(), engine_class=Engine)
    assert (status, row, len(engine.calls)) == ("failure", None, 2)
    # The turn before the fault is paid for.
    assert engine.tags[f"{UID}_2_0"] == without_row("failed", length_of(tokenizer, ADD))


@pytest.mark.parametrize("tools_kwargs", [{"sql": None, "other": {"create_kwargs": {"setup": ""}}}, {}, None])
def test_a_row_without_arguments_for_a_tool_has_a_working_tool(roll_out, tokenizer, tools_kwargs):
    """Parquet stores null for them if another row has arguments."""
    turns = [sql_call("SELECT count(*) FROM sqlite_master"), "0"]
    _, row, _ = roll_out(turns, tools_kwargs=tools_kwargs)
    assert "<tool_response>0</tool_response>" in tokenizer.decode(row["responses"].tolist())


def test_tokens_count_if_a_database_or_sandbox_fails(roll_out, tokenizer):
    status, row, engine = roll_out([ADD, BREAK, "never asked"])
    assert (status, row, len(engine.calls)) == ("failure", None, 2)
    assert engine.tags[f"{UID}_2_0"] == without_row("failed", length_of(tokenizer, ADD, BREAK))


def test_the_agent_is_not_to_blame_for_a_time_out_of_the_engine(roll_out):
    def turns():
        yield ADD
        raise TimeoutError("the engine's own, long before the agent's")

    status, row, _ = roll_out(turns())
    assert (status, row) == ("failure", None)


def test_the_agent_is_not_to_blame_for_a_reward_that_never_comes(roll_out, tokenizer):
    class Worker(WaveWorker):
        calls = 0

        async def _compute_score(self, outputs, kwargs):
            self.calls += 1
            if self.calls == 1:
                self.clock.now += TIMEOUT
                await asyncio.Event().wait()
            await super()._compute_score(outputs, kwargs)

    status, row, engine = roll_out([ADD, "11"], worker_class=Worker)
    assert (status, row) == ("failure", None)
    assert engine.tags[f"{UID}_2_0"] == without_row("failed", length_of(tokenizer, ADD, "11"))


def test_a_row_that_the_queue_refuses_leaves_no_tag(roll_out, monkeypatch):
    """The driver warns of a key that TransferQueue has registered and not stored, so the key must stay as it is."""
    put = tq.async_kv_batch_put

    async def refuse(keys, fields, **further):
        if fields is not None:
            raise RuntimeError("the queue is full")
        await put(keys=keys, fields=fields, **further)

    monkeypatch.setattr(tq, "async_kv_batch_put", refuse)
    status, row, engine = roll_out([ADD, "11"])
    assert (status, row) == ("failure", None) and engine.tags == {UID: {"status": "failure"}}


def test_no_deadline_without_a_setting(roll_out, tokenizer):
    status, row, _ = roll_out([ADD, "11"], slow=0, timeout=None)
    assert status == "finished" and not extra(row)["truncated"]
    assert int(row["response_mask"].sum()) == length_of(tokenizer, ADD, "11")


def test_a_submission_ends_the_trajectory(roll_out, tokenizer):
    status, row, engine = roll_out([ADD, SUBMIT, ADD, "never asked"])
    assert status == "finished" and len(engine.calls) == 2
    assert not extra(row)["truncated"]
    assert extra(row)["generated_tokens"] == int(row["response_mask"].sum()) == length_of(tokenizer, ADD, SUBMIT)
    trajectory = Trajectory(row["responses"], row["response_mask"])
    assert tokenizer.decode(trajectory.tokens).rstrip().endswith("<|im_start|>assistant")
    for ratio in (0.05, 0.5, 0.95, 0.999):
        prefix = tokenizer.decode(trajectory.prefix(ratio).tokens)
        assert ADD in prefix and SUBMIT not in prefix


def test_a_request_may_be_sampled_in_its_own_way(roll_out):
    def sent(sampling):
        _, _, engine = roll_out([ADD, "11"], sampling=sampling)
        own = ("temperature", "top_p", "max_tokens")
        return [{name: call["sampling_params"].get(name) for name in own} for call in engine.calls]

    configured = {"temperature": 1.0, "top_p": None, "max_tokens": None}
    assert sent({"temperature": 0.3, "top_p": 0.8}) == [{"temperature": 0.3, "top_p": 0.8, "max_tokens": None}] * 2
    assert sent({}) == sent({"response_length": 9999}) == [configured] * 2


def test_a_limit_of_a_request_holds_over_all_turns(roll_out, tokenizer):
    _, whole, _ = roll_out([ADD, "the answer is 11"])
    total, first = len(whole["responses"]), length_of(tokenizer, ADD)
    observed = total - first - length_of(tokenizer, "the answer is 11")
    for limit, calls in ((total, 2), (total - 3, 2), (first + observed, 1), (first + 2, 1), (first - 4, 1)):
        status, row, engine = roll_out([ADD, "the answer is 11"], sampling={"response_length": limit})
        assert status == "finished" and len(engine.calls) == calls, limit
        assert row["responses"].tolist() == whole["responses"].tolist()[:limit]
        assert len(row["response_mask"]) == len(row["rollout_log_probs"]) == limit
        assert extra(row)["truncated"] == (limit < total)
        assert engine.calls[0]["sampling_params"]["max_tokens"] == limit
        if calls == 2:
            assert engine.calls[1]["sampling_params"]["max_tokens"] == limit - first - observed
        assert extra(row)["generated_tokens"] == int(row["response_mask"].sum())


def test_a_limit_of_a_request_includes_its_prefix(roll_out, tokenizer):
    text = tokenizer.encode("the answer is 11", add_special_tokens=False)
    prefix = Trajectory(text[:6], [True] * 6)
    status, row, engine = roll_out(["swer is 11"], prefix=prefix, sampling={"response_length": 10})
    assert status == "finished" and engine.calls[0]["sampling_params"]["max_tokens"] == 4
    assert tokenizer.decode(row["responses"].tolist()) == "the answer"
    assert extra(row)["truncated"] and extra(row)["generated_tokens"] == 4 and extra(row)["prefix_tokens"] == 6


@pytest.mark.parametrize("further", [0, 1, 6, 60])
def test_the_engines_limit_of_prompt_and_response_truncates_a_trajectory(roll_out, tokenizer, further):
    """vLLM raises an error for a turn without room, which failed the rollout."""
    _, whole, _ = roll_out([ADD, "the answer is 11"])
    observed = len(whole["responses"]) - length_of(tokenizer, "the answer is 11")
    limit = len(whole["prompts"]) + observed + further

    class Engine(SlowEngine):
        async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
            room = limit - len(prompt_ids)
            assert room > 0
            sampling_params = {**sampling_params, "max_tokens": room}
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)

    status, row, engine = roll_out([ADD, "the answer is 11"], engine_class=Engine, max_model_len=limit)
    assert status == "finished" and len(engine.calls) == (2 if further > 1 else 1)
    assert extra(row)["truncated"] == (further < 60)
    assert row["responses"].tolist() == whole["responses"].tolist()[: observed + further * (further > 1)]


@pytest.mark.parametrize("stop", [END, "<|endoftext|>"])
@pytest.mark.parametrize(("most_turns", "truncated"), [(1, True), (2, False)])
def test_a_limit_of_turns_truncates_a_trajectory_whichever_token_ends_a_call(
    roll_out, tokenizer, stop, most_turns, truncated
):
    """verl ends a call of GLM, Kimi and Gemma with a token of the parser's own."""

    class Engine(SlowEngine):
        async def generate(self, request_id, **kwargs):
            answer = await super().generate(request_id, **kwargs)
            answer.token_ids[-1] = tokenizer.convert_tokens_to_ids(stop)
            return answer

    _, row, engine = roll_out([ADD, "11"], engine_class=Engine, most_turns=most_turns)
    assert len(engine.calls) == most_turns and row["responses"][-1] == tokenizer.convert_tokens_to_ids(stop)
    assert extra(row)["truncated"] == truncated


def test_tokens_beyond_the_longest_response_are_counted(roll_out, tokenizer):
    long = "the answer is " + "1" * 2000
    status, row, _ = roll_out([long])
    assert status == "finished" and len(row["responses"]) == 1024 < length_of(tokenizer, long)
    assert extra(row)["truncated"] and extra(row)["generated_tokens"] == length_of(tokenizer, long)


# ---- cancelled rollouts ----


def cancelled(tokens: int) -> dict:
    return without_row("cancelled", tokens)


def test_a_cancel_ends_a_tool_call_and_leaves_a_tag_alone(roll_out, tokenizer):
    turns, calls = [ADD, WAIT, "never asked"], iter(range(100))
    in_tool = lambda _, engine: len(engine.calls) == 2 and next(calls) > 50  # noqa: E731
    status, row, engine = roll_out(turns, timeout=None, cancel_when=in_tool)
    assert (status, row, len(engine.calls)) == ("finished", None, 2)
    assert engine.tags == {UID: {"status": "finished"}, f"{UID}_2_0": cancelled(length_of(tokenizer, ADD, WAIT))}


@pytest.mark.parametrize("timeout", [TIMEOUT, None])
def test_an_engine_that_cannot_end_a_turn_finishes_the_turn_of_a_cancelled_rollout(roll_out, tokenizer, timeout):
    class Engine(ScriptedEngine):
        async def generate(self, request_id, **kwargs):
            answer = await super().generate(request_id, **kwargs)
            for _ in range(50):
                await asyncio.sleep(0)
            return answer

    asked_twice = lambda _, engine: len(engine.calls) == 2  # noqa: E731
    turns = [ADD, ADD, "never asked"]
    status, row, engine = roll_out(turns, timeout=timeout, cancel_when=asked_twice, engine_class=Engine)
    assert (status, row, len(engine.calls)) == ("finished", None, 2)
    assert engine.tags[f"{UID}_2_0"] == cancelled(length_of(tokenizer, ADD, ADD))


def test_the_turn_of_a_late_rollout_is_finished_and_counted_though_the_rollout_is_cancelled(roll_out, tokenizer):
    passes = iter(range(100))
    late = lambda worker, _: worker.clock.now >= TIMEOUT and next(passes) > 9  # noqa: E731
    status, row, engine = roll_out([ADD, "the answer is 11", "never asked"], slow=1, cancel_when=late)
    assert (status, row, len(engine.calls)) == ("finished", None, 2)
    wanted = cancelled(length_of(tokenizer, ADD, "the answer is 11"))
    assert engine.tags == {UID: {"status": "finished"}, f"{UID}_2_0": wanted}


def test_a_cancel_finds_rollouts_that_have_not_begun(roll_out):
    status, row, engine = roll_out(["never asked"], rollouts=2, cancel_when=lambda worker, _: UID in worker._running)
    assert (status, row, engine.calls) == ("finished", None, [])
    assert engine.tags == {UID: {"status": "finished"}} | {f"{UID}_{session}_0": cancelled(0) for session in (2, 3)}


def test_finished_rollouts_of_a_cancelled_wave_stay(roll_out, tokenizer):
    def settled(worker, engine):
        transcripts = worker._running[UID]._rollouts.values() if UID in worker._running else ()
        ended = any(transcript.loop_has_ended for transcript in transcripts)
        return ended and [transcript.generated > 0 for transcript in transcripts] == [True] * 3

    status, row, engine = roll_out(["11", WAIT, WAIT], rollouts=3, timeout=None, cancel_when=settled)
    assert status == "finished" and tokenizer.decode(row["responses"].tolist()) == "11" + END
    wanted = cancelled(length_of(tokenizer, WAIT))
    assert row["tag"]["status"] == "success" and engine.tags[f"{UID}_3_0"] == engine.tags[f"{UID}_4_0"] == wanted


@pytest.mark.parametrize("late", [True, False])
def test_a_rollout_whose_reward_alone_is_missing_is_too_late_to_be_cancelled(roll_out, late):
    class Worker(WaveWorker):
        judging = False

        async def _compute_score(self, outputs, kwargs):
            self.judging = True
            for _ in range(50):
                await asyncio.sleep(0)
            await super()._compute_score(outputs, kwargs)

        async def _put_timed_out(self, transcript, **kwargs):
            self.judging = True
            await super()._put_timed_out(transcript, **kwargs)

    turns = [ADD, WAIT] if late else [ADD, "11"]
    in_reward = lambda worker, _: worker.judging  # noqa: E731
    status, row, engine = roll_out(turns, worker_class=Worker, cancel_when=in_reward)
    assert status == "finished" and row["tag"]["status"] == "success" and extra(row)["truncated"] == late
    assert len(engine.tags) == 2


def test_a_cancel_reaches_a_wave_that_began_before_the_last_one_had_returned(queue, model, tokenizer, monkeypatch):
    config = compose("grpo", f"actor_rollout_ref.model.path={model}", "rollout_driver.agent_timeout=null")
    put, waves = tq.async_kv_batch_put, []

    async def main():
        engine = ScriptedEngine(tokenizer, ["11", WAIT])
        worker = WaveWorker(config, engine)
        worker.tools = [TestTool(Clock())]

        def begin(offset):
            prompt = {"uid": UID, "agent_name": "tool_agent", "raw_prompt": [{"role": "user", "content": "+4"}]}
            prompt |= {"tools_kwargs": {"sql": {"create_kwargs": {"script": SCRIPT}}}, "session_offset": offset}
            prompt |= {"global_steps": 6, "index": 0, "__rollout_n__": 1}
            trajectory = {"step": 6, "sample_index": 0, "rollout_n": 0, "validate": False}
            waves.append(asyncio.ensure_future(worker._run_prompt(prompt, {}, trajectory)))

        async def answer_at_once(keys, **further):
            """The policy requests the second wave when it sees the first wave's end."""
            await put(keys, **further)
            if further["tags"][0] == {"status": "finished"} and len(waves) == 1:
                begin(1)
                await asyncio.sleep(0)

        monkeypatch.setattr(tq, "async_kv_batch_put", answer_at_once)
        begin(0)
        await waves[0]
        while len(engine.calls) < 2:
            await asyncio.sleep(0)
        await worker.cancel([UID])
        await asyncio.wait_for(waves[1], 60)

    asyncio.run(main())
    tags, rows = queue
    assert set(rows) == {f"{UID}_0_0"} and tags[f"{UID}_1_0"]["status"] == "cancelled"


def test_each_rollout_has_a_loop_of_its_own_and_hydra_composes_a_loop_once(queue, model, tokenizer, monkeypatch):
    composed, instantiate = [], hydra.utils.instantiate
    monkeypatch.setattr(
        hydra.utils, "instantiate", lambda config, **more: composed.append(config) or instantiate(config, **more)
    )
    monkeypatch.setattr(GreetingLoop, "made", [])
    monkeypatch.setitem(sys.modules, "users_loops", SimpleNamespace(GreetingLoop=GreetingLoop, __path__=[]))
    entry = {"_target_": "users_loops.GreetingLoop", "greeting": "hello"}
    monkeypatch.setitem(_agent_loop_registry, "users", entry)
    lengths = ("data.max_prompt_length=64", "data.max_response_length=64")
    config = compose("grpo", f"actor_rollout_ref.model.path={model}", *lengths)

    async def main():
        worker = WaveWorker(config, ScriptedEngine(tokenizer, ["a", "b", "c"]))
        for number, count in enumerate((2, 1)):
            prompt = {"uid": f"cbf2f5c0150fb418-{number}", "agent_name": "users", "global_steps": 1, "index": number}
            prompt |= {"raw_prompt": [{"role": "user", "content": f"prompt {number}"}], "__rollout_n__": count}
            await worker._run_prompt(prompt, {}, {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False})
        with pytest.raises(ValueError, match="agent_name='other' is not valid: use one of .*single_turn_agent.*users"):
            worker._loop_maker("other")
        assert type(worker._loop_maker(None)()) is SharedSingleTurnLoop  # of the default

    asyncio.run(main())
    assert [loop.prompts for loop in GreetingLoop.made] == [["prompt 0"], ["prompt 0"], ["prompt 1"]]
    assert {loop.greeting for loop in GreetingLoop.made} == {"hello"} and composed.count(entry) == 1
    assert sorted(key for key in queue[1]) == [f"cbf2f5c0150fb418-{place}_0" for place in ("0_0", "0_1", "1_0")]


def test_a_rollout_without_a_version_has_that_of_its_request(queue, model, tokenizer, monkeypatch):
    """verl makes a step's metrics of the versions, and fails if one is missing."""
    monkeypatch.setitem(sys.modules, "users_loops", SimpleNamespace(SilentLoop=SilentLoop, __path__=[]))
    monkeypatch.setitem(_agent_loop_registry, "users", {"_target_": "users_loops.SilentLoop"})
    lengths = ("data.max_prompt_length=64", "data.max_response_length=64")
    config = compose("grpo", f"actor_rollout_ref.model.path={model}", *lengths)

    async def main():
        worker = WaveWorker(config, ScriptedEngine(tokenizer, ["a"]))
        prompt = {"uid": UID, "agent_name": "users", "global_steps": 6, "index": 0, "__rollout_n__": 1}
        prompt["raw_prompt"] = [{"role": "user", "content": "prompt"}]
        await worker._run_prompt(prompt, {}, {"step": 6, "sample_index": 0, "rollout_n": 0, "validate": False})

    asyncio.run(main())
    tag = queue[0][f"{UID}_0_0"]
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (5, 5)


def run_turns(model, tokenizer, monkeypatch, outputs: tuple[int, ...], worker_class=WaveWorker) -> None:
    """One rollout of :class:`TurnsLoop` with these outputs; its turns have 80 and 5 bytes."""
    monkeypatch.setattr(TurnsLoop, "outputs", outputs, raising=False)
    monkeypatch.setitem(sys.modules, "users_loops", SimpleNamespace(TurnsLoop=TurnsLoop, __path__=[]))
    monkeypatch.setitem(_agent_loop_registry, "users", {"_target_": "users_loops.TurnsLoop"})
    lengths = ("data.max_prompt_length=64", "data.max_response_length=64")
    config = compose("grpo", f"actor_rollout_ref.model.path={model}", *lengths)

    async def main():
        worker = worker_class(config, ScriptedEngine(tokenizer, ["x" * 80, "y" * 5]))
        prompt = {"uid": UID, "agent_name": "users", "global_steps": 6, "index": 0, "__rollout_n__": 1}
        prompt["raw_prompt"] = [{"role": "user", "content": "prompt"}]
        await worker._run_prompt(prompt, {}, {"step": 6, "sample_index": 0, "rollout_n": 0, "validate": False})

    asyncio.run(main())


@pytest.mark.parametrize("outputs", [(0, 1), (1,), (0,)])
def test_tokens_in_no_output_of_a_loop_are_counted(queue, model, tokenizer, monkeypatch, outputs):
    run_turns(model, tokenizer, monkeypatch, outputs)
    counts = [extra(row)["generated_tokens"] for row in queue[1].values()]
    assert len(counts) == len(outputs) and sum(counts) == length_of(tokenizer, "x" * 80, "y" * 5)


def test_a_loop_without_an_output_has_failed_and_its_tokens_count(queue, model, tokenizer, monkeypatch):
    run_turns(model, tokenizer, monkeypatch, ())
    tags, rows = queue
    assert tags == {
        UID: {"status": "failure"},
        f"{UID}_0_0": without_row("failed", length_of(tokenizer, "x" * 80, "y" * 5)),
    }
    assert not rows


def test_tokens_count_if_the_rollout_fails_after_its_reward(queue, model, tokenizer, monkeypatch):
    class Worker(WaveWorker):
        async def _compute_teacher_logprobs(self, *args, **kwargs):
            raise RuntimeError("the teacher does not answer")

    run_turns(model, tokenizer, monkeypatch, (0, 1), Worker)
    assert queue[0][f"{UID}_0_0"] == without_row("failed", length_of(tokenizer, "x" * 80, "y" * 5))
