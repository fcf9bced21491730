"""verl's row schema: rows are checked, and written whole or not at all."""

from __future__ import annotations

import os

import pyarrow.parquet as pq
import pytest

from verl_ext.data.schema import faults, is_readable, make_row, number_rows, write_rows


def rows(*questions, **extra):
    made = [make_row("sums", question, "2", ability="sums", **extra) for question in questions]
    number_rows(made, "train")
    return made


def asked(path):
    return [row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()]


def test_a_file_is_replaced_and_never_written_into(tmp_path):
    train = tmp_path / "out" / "train.parquet"
    write_rows(train, rows("1+1="))
    os.link(train, tmp_path / "opened.parquet")  # stands for a reader with the file already open
    write_rows(train, rows("2+0=", "0+2="))
    assert asked(train) == ["2+0=", "0+2="]
    assert asked(tmp_path / "opened.parquet") == ["1+1="]
    assert [path.name for path in train.parent.iterdir()] == ["train.parquet"]


def test_faulty_rows_are_refused_and_the_file_stays(tmp_path):
    train = tmp_path / "train.parquet"
    write_rows(train, rows("1+1="))
    with pytest.raises(ValueError, match="an empty prompt, in 1 rows; a prompt that another row has, in 2 rows"):
        write_rows(train, rows(" ", "2+0=", "2+0=", "2+0="))
    assert asked(train) == ["1+1="]
    assert faults([]) == {"no row at all": 1}


def test_an_empty_system_message_and_content_in_parts_are_no_fault():
    found = rows("1+1=", system="")
    found[0]["prompt"].append({"role": "user", "content": [{"type": "text", "text": "2+2="}]})
    assert not faults(found)


@pytest.mark.parametrize(("ability", "found"), [("math", 1), ("science", 1), ("sums", 0)])
def test_math_verify_must_read_the_answers_that_it_judges(ability, found):
    row = make_row("sums", "How many dollars?", "$", ability=ability)
    number_rows([row], "train")
    assert faults([row])["a ground truth that math-verify cannot read"] == found


@pytest.mark.parametrize("truth", [["1", "2"], {"answer": "1"}, b"1"])
def test_math_verify_judges_by_a_text_or_a_number(truth):
    row = make_row("sums", "1+1=", "2", ability="math")
    number_rows([row], "train")
    assert not faults([row | {"reward_model": {"ground_truth": 2.0}}])
    row["reward_model"]["ground_truth"] = truth
    assert list(faults([row])) == ["ground_truth: use a text or a number"]
    assert "ground_truth: use a text or a number" not in faults([row | {"ability": "code"}])


def test_math_verify_reads_each_answer_of_a_large_file_once(monkeypatch):
    """Rows are checked when they are read, and again when they are written."""
    read = []
    monkeypatch.setattr("math_verify.parse", lambda answer: read.append(answer) or [answer])
    for _ in range(2):
        assert all(is_readable(f"{number} apples") for number in range(70_000))
    assert len(read) == 70_000
    is_readable.cache_clear()


def test_a_row_with_tools_is_for_the_tool_agent():
    (row,) = rows("1+1=", tools={"sql": {"script": "SELECT 2"}})
    assert row["agent_name"] == "tool_agent" and row["extra_info"]["need_tools_kwargs"] is True
    assert row["extra_info"]["tools_kwargs"] == {"sql": {"create_kwargs": {"script": "SELECT 2"}}}
