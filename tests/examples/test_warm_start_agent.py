"""The agent's warm start: demonstrations in the tokens of verl's own loop, executed by the real tool."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
from support.agent_loops import ScriptedEngine, make_loop
from support.commands import invoke
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils import hf_tokenizer

from verl_ext.data import sql_tasks
from verl_ext.data.levels import write_splits
from verl_ext.driver.prefixes import PrefixClient

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(FOLDER))  # as for a script, to import warm_start.py beside it
spec = importlib.util.spec_from_file_location("quickstart_warm_start_agent", FOLDER / "warm_start_agent.py")
agent = importlib.util.module_from_spec(spec)
sys.modules["quickstart_warm_start_agent"] = agent
spec.loader.exec_module(agent)

TASKS = [
    sql_tasks.Task(42, ("+4", "*2", "-3")),
    sql_tasks.Task(10, ("-9", "-9", "*9", "*9", "*9", "*9", "-1")),  # to values below zero, of many digits
    sql_tasks.Task(77, ("+5",)),
    sql_tasks.Task(77, ("*3", "+?", "-8", "+?")),
]


def folder_with_model(path):
    """An untrained checkpoint in the format of a trained one."""
    tokenizer = agent.make_tokenizer()
    agent.save(agent.make_model(tokenizer, 32, 1), tokenizer, {}, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer, loaded as in verl."""
    return hf_tokenizer(str(folder_with_model(tmp_path_factory.mktemp("warm") / "model")))


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools.yaml"
    path.write_text(sql_tasks.TOOLS)
    return initialize_tools_from_config(path)


def roll_out(task, turns, tokenizer, tools):
    """The output of verl's tool_agent loop for a row of the data, when the engine generates these turns."""
    row = sql_tasks.to_row(task, sql_tasks.Level(len(task.operations)))

    async def run():
        loop: AgentLoopBase = make_loop(
            row["agent_name"], PrefixClient(ScriptedEngine(tokenizer, turns), 1024), tokenizer, tools
        )
        kwargs = row["extra_info"]["tools_kwargs"]
        return await loop.run({}, raw_prompt=row["prompt"], tools_kwargs=kwargs, extra_info=row["extra_info"])

    return row, asyncio.run(run())


@pytest.mark.parametrize("task", TASKS[:3], ids=lambda task: task.question)
def test_a_demonstration_has_the_tokens_of_verls_loop(task, tokenizer, tools):
    demonstration = agent.demonstrate(task)
    ((tokens, generated),) = agent.encode(agent.make_tokenizer(), [demonstration])
    row, output = roll_out(task, demonstration.turns, tokenizer, tools)
    assert output.prompt_ids + output.response_ids == tokens
    assert [False] * len(output.prompt_ids) + [mask == 1 for mask in output.response_mask] == generated
    # The reward manager's result.
    solution = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    extra_info = {**row["extra_info"], "num_turns": output.num_turns}
    truth = row["reward_model"]["ground_truth"]
    assert demonstration.turns[-1] == truth
    assert sql_tasks.compute_score(row["data_source"], solution, truth, extra_info)["score"] == 1.0


def test_a_random_value_is_right_when_it_was_observed(tokenizer, tools):
    calls = [agent.CALL + statement + agent.CALLED for statement in TASKS[3].statements]
    for forged in (False, True):
        answers = []

        def turns(answers=answers, forged=forged):
            yield from calls[:-1]
            if forged:
                yield f"{agent.ANSWER}5{agent.ANSWERED}5"
            else:
                yield calls[-1]
                yield answers[-1]

        class Listening(type(tools[0])):
            """Lets the scripted engine answer with the output of the tool."""

            async def execute(self, *args, answers=answers, **kwargs):
                result = await super().execute(*args, **kwargs)
                answers.append(result[0].text)
                return result

        row, output = roll_out(TASKS[3], turns(), tokenizer, [Listening({})])
        solution = tokenizer.decode(output.response_ids, skip_special_tokens=True)
        extra_info = {**row["extra_info"], "num_turns": output.num_turns}
        truth = row["reward_model"]["ground_truth"]
        score = sql_tasks.compute_score(row["data_source"], solution, truth, extra_info)["score"]
        assert truth == sql_tasks.OBSERVED and score == float(not forged)


def test_turns_are_short(tokenizer):
    demonstrations = [agent.demonstrate(TASKS[0])]
    turn = tokenizer.encode(demonstrations[0].turns[0] + agent.END, add_special_tokens=False)
    assert len(turn) == 5  # UPDATE r SET a=a, +, 4, RETURNING a, end
    ((tokens, _),) = agent.encode(tokenizer, demonstrations)
    assert len(tokens) == 43


def test_the_template_renders_the_whole_dialogue_alike(tokenizer, tools):
    demonstration = agent.demonstrate(TASKS[0])
    messages = [{"role": "system", "content": "left out"}, {"role": "user", "content": demonstration.question}]
    for statement, observation in zip(TASKS[0].statements, demonstration.observations, strict=True):
        function = {"name": "sql", "arguments": {"query": statement}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": observation})
    messages.append({"role": "assistant", "content": demonstration.turns[-1]})
    schemas = [tool.tool_schema.model_dump() for tool in tools]
    text = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
    assert text == "".join(piece for piece, _ in demonstration.pieces()) + "\n"


def test_what_the_model_is_trained_on_is_what_it_generates():
    tokenizer = agent.make_tokenizer()
    examples = agent.encode(tokenizer, list(map(agent.demonstrate, TASKS)))
    tokens, targets = agent.to_batch(examples, tokenizer.pad_token_id)
    assert tokens.shape == targets.shape == (4, max(len(ids) for ids, _ in examples))
    trained = tokenizer.decode(targets[0][targets[0] != -100])
    calls = [agent.CALL + statement + agent.CALLED + agent.END for statement in TASKS[0].statements]
    assert trained == "".join(calls) + "89" + agent.END
    assert (targets[2, len(examples[2][0]) :] == -100).all()


def test_batches_are_full_and_of_similar_length():
    examples = [([0] * length, [True] * length) for length in range(1, 101)]
    random.Random(0).shuffle(examples)
    batches = agent.to_batches(examples, 8, 0, seed=0)
    assert [tokens.shape[0] for tokens, _ in batches] == [8] * 12
    assert all(tokens.shape[1] - (targets != -100).sum(1).min() <= 8 for tokens, targets in batches)


def test_demonstrations_are_of_other_questions_and_of_many_starts():
    levels = [sql_tasks.Level(2), sql_tasks.Level(4)]
    known = {task.question for task, _ in zip(sql_tasks.distinct_tasks(levels[0], 7), range(300), strict=False)}
    tasks = agent.collect(levels, [2000, 100], 7, 0.0, known)
    assert [len(task.operations) for task in tasks] == [2] * 2000 + [4] * 100
    assert not known & {task.question for task in tasks}
    questions = {task.question for task in tasks[:2000]}
    assert len(questions) == 26**2 - 300 and len(set(tasks[:2000])) > 1900
    shuffled = agent.shuffled(levels, [5000, 10], 7, 0.5, set())
    assert len(shuffled) == 5010 and len({(each.question, *each.observations) for each in shuffled}) > 3500


def test_nothing_left_to_demonstrate_is_refused():
    level = sql_tasks.Level(1)
    known = {task.question for task in sql_tasks.distinct_tasks(level, 0)}
    with pytest.raises(ValueError, match="length=1: no question is left"):
        agent.collect([level], [4], 0, 0.0, known)


def test_command_line_trains_once(tmp_path):
    data, out = tmp_path / "data", tmp_path / "model"
    missing = invoke(agent.main, "--data", data, "--out", out)
    assert missing.exit_code == 2 and "write it with verl-ext data sql_tasks" in missing.output
    write_splits(sql_tasks.splits(sql_tasks.DEFAULT_LEVELS, {"train": 24, "validation": 8}, 0, 0.5), data)
    small = ("--data", data, "--out", out, "--batch", 2, "--hidden", 32, "--layers", 1)
    result = invoke(agent.main, *small, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert "mean success rate of 0.0" in result.output
    assert json.loads((out / "warm_start.json").read_text())["steps"] == 2
    assert hf_tokenizer(str(out)).encode("\n") == agent.make_tokenizer().encode("\n")
    assert "is there already" in invoke(agent.main, *small, "--steps", 2).output
    assert "holds something else" in invoke(agent.main, *small, "--steps", 3).output
    assert "multiple of 32" in invoke(agent.main, *small, "--hidden", 33).output


def test_training_ends_when_the_model_is_good_enough(tmp_path):
    data = tmp_path / "data"
    write_splits(sql_tasks.splits([sql_tasks.Level(2)], {"train": 8, "validation": 8}, 0), data)
    options = ("--batch", 2, "--hidden", 32, "--layers", 1, "--steps", 60, "--success", 0)
    result = invoke(agent.main, "--data", data, "--out", tmp_path / "model", *options)
    assert result.exit_code == 0, result.output
    assert "25/25" in result.output
