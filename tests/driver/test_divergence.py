"""Environments that answer a replayed prefix differently than at first, in verl's own tool-agent loop."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.agent_loops import END, ScriptedEngine, make_loop, make_tokenizer
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_ext.driver.prefixes import PLAYBACK, PrefixClient, PrefixPlayback, mask_prefix
from verl_ext.driver.transcript import TRANSCRIPT, Transcript, TranscriptClient
from verl_ext.trajectory import Trajectory

LENGTH = 2048
TOKENIZER = make_tokenizer()
PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
FUNCTION = {"name": "ask", "description": "Answers.", "parameters": PARAMETERS}


class Ask(BaseTool):
    """Answers call ``number`` with ``create_kwargs.answers[number]``."""

    def __init__(self):
        schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": FUNCTION})
        super().__init__({"type": "native"}, schema)

    async def create(self, instance_id=None, **kwargs):
        return kwargs["create_kwargs"]["answers"], ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=instance_id[parameters["number"]]), 0.0, {}

    async def release(self, instance_id, **kwargs):
        pass


def ask(number: int, thought: str = "") -> str:
    return f"{thought}<tool_call>{json.dumps({'name': 'ask', 'arguments': {'number': number}})}</tool_call>"


def run(turns, answers, prefix=None, *, goes_on=True, length=LENGTH, overrides=()):
    """One rollout: the loop's output after masking, the engine, the playback, the transcript."""
    engine = ScriptedEngine(TOKENIZER, turns)
    playback = None if prefix is None else PrefixPlayback(prefix, goes_on=goes_on)
    transcript = Transcript(playback)

    async def rollout():
        client = TranscriptClient(PrefixClient(engine, length))
        long = "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=100000"
        loop = make_loop(
            "tool_agent", client, TOKENIZER, [Ask()], f"data.max_response_length={length}", long, *overrides
        )
        PLAYBACK.set(playback)
        TRANSCRIPT.set(transcript)
        messages = [{"role": "user", "content": "ask"}]
        kwargs = {"ask": {"create_kwargs": {"answers": answers}}}
        output = await loop.run({"temperature": 1.0, "logprobs": True}, raw_prompt=messages, tools_kwargs=kwargs)
        if playback is not None:
            mask_prefix(output, playback)
        return output

    return asyncio.run(rollout()), engine, playback, transcript


def recorded(output) -> Trajectory:
    return Trajectory(output.response_ids, output.response_mask)


def length_of(*turns: str) -> int:
    return sum(len(TOKENIZER.encode(turn + END, add_special_tokens=False)) for turn in turns)


def cut(trajectory: Trajectory, stop: int) -> Trajectory:
    return Trajectory(trajectory.tokens[:stop], trajectory.generated[:stop])


words = st.text(alphabet="ab \n", max_size=12)


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_a_rollout_goes_on_as_if_the_replayed_turns_had_been_its_own(data):
    """The reference is a rollout without a prefix that takes the same turns in the same environment."""
    count = data.draw(st.integers(1, 4), label="interactions")
    turns = [ask(number, data.draw(words)) for number in range(count)]
    answers = data.draw(st.lists(words, min_size=count, max_size=count), label="answers")
    first, *_ = run([*turns, "the end"], answers)
    stops = [span.stop for span in recorded(first).spans]
    # The prefix ends after a turn, after an observation, or within a turn.
    stop = data.draw(st.one_of(st.sampled_from(stops), st.integers(1, len(first.response_ids))), label="cut")
    prefix = cut(recorded(first), stop)
    replayed = sum(span.generated for span in prefix.spans)  # turns, the last one perhaps in part
    place = data.draw(st.integers(0, count - 1), label="divergence")
    new_answers = [
        *answers[:place],
        data.draw(words.filter(lambda text: text != answers[place])),
        *answers[place + 1 :],
    ]
    is_met = place + 1 < replayed or (place + 1 == replayed and not prefix.generated[-1])  # before the prefix ends
    new_turns = [ask(0, "again"), "done"]
    if not is_met:  # the policy begins at the end of the prefix, perhaps within a turn
        output, engine, playback, _ = run(["done", "done"], new_answers, prefix)
        assert not playback.diverged and output.response_ids[:stop] == prefix.tokens.tolist()
        assert output.response_mask[:stop] == [0] * stop and playback.turn_tokens == int(prefix.generated.sum())
        return

    reference, *_ = run([*turns[: place + 1], *new_turns], new_answers)
    output, engine, playback, transcript = run(new_turns, new_answers, prefix)
    start = len(engine.calls[0]["prompt_ids"]) - len(output.prompt_ids)  # of the policy's own tokens
    assert engine.calls[0]["prompt_ids"] == [*reference.prompt_ids, *reference.response_ids[:start]]
    assert (output.prompt_ids, output.response_ids) == (reference.prompt_ids, reference.response_ids)
    assert output.response_mask == [0] * start + reference.response_mask[start:]
    assert output.response_logprobs[:start] == [0.0] * start
    assert output.response_logprobs[start:] == reference.response_logprobs[start:]
    assert len(engine.calls) == len(new_turns) and playback.diverged and playback.is_over
    assert sum(output.response_mask) == transcript.generated == length_of(*new_turns)
    assert playback.turn_tokens == length_of(*turns[: place + 1])
    assert output.extra_fields["min_global_steps"] == engine.version  # of the policy's own turns

    dropped, engine, playback, _ = run(new_turns, new_answers, prefix, goes_on=False)
    assert playback.diverged and engine.calls == [] and sum(dropped.response_mask) == 0
    assert playback.turn_tokens == length_of(*turns[: place + 1])


@pytest.mark.parametrize("new", ["", "o", "one, then more", "three", "x" * 500])
def test_a_new_first_observation_of_any_length(new):
    """Also an observation that is the beginning of the recorded one, or begins with the recorded one."""
    turns, answers = [ask(0), ask(1)], ["one", "two"]
    first, *_ = run([*turns, "2"], answers)
    prefix = recorded(first).prefix(0.99)
    output, engine, playback, _ = run(["other"], [new, "two"], prefix)
    text = TOKENIZER.decode(output.response_ids)
    assert text.startswith(turns[0]) and f"<tool_response>{new}</tool_response>" in text and "two" not in text
    assert playback.diverged and sum(output.response_mask) == length_of("other") and len(engine.calls) == 1


def test_an_observation_before_a_turn_that_the_prefix_cuts():
    turns, answers = [ask(0), ask(1, "a long thought, of which the prefix holds a part")], ["one", "two"]
    first, *_ = run([*turns, "2"], answers)
    observation = recorded(first).spans[1]
    prefix = cut(recorded(first), observation.stop + 7)
    same, engine, playback, _ = run([" and its end"], answers, prefix)
    assert not playback.diverged and same.response_ids[: len(prefix)] == prefix.tokens.tolist()
    assert playback.turn_tokens == length_of(turns[0]) + 7
    output, engine, playback, _ = run(["other"], ["another", "two"], prefix)
    assert playback.diverged and "a long" not in TOKENIZER.decode(output.response_ids)
    assert engine.calls[0]["sampling_params"] == {"temperature": 1.0, "logprobs": True}  # a whole turn
    assert (sum(output.response_mask), playback.turn_tokens) == (length_of("other"), length_of(turns[0]))


def test_a_new_observation_that_leaves_no_room():
    """verl's loop ends before the observation, and the policy generates nothing."""
    turns, answers = [ask(0), ask(1)], ["one", "two"]
    first, *_ = run([*turns, "2"], answers)
    prefix = recorded(first).prefix(0.99)
    for goes_on in (True, False):
        output, engine, playback, transcript = run(["never asked"], ["x" * 2 * LENGTH], prefix, goes_on=goes_on)
        assert engine.calls == [] and playback.diverged and not playback.is_over
        assert output.response_ids == prefix.tokens[: length_of(turns[0])].tolist()
        assert sum(output.response_mask) == 0 == transcript.generated
        assert playback.turn_tokens == length_of(turns[0])
