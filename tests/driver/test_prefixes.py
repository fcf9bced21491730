"""Prefixes played back through verl's own, unchanged agent loops."""

from __future__ import annotations

import asyncio

import pytest
from support.agent_loops import END, ScriptedEngine, make_loop, make_tokenizer, sql_call

from verl_ext.driver.prefixes import PLAYBACK, PrefixClient, PrefixPlayback, mask_prefix
from verl_ext.driver.tools.sqlite import SqliteTool
from verl_ext.trajectory import Trajectory

LENGTH = 1024
SCRIPT = "CREATE TABLE r(a INTEGER); INSERT INTO r VALUES(7);"
STEPS = [sql_call("UPDATE r SET a=a+4 RETURNING a"), sql_call("UPDATE r SET a=a*2 RETURNING a")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def tool():
    return SqliteTool({"type": "native"})


def run(
    loop_name, tokenizer, turns, prefix=None, tools=(), script=SCRIPT, question="+4 *2", overrides=(), logprobs=True
):
    """One rollout: the loop's output after masking, the engine, the playback."""
    engine = ScriptedEngine(tokenizer, turns)
    playback = None if prefix is None else PrefixPlayback(prefix)

    async def rollout():
        loop = make_loop(loop_name, PrefixClient(engine, LENGTH), tokenizer, tools, *overrides)
        PLAYBACK.set(playback)
        kwargs = {"sql": {"create_kwargs": {"script": script}}}
        messages = [{"role": "user", "content": question}]
        output = await loop.run({"temperature": 1.0, "logprobs": logprobs}, raw_prompt=messages, tools_kwargs=kwargs)
        if playback is not None:
            mask_prefix(output, playback)
        return output

    return asyncio.run(rollout()), engine, playback


def recorded(output) -> Trajectory:
    return Trajectory(output.response_ids, output.response_mask)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.95])
def test_a_single_turn_goes_on_where_the_prefix_ends(tokenizer, ratio):
    first, _, _ = run("single_turn_agent", tokenizer, ["the answer is 42"])
    prefix = recorded(first).prefix(ratio)
    cut = len(prefix)
    again, engine, _ = run("single_turn_agent", tokenizer, [" no, 43"], prefix)
    assert engine.calls[0]["prompt_ids"] == first.prompt_ids + prefix.tokens.tolist()
    assert engine.calls[0]["sampling_params"]["max_tokens"] == LENGTH - cut
    assert again.prompt_ids == first.prompt_ids
    assert again.response_ids[:cut] == first.response_ids[:cut]
    assert tokenizer.decode(again.response_ids[cut:]) == " no, 43" + END  # the reward decodes the whole response
    assert again.response_mask == [0] * cut + [1] * (len(again.response_ids) - cut)
    assert again.response_logprobs == [0.0] * cut + [-0.5] * (len(again.response_ids) - cut)
    assert again.extra_fields["min_global_steps"] == 3  # of the real call


@pytest.mark.parametrize(
    ("response_length", "own", "room"),
    [(9, {}, 6), (9, {"max_tokens": 5}, 2), (9, {"max_tokens": 100}, 6), (9, {"max_tokens": 3}, 0), (3, {}, 0)],
)
def test_a_prefix_counts_toward_every_limit_and_the_engine_is_asked_only_for_what_is_left(
    tokenizer, response_length, own, room
):
    engine, prefix = ScriptedEngine(tokenizer, ["a long answer"]), Trajectory([5, 6, 7], [True] * 3)

    async def answer():
        PLAYBACK.set(PrefixPlayback(prefix))
        return await PrefixClient(engine, response_length).generate("r", prompt_ids=[1, 2], sampling_params=own)

    tokens = asyncio.run(answer()).token_ids
    assert tokens[:3] == [5, 6, 7] and len(tokens) == 3 + room
    assert [call["sampling_params"]["max_tokens"] for call in engine.calls] == [room] * (room > 0)


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_without_log_probabilities_a_prefix_is_replayed_as_well(tokenizer, tool, ratio):
    """The shorter prefix ends within a turn, the longer prefix ends with an observation."""
    turns = [*STEPS, "22"]
    first, _, _ = run("tool_agent", tokenizer, turns, tools=[tool], logprobs=False)
    prefix = recorded(first).prefix(ratio)
    again, engine, _ = run("tool_agent", tokenizer, ["9"], prefix, [tool], logprobs=False)
    assert len(engine.calls) == 1 and again.response_logprobs is None
    assert again.response_ids[: len(prefix)] == first.response_ids[: len(prefix)]
    single, _, _ = run("single_turn_agent", tokenizer, ["the answer is 42"], logprobs=False)
    again, _, _ = run("single_turn_agent", tokenizer, ["43"], recorded(single).prefix(ratio), logprobs=False)
    assert again.response_logprobs is None


def test_an_agent_replays_its_first_interaction_through_the_tool(tokenizer, tool):
    first, engine, _ = run("tool_agent", tokenizer, [*STEPS, "22"], tools=[tool])
    assert len(engine.calls) == 3
    observations = [span for span in recorded(first).spans if not span.generated]
    assert [
        tokenizer.decode(first.response_ids[span.start : span.stop]).count("tool_response") for span in observations
    ]
    prefix = recorded(first).prefix(0.5)
    assert len(prefix) == observations[0].stop

    again, engine, playback = run(
        "tool_agent", tokenizer, [sql_call("UPDATE r SET a=a-1 RETURNING a"), "10"], prefix, [tool]
    )
    cut = len(prefix)
    assert again.response_ids[:cut] == first.response_ids[:cut] and sum(again.response_mask[:cut]) == 0
    # The database has its value at the end of the prefix: 7 + 4 - 1.
    assert "<tool_response>10</tool_response>" in tokenizer.decode(again.response_ids[cut:])
    assert len(engine.calls) == 2 and engine.calls[0]["prompt_ids"] == first.prompt_ids + prefix.tokens.tolist()
    new_turns = [sql_call("UPDATE r SET a=a-1 RETURNING a") + END, "10" + END]
    assert not playback.diverged
    assert sum(again.response_mask) == sum(len(tokenizer.encode(turn)) for turn in new_turns)  # no other tokens count
    generated = [span for span in recorded(first).spans if span.generated]
    assert prefix.generated.sum() == generated[0].stop - generated[0].start


@pytest.mark.parametrize("ratio", [0.4, 0.95])
def test_the_state_after_a_replay_is_the_state_after_the_original_steps(tokenizer, tool, ratio):
    content = ["SELECT name, sql FROM sqlite_master", "SELECT quote(a) FROM r", "SELECT quote(t) FROM log"]

    class Reading(SqliteTool):
        """Reads the whole database after every call."""

        async def execute(self, instance_id, parameters, *, agent_data, **kwargs):
            execute = super().execute
            result = await execute(instance_id, parameters, agent_data=agent_data, **kwargs)
            for query in content:
                response, _, _ = await execute(instance_id, {"query": query}, agent_data=agent_data)
                self.read.append(response.text)
            return result

    reading = Reading({"type": "native"})
    reading.read = []
    turns = [
        sql_call("CREATE TABLE log(t TEXT)"),
        *STEPS,
        sql_call("INSERT INTO log SELECT 'now ' || a FROM r"),
        sql_call("SELECT t FROM log"),
    ]
    first, _, _ = run("tool_agent", tokenizer, [*turns, "done"], tools=[reading])
    original, reading.read = reading.read, []
    prefix = recorded(first).prefix(ratio)
    steps = sum(not span.generated for span in prefix.spans)
    assert 0 < steps < len(turns)
    run("tool_agent", tokenizer, ["done"], prefix, [reading])
    assert reading.read == original[: steps * len(content)]


def test_a_random_answer_is_caught_as_divergence(tokenizer, tool):
    turns = [sql_call("SELECT abs(random())"), sql_call("SELECT a FROM r")]
    first, _, _ = run("tool_agent", tokenizer, [*turns, "7"], tools=[tool])
    prefix = recorded(first).prefix(0.95)
    again, engine, playback = run("tool_agent", tokenizer, ["never asked"], prefix, [tool])
    assert playback.diverged and engine.calls == []
    assert sum(again.response_mask) == 0  # no token can be trained on


def test_another_start_is_caught_as_divergence(tokenizer, tool):
    first, _, _ = run("tool_agent", tokenizer, [*STEPS, "22"], tools=[tool])
    prefix = recorded(first).prefix(0.5)
    _, engine, playback = run("tool_agent", tokenizer, ["x"], prefix, [tool], script=SCRIPT.replace("7", "8"))
    assert playback.diverged and engine.calls == []


def test_a_replay_that_a_limit_ends_early_is_no_replay(tokenizer, tool):
    first, _, _ = run("tool_agent", tokenizer, [*STEPS, sql_call("SELECT a FROM r"), "22"], tools=[tool])
    prefix = recorded(first).prefix(0.95)
    assert sum(not span.generated for span in prefix.spans) == 2
    limit = ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns=1",)
    output, engine, playback = run("tool_agent", tokenizer, ["x"], prefix, [tool], overrides=limit)
    assert playback.diverged and engine.calls == [] and sum(output.response_mask) == 0


def test_without_a_prefix_nothing_changes(tokenizer):
    output, engine, _ = run("single_turn_agent", tokenizer, ["42"])
    assert engine.calls[0]["sampling_params"] == {"temperature": 1.0, "logprobs": True}
    assert output.response_mask == [1] * len(output.response_ids)


def test_rollouts_that_run_at_once_do_not_mix(tokenizer):
    """Every rollout is a separate asyncio task with its own prefix."""
    first, _, _ = run("single_turn_agent", tokenizer, ["the answer is 42"])
    prefixes = [recorded(first).prefix(ratio) for ratio in (0.2, 0.6)]
    engine = ScriptedEngine(tokenizer, ["a", "b", "c"])

    async def rollout(prefix):
        loop = make_loop("single_turn_agent", PrefixClient(engine, LENGTH), tokenizer)
        PLAYBACK.set(None if prefix is None else PrefixPlayback(prefix))
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "+4 *2"}], tools_kwargs={})

    async def all_at_once():
        return await asyncio.gather(*(asyncio.create_task(rollout(prefix)) for prefix in [*prefixes, None]))

    asyncio.run(all_at_once())
    lengths = [len(call["prompt_ids"]) for call in engine.calls]
    assert sorted(lengths) == sorted(len(first.prompt_ids) + extra for extra in (len(prefixes[0]), len(prefixes[1]), 0))
