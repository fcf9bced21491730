"""Selection of the problems that a model solves in less than a given share of its rollouts."""

from __future__ import annotations

import json
from functools import partial

import pytest
from pyarrow import Table, parquet
from support.commands import flat, invoke

from verl_ext.data.schema import sha256
from verl_ext.evaluation import curate
from verl_ext.evaluation.samples import note_rows, row_problems

run = partial(invoke, curate.main)


@pytest.fixture
def sampled(tmp_path):
    """Four problems of which the model solved 0, 5, 6 and 8 of 8."""
    rows = [
        {
            "data_source": "ace_reason_math",
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number, "id": f"id{number}"},
        }
        for number in range(4)
    ]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "data.parquet")
    (tmp_path / "pass_rates").mkdir()
    with open(tmp_path / "pass_rates/0.jsonl", "w") as file:
        for row, (problem, _), solved in zip(rows, row_problems(tmp_path / "data.parquet"), (0, 5, 6, 8), strict=True):
            for sample in range(9):  # the ninth is one too many, and always right
                score = float(sample < solved or sample == 8)
                line = {"input": f"user\n{row['prompt'][0]['content']}", "output": "", "gts": "1", "score": score}
                file.write(json.dumps({**line, "uid": f"{problem}_{sample}_0", "prompt_id": problem}) + "\n")
    return tmp_path


def test_problems_of_a_pass_rate_of_75_percent_and_more_are_excluded(sampled):
    out = sampled / "subset.parquet"
    result = run(sampled / "data.parquet", "--samples", sampled / "pass_rates", "--out", out)
    assert result.exit_code == 0, result.output
    rows = parquet.read_table(out).to_pylist()
    assert [(row["extra_info"]["id"], row["extra_info"]["pass_rate"]) for row in rows] == [("id0", 0.0), ("id1", 0.625)]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert "subset.parquet: 2 problems; 2 left out, with a pass rate of at least 0.75" in flat(result)
    account = json.loads(out.with_suffix(".json").read_text())
    assert account["left_out"] == {"pass rate of at least 0.75": 2}
    assert account["read"] == {"file": "data.parquet", "rows": 4, "sha256": sha256(sampled / "data.parquet")}
    assert account["samples"] == {"files": {"0.jsonl": sha256(sampled / "pass_rates/0.jsonl")}, "rollouts": 8}


def test_a_pass_rate_of_scores_of_minus_1_and_1_is_the_share_of_correct_samples(sampled):
    """The mean score of the problem with 6 of 8 correct samples is 0.5."""
    path = sampled / "pass_rates/0.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "score": 2 * line["score"] - 1}) + "\n" for line in lines))
    out = sampled / "subset.parquet"
    result = run(sampled / "data.parquet", "--samples", sampled / "pass_rates", "--out", out)
    assert result.exit_code == 0, result.output
    rows = parquet.read_table(out).to_pylist()
    assert [(row["extra_info"]["id"], row["extra_info"]["pass_rate"]) for row in rows] == [("id0", 0.0), ("id1", 0.625)]


def test_data_with_a_repeated_row_are_refused(sampled):
    rows = parquet.read_table(sampled / "data.parquet").to_pylist()
    parquet.write_table(Table.from_pylist([*rows, rows[1], rows[1]]), sampled / "data.parquet")
    result = run(sampled / "data.parquet", "--samples", sampled / "pass_rates", "--out", sampled / "subset.parquet")
    assert result.exit_code == 2 and "holds 2 rows that repeat another; prepare it again." in flat(result)
    assert not (sampled / "subset.parquet").exists()


def test_an_out_that_cannot_be_a_file_is_refused_before_work(sampled):
    for out in (sampled, sampled / "data.parquet" / "subset.parquet"):
        result = run("/none.parquet", "--samples", sampled / "pass_rates", "--out", out)
        assert result.exit_code == 2 and "name a f" in " ".join(result.output.replace("│", " ").split())


def test_problems_without_samples_count_as_never_solved_and_are_named(sampled):
    note_rows(sampled / "pass_rates", {problem: 1 for problem in row_problems(sampled / "data.parquet")})
    lines = [json.loads(text) for text in (sampled / "pass_rates/0.jsonl").read_text().splitlines()]
    (sampled / "pass_rates/0.jsonl").unlink()
    text = "".join(json.dumps({**line, "data_source": "ace_reason_math"}) + "\n" for line in lines[:27])
    (sampled / "pass_rates/000000_9.jsonl").write_text(text)
    result = run(sampled / "data.parquet", "--samples", sampled / "pass_rates", "--out", sampled / "subset.parquet")
    assert result.exit_code == 0, result.output
    assert "pass_rates: 1 of 4 problems have no sample at all" in flat(result)
    assert len(parquet.read_table(sampled / "subset.parquet")) == 3


@pytest.mark.parametrize("columns", [["extra_info"], ["extra_info", "ability"]])
def test_columns_that_verl_does_not_need_may_be_missing(sampled, columns):
    path = sampled / "data.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(columns), path)
    result = run(path, "--samples", sampled / "pass_rates", "--out", sampled / "subset.parquet")
    assert result.exit_code == 0, result.output
    rows = parquet.read_table(sampled / "subset.parquet").to_pylist()
    assert [row["extra_info"] for row in rows] == [{"index": 0, "pass_rate": 0.0}, {"index": 1, "pass_rate": 0.625}]


def test_all_samples_of_a_problem_can_be_in_its_pass_rate_and_a_limit_below_all_of_them_is_refused(sampled):
    arguments = (sampled / "data.parquet", "--samples", sampled / "pass_rates", "--out", sampled / "subset.parquet")
    assert run(*arguments, "--rollouts", 9).exit_code == 0
    rows = parquet.read_table(sampled / "subset.parquet").to_pylist()
    assert [row["extra_info"]["pass_rate"] for row in rows] == pytest.approx([1 / 9, 6 / 9])
    result = run(*arguments, "--rollouts", 9, "--below", 0.1)
    assert "below=0.1 leaves no problem; the lowest pass rate is 0.111111." in flat(result)


def test_an_evaluation_that_is_not_over_is_refused(sampled):
    lines = (sampled / "pass_rates/0.jsonl").read_text().splitlines()
    (sampled / "pass_rates/0.jsonl").write_text("\n".join(lines[:27]) + "\n")
    result = run(sampled / "data.parquet", "--samples", sampled / "pass_rates", "--out", sampled / "subset.parquet")
    assert result.exit_code == 2
    assert "has 8 samples for 3 of the 4 problems" in " ".join(result.output.replace("│", " ").split())
    assert not (sampled / "subset.parquet").exists()
