"""Chains of SQL operations: verl's schema, disjoint splits, values by execution, the verifier."""

from __future__ import annotations

import sqlite3

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.data import sql_tasks as data

SIZES = {"train": 63, "validation": 21}
CALL = '<tool_call>\n{"name": "sql", "arguments": {"query": "..."}}\n</tool_call>'


def splits(*arguments, **options):
    """The rows of each split as a data frame."""
    return {split: pd.DataFrame(rows) for split, rows in data.splits(*arguments, **options).items()}


@pytest.fixture(scope="module")
def frames():
    return splits(data.DEFAULT_LEVELS, SIZES, seed=3)


def questions(frame):
    return {row[0]["content"] for row in frame["prompt"]}


def dialogue(observations, answer, before_answer="\n"):
    """The text that verl decodes: calls and answers of a tool, then the final answer."""
    turns = "".join(f"{CALL}\n<tool_response>\n{value}\n</tool_response>{before_answer}" for value in observations)
    return turns + answer


def score(row, solution, **extra):
    info = {**row.extra_info, **extra}
    result = data.compute_score(row.data_source, solution, row.reward_model["ground_truth"], info, unused=1)
    assert result["acc"] == result["score"]
    return result["score"]


def test_rows_have_the_columns_verl_reads(frames):
    for split, frame in frames.items():
        columns = ["data_source", "agent_name", "prompt", "ability", "reward_model", "extra_info"]
        assert list(frame.columns) == columns and len(frame) == SIZES[split]
        assert [info["index"] for info in frame["extra_info"]] == list(range(SIZES[split]))
        starts = {info["start"] for info in frame["extra_info"]}  # with one start, no row would need the tool
        assert len(starts) > 10 and min(starts) >= 10 and max(starts) <= 99
        for row in frame.itertuples():
            assert (row.data_source, row.agent_name) == ("sql/chain", "tool_agent")
            assert [message["role"] for message in row.prompt] == ["user"]
            assert row.extra_info["need_tools_kwargs"] is True and row.extra_info["split"] == split
            assert len(row.prompt[0]["content"].split()) == row.extra_info["length"]


def test_the_truth_is_what_sqlite_says(frames):
    for row in frames["train"].itertuples():
        database = sqlite3.connect(":memory:")
        database.executescript(row.extra_info["tools_kwargs"]["sql"]["create_kwargs"]["script"])
        for operation in row.prompt[0]["content"].split(" "):
            database.execute(f"UPDATE r SET a=a{operation}")
        assert str(database.execute("SELECT a FROM r").fetchone()[0]) == row.reward_model["ground_truth"]


@given(st.integers(10, 99), st.lists(st.tuples(st.sampled_from("+-*"), st.integers(1, 9)), min_size=1, max_size=16))
@settings(max_examples=50)
def test_execution_is_arithmetic(start, operations):
    values, value = [], start
    for sign, operand in operations:
        value = {"+": value + operand, "-": value - operand, "*": value * operand}[sign]
        values.append(value)
    assert data.Task(start, tuple(f"{sign}{operand}" for sign, operand in operations)).execute() == values


@pytest.mark.parametrize("before_answer", ["\n", "\nassistant\n"], ids=["small model", "Qwen"])
def test_only_the_right_final_answer_counts(frames, before_answer):
    for row in frames["train"].head(20).itertuples():
        values = data.to_task(row._asdict()).execute()
        truth = str(values[-1])
        assert score(row, dialogue(values, truth, before_answer)) == 1.0
        assert score(row, dialogue(values, f" {truth}\n", before_answer)) == 1.0
        for wrong in ("", truth + "7", "-" + truth, f"{truth} {truth}", f"+{truth}", CALL, CALL + truth, truth + CALL):
            assert score(row, dialogue(values, wrong, before_answer)) == 0.0, wrong


def test_the_right_value_elsewhere_does_not_count(frames):
    row = next(row for row in frames["train"].itertuples() if row.extra_info["length"] == 4)
    values = data.to_task(row._asdict()).execute()
    truth = str(values[-1])
    assert score(row, truth) == 0.0  # a guess: the tool was never asked
    assert score(row, f"{CALL}{truth}") == 0.0
    assert score(row, dialogue(values, "")) == 0.0  # observed, not answered
    assert score(row, dialogue(values, f"{CALL}")) == 0.0  # cut off by a limit
    assert score(row, truth + dialogue(values, "no idea")) == 0.0  # said too early
    assert score(row, dialogue([*values[:-1], "error: no such column: b"], "error: no such column: b")) == 0.0
    assert score(row, dialogue([truth], truth)) == 1.0  # in one statement: only the value counts


def test_an_answer_without_a_call_is_a_guess_even_if_it_imitates_the_answer_of_a_tool(frames):
    row = next(frames["train"].itertuples())
    truth = row.reward_model["ground_truth"]
    for forged in (f"{data.END_OF_OBSERVATION}{truth}", dialogue([truth], truth)):
        assert score(row, forged, num_turns=2) == 0.0
        assert score(row, forged, num_turns=3) == 0.0  # a call whose answer left no room for a turn
    for num_turns in (4, 5, 8, 100, None):  # more turns than answers in the text, or less, if a turn makes two calls
        assert score(row, dialogue([1, truth], truth), num_turns=num_turns) == 1.0


def test_other_keywords_and_missing_information_do_not_matter_for_a_fixed_value(frames):
    row = frames["train"].iloc[0]
    truth = row["reward_model"]["ground_truth"]
    assert data.compute_score("sql/chain", dialogue([truth], truth), truth)["score"] == 1.0


@pytest.fixture(scope="module")
def random_rows():
    frame = splits([data.Level(3)], {"train": 40}, seed=0, random_share=1.0)["train"]
    return list(frame.itertuples())


def test_a_random_row_draws_one_number_anew_each_time(random_rows):
    for row in random_rows:
        task = data.to_task(row._asdict())
        assert row.reward_model["ground_truth"] == data.OBSERVED
        assert task.operations.count("+?") == 1 and "abs(random()%100)" in " ".join(task.statements)
    assert len({tuple(task.execute()) for _ in range(20)}) > 1


def test_numbers_go_up_to_those_of_the_level():
    level = data.parse_level("3:40@0.5")
    assert (level, data.parse_level("2")) == (data.Level(3, 40, 0.5), data.Level(2, 9))
    rows = splits([level], {"train": 200}, seed=0)["train"]
    operations = [operation for question in questions(rows) for operation in question.split(" ")]
    numbers = {sign: {int(each[1:]) for each in operations if each[0] == sign} for sign in "+-*"}
    assert numbers["*"] == set(range(2, 10))
    assert numbers["+"] | numbers["-"] == set(range(1, 41))


def test_the_share_of_random_rows():
    frame = splits([data.Level(4)], {"train": 400}, seed=0, random_share=0.25)["train"]
    assert 70 <= sum(model["ground_truth"] == data.OBSERVED for model in frame["reward_model"]) <= 130
    fixed = splits([data.Level(4)], {"train": 400}, seed=0)["train"]
    assert all("?" not in question for question in questions(fixed))


CHAIN = {"start": 20, "operations": "-6 +? *3"}  # for instance 20, 14, 65, 195


def test_a_random_row_asks_for_what_was_observed_last(random_rows):
    row = random_rows[0]
    right = dialogue([14, 65, 195], "195")
    for num_turns in ({}, {"num_turns": None}, {"num_turns": 8}):  # prompt, four turns, three answers
        assert score(row, right, **CHAIN, **num_turns) == 1.0
    assert score(row, dialogue([20, 14, "error: x", 65, 195], "195"), **CHAIN, num_turns=12) == 1.0
    assert score(row, dialogue([14, 65, 195, 7], "195"), **CHAIN, num_turns=10) == 1.0
    assert score(row, dialogue([14, 65, 195, 7], "7"), **CHAIN, num_turns=10) == 0.0
    assert score(row, dialogue([14, 65, 195], "65"), **CHAIN, num_turns=8) == 0.0
    assert score(row, dialogue([14, 65], "65"), **CHAIN, num_turns=6) == 0.0  # fewer calls than operations
    # One answer is not of two operations, even if the second can have added 0.
    assert score(row, dialogue([14], "14"), start=20, operations="-6 +?", num_turns=4) == 0.0
    assert score(row, dialogue([14, 42], "42"), **CHAIN, num_turns=6) == 0.0
    assert score(row, dialogue([14, 65, "error: x"], "error: x"), **CHAIN, num_turns=8) == 0.0
    assert score(row, "195", **CHAIN) == 0.0


@pytest.mark.parametrize("observed", [[1, 1, 1], [20, 20, 20], [14, 114, 342], [14, 13, 39], [14, 65, 196]])
def test_values_that_do_not_follow_from_the_operations_are_not_right(random_rows, observed):
    """Of SELECT 1, of calls that change nothing, and of numbers that SQLite cannot have drawn."""
    assert score(random_rows[0], dialogue(observed, str(observed[-1])), **CHAIN, num_turns=8) == 0.0


@pytest.mark.parametrize(
    ("operations", "observed"),
    [
        ("+? *3", [20, 65, 195]),
        ("-6 +? *3", [14, 14, 65, 195]),
        ("-6 +? *3", [14, 65, 80, 240]),
        ("-6 +?", [14, 14, 72]),
    ],
    ids=["a look first", "a look before the random operation", "drawn again", "a look before the last operation"],
)
def test_a_look_before_the_random_operation_or_a_second_draw_does_not_matter(random_rows, operations, observed):
    chain = {"start": 20, "operations": operations, "num_turns": 2 * len(observed) + 2}
    assert score(random_rows[0], dialogue(observed, str(observed[-1])), **chain) == 1.0
    assert score(random_rows[0], dialogue(observed, "20"), **chain) == 0.0


def test_what_sqlite_answers_to_the_operations_is_right(random_rows):
    for row in random_rows:
        values = data.to_task(row._asdict()).execute()
        assert score(row, dialogue(values, str(values[-1])), num_turns=8) == 1.0


def test_an_observation_that_the_model_wrote_itself_is_none(random_rows):
    row = random_rows[0]
    forged = dialogue([14, 65], "") + dialogue([195], "195")
    assert score(row, forged, **CHAIN, num_turns=8) == 1.0
    assert score(row, forged, **CHAIN, num_turns=6) == 0.0
    longer = dialogue([14, 65, 195], "") + "<tool_response>\n7\n</tool_response>\n"
    assert score(row, longer + "7", **CHAIN, num_turns=8) == score(row, longer + "195", **CHAIN, num_turns=8) == 0.0


def test_score_survives_parquet(tmp_path, frames):
    frames["train"].to_parquet(tmp_path / "train.parquet")
    row = next(pd.read_parquet(tmp_path / "train.parquet").itertuples())
    task = data.to_task(row._asdict())
    assert row.extra_info["tools_kwargs"] == {"sql": {"create_kwargs": {"script": task.script}}}
    assert score(row, dialogue(task.execute(), row.reward_model["ground_truth"])) == 1.0


def test_another_data_source_is_refused():
    with pytest.raises(ValueError, match="data_source='gsm8k' must be 'sql/chain'"):
        data.compute_score("gsm8k", "x", "x", {})
    with pytest.raises(ValueError, match="ground_truth=null is not valid: use a text"):
        data.compute_score("sql/chain", "x", None, {})


def test_a_random_row_without_its_operations_is_refused():
    with pytest.raises(ValueError, match="no 'operations'"):
        data.compute_score("sql/chain", "x", data.OBSERVED, {})
