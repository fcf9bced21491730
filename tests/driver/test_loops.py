"""The agent loop that all rollouts of a worker use, and the prompt that a group renders once."""

from __future__ import annotations

import asyncio
import copy

import pytest
from omegaconf import OmegaConf
from support.agent_loops import ScriptedEngine, make_tokenizer, sql_call
from support.configs import compose
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_ext.driver.loops import PROMPT_TOKENS, PromptTokens, SharedSingleTurnLoop, SharedToolLoop, loop_maker
from verl_ext.driver.tools.sqlite import SqliteTool
from verl_ext.driver.transcript import TranscriptClient

QUESTION = [{"role": "user", "content": "count"}]


@pytest.fixture
def make_maker():
    def make(name, engine, *tools):
        config = compose("grpo", "data.max_prompt_length=64", "data.max_response_length=256")
        return loop_maker(
            _agent_loop_registry[name],
            trainer_config=DictConfigWrap(config),
            server_manager=TranscriptClient(engine),  # no dataclass, as in the worker
            tokenizer=engine.tokenizer,
            processor=None,
            hf_model_type="qwen2",
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap(list(tools)),
        )

    return make


@pytest.fixture
def rendered(monkeypatch):
    """The messages that verl's loop has rendered."""
    rendered, render = [], SingleTurnAgentLoop.ct_build_initial_tokens

    async def noted(self, messages, *args, **kwargs):
        rendered.append(messages)
        await asyncio.sleep(0)
        if messages[0]["content"] == "no template":
            raise ValueError("no template")
        return await render(self, messages, *args, **kwargs)

    monkeypatch.setattr("verl.experimental.agent_loop.agent_loop.AgentLoopBase.ct_build_initial_tokens", noted)
    return rendered


@pytest.fixture
def tools_of_each(rendered, monkeypatch):
    """The tools with which verl's loop has rendered."""
    tools_of_each, render = [], SingleTurnAgentLoop.ct_build_initial_tokens

    async def noted(self, messages, tools, *args, **kwargs):
        tools_of_each.append(tools)
        return await render(self, messages, tools, *args, **kwargs)

    monkeypatch.setattr("verl.experimental.agent_loop.agent_loop.AgentLoopBase.ct_build_initial_tokens", noted)
    return tools_of_each


class Environment:
    """A part of a user's loop, with the state of a rollout."""

    def __init__(self):
        self.log = []


class UsersLoop(AgentLoopBase):
    """A user's loop with parts, named in its configuration."""

    def __init__(self, *args, environment=None, notes=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.environment, self.notes = environment, notes

    async def run(self, sampling_params, **kwargs): ...


async def group(*rollouts):
    """Rollouts of one group."""
    PROMPT_TOKENS.set(PromptTokens())
    return await asyncio.gather(*rollouts, return_exceptions=True)


def test_all_rollouts_have_one_loop_of_verls_which_keeps_nothing_of_them(make_maker):
    def kept(loop):
        return {
            name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in vars(loop).items()
        }

    async def main():
        single = make_maker("single_turn_agent", ScriptedEngine(make_tokenizer(), ["3", "4"]))
        turns = [sql_call("SELECT 1"), sql_call("SELECT 2"), "1", "2"]
        tool = make_maker("tool_agent", ScriptedEngine(make_tokenizer(), turns), SqliteTool({"type": "native"}))
        assert type(single()) is SharedSingleTurnLoop and single() is single()
        assert type(tool()) is SharedToolLoop and tool() is tool()
        for make, turns_of_each in ((single, 2), (tool, 4)):
            before, parser = kept(make()), kept(getattr(make(), "tool_parser", make()))
            settings = {"tools_kwargs": {"sql": {"create_kwargs": {"script": ""}}}}
            outputs = await group(*(make().run({}, raw_prompt=QUESTION, **settings) for _ in range(2)))
            assert [output.num_turns for output in outputs] == [turns_of_each] * 2
            assert kept(make()) == before and kept(getattr(make(), "tool_parser", make())) == parser

    asyncio.run(main())


@pytest.mark.parametrize("as_config", [OmegaConf.create, dict])
@pytest.mark.parametrize(
    "parts", [{}, {"environment": {"_target_": f"{__name__}.Environment"}}, {"notes": [1]}, {"notes": {"a": 1}}]
)
def test_rollouts_of_a_users_loop_share_neither_the_loop_nor_its_parts(make_maker, monkeypatch, as_config, parts):
    users = as_config({"_target_": f"{__name__}.UsersLoop", **parts})
    monkeypatch.setitem(_agent_loop_registry, "users", users)
    make = make_maker("users", ScriptedEngine(make_tokenizer(), ""))
    first, second = make(), make()
    assert type(first) is type(second) is UsersLoop and first is not second
    for part in parts:
        assert getattr(first, part) is not getattr(second, part)
    if "environment" in parts:
        assert (first.environment.log, type(second.environment)) == ([], Environment)
    elif parts:
        assert first.notes == second.notes == parts["notes"]
    assert (make.func is UsersLoop) == (not parts)  # hydra takes long


def test_a_prompt_is_rendered_once_for_its_group(make_maker, rendered):
    async def main():
        make = make_maker("single_turn_agent", ScriptedEngine(make_tokenizer(), "abcdef"))
        outputs = await group(*(make().run({}, raw_prompt=QUESTION) for _ in range(4)))
        assert rendered == [QUESTION]
        assert len({tuple(output.prompt_ids) for output in outputs}) == 1
        tokens, same = await group(*(make().ct_build_initial_tokens(QUESTION) for _ in range(2)))
        assert tokens == same and tokens is not same  # each rollout may change its own
        rendered.pop()
        other = [{"role": "user", "content": "another"}]
        first, last = await group(*(make().run({}, raw_prompt=messages) for messages in (QUESTION, other)))
        assert sorted(map(str, rendered[1:])) == sorted(map(str, [QUESTION, other]))
        assert first.prompt_ids != last.prompt_ids

    asyncio.run(main())


def test_other_tools_are_rendered_anew_and_images_are_rendered_in_each_rollout(make_maker, rendered, tools_of_each):
    async def main():
        make = make_maker("single_turn_agent", ScriptedEngine(make_tokenizer(), ""))
        tools = [{"type": "function", "function": {"name": "sql", "parameters": {}}}]
        await group(*(make().ct_build_initial_tokens(QUESTION, each) for each in (tools, tools, None)))
        assert sorted(map(str, tools_of_each)) == sorted(map(str, (tools, None)))
        rendered.clear()
        await group(*(make().ct_build_initial_tokens(QUESTION, None, ["an image"]) for _ in range(2)))
        assert len(rendered) == 2

    asyncio.run(main())


def test_a_conversation_that_has_gone_on_is_not_the_prompt(make_maker, rendered):
    async def main():
        build = make_maker("tool_agent", ScriptedEngine(make_tokenizer(), ""))().ct_build_initial_tokens
        PROMPT_TOKENS.set(PromptTokens())
        messages = list(QUESTION)
        prompt = await build(messages)
        messages.append({"role": "user", "content": "and on"})
        assert await build(QUESTION) == prompt and len(rendered) == 1
        assert len(await build(messages)) > len(prompt)

    asyncio.run(main())


def test_a_prompt_that_cannot_be_rendered_fails_its_group(make_maker, rendered):
    async def main():
        make = make_maker("single_turn_agent", ScriptedEngine(make_tokenizer(), "ab"))
        messages = [{"role": "user", "content": "no template"}]
        errors = await group(*(make().run({}, raw_prompt=messages) for _ in range(2)))
        assert [str(error) for error in errors] == ["no template"] * 2 and len(rendered) == 1

    asyncio.run(main())


def test_the_first_rollout_may_be_cancelled(make_maker, rendered):
    async def main():
        make = make_maker("single_turn_agent", ScriptedEngine(make_tokenizer(), "ab"))
        PROMPT_TOKENS.set(PromptTokens())
        first, second = (asyncio.ensure_future(make().run({}, raw_prompt=QUESTION)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).response_ids and first.cancelled() and len(rendered) == 1

    asyncio.run(main())
