"""The table of a first run, and the continuation from it."""

from __future__ import annotations

import json

import pytest

from verl_ext.checks import InvalidValue
from verl_ext.first_run.table import FAILED, NOT_TRIED, PASSED, Results, Row, to_markdown, to_table

SETTING = {"hardware": "cpu", "nodes": 1}
ROWS = [
    Row("shared memory", PASSED, "10.7 GB", 0.2),
    Row("grpo, sync", PASSED, "", 61.4, 12.345),
    Row("vip, sync", PASSED, "", 61.4, 12.345, 20.12e9, 22.38e9),
    Row("pods, sync", FAILED, "a | b (run.log)", 3.0),
    Row("pods, separate_async", NOT_TRIED, "one GPU"),
]


def test_markdown_has_a_line_per_row():
    assert to_markdown(ROWS, "hardware=cpu").splitlines() == [
        "hardware=cpu",
        "",
        "| what | result | seconds | rollouts/s | peak GB per GPU | predicted GB |",
        "| --- | --- | --- | --- | --- | --- |",
        "| shared memory | passed: 10.7 GB | 0 | – | – | – |",
        "| grpo, sync | passed | 61 | 12.3 | not measured | – |",
        "| vip, sync | passed | 61 | 12.3 | 20.1 | 22.4 |",
        r"| pods, sync | failed: a \| b (run.log) | 3 | – | – | – |",
        "| pods, separate_async | not tried: one GPU | – | – | – | – |",
    ]
    assert [row[0] for row in to_table(ROWS, "First run").rows] == [row.what for row in ROWS]


def test_a_second_start_knows_what_has_passed(tmp_path):
    first = Results(tmp_path, SETTING)
    first.set_checks([Row("nodes in Ray", FAILED, "too few"), Row("shared memory", FAILED, "0.06 GB")])
    for row in ROWS[1:]:
        assert not first.passed(row.what)
        first.add_training(row)
    second = Results(tmp_path, SETTING)
    assert second.rows == ROWS[1:]
    assert [row.what for row in ROWS if second.passed(row.what)] == ["grpo, sync", "vip, sync"]
    second.set_checks(ROWS[:1])
    assert second.rows == ROWS
    mended = Row("pods, sync", PASSED, "", 60.0, 1.0)
    second.add_training(mended)
    assert second.rows == [*ROWS[:3], mended, ROWS[4]]
    assert Results(tmp_path, SETTING).rows == [*ROWS[1:3], mended, ROWS[4]]
    assert "| pods, sync | passed | 60 | 1.0 |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "rows.json").read_text())["setting"] == SETTING


def test_rows_of_another_setting_are_not_continued(tmp_path):
    Results(tmp_path, SETTING).add_training(ROWS[1])
    with pytest.raises(InvalidValue, match=r"^nodes=2 is not valid: .* holds a first run with 1, use another --out$"):
        Results(tmp_path, SETTING | {"nodes": 2})
    with pytest.raises(InvalidValue, match=r"^model=m is not valid: .* holds a first run with None, use another"):
        Results(tmp_path, SETTING | {"model": "m"})  # rows of a version that did not ask for the model
