"""The subset of problems that a model solves in less than a share of its rollouts."""

from __future__ import annotations

import json

import pytest
from pyarrow import Table, parquet
from typer.testing import CliRunner

from verl_ext.data import curate
from verl_ext.evaluation.benchmark import read

typer = pytest.importorskip("typer")


def run(*arguments: object):
    app = typer.Typer()
    app.command()(curate.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


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
    problems, _ = read([tmp_path / "data.parquet"])
    with open(tmp_path / "responses.jsonl", "w") as file:
        for key, solved in zip(problems, (0, 5, 6, 8), strict=True):
            for sample in range(9):  # the ninth is one too many, and always right
                accuracy = float(sample < solved or sample == 8)
                line = {
                    "problem": key,
                    "sample": sample,
                    "accuracy": accuracy,
                    "answer": None,
                    "cut": False,
                    "tokens": 3,
                }
                file.write(json.dumps(line) + "\n")
    return tmp_path


def test_problems_of_a_pass_rate_of_75_percent_and_more_are_excluded(sampled):
    out = sampled / "subset.parquet"
    result = run(sampled / "data.parquet", "--samples", sampled / "responses.jsonl", "--out", out)
    assert result.exit_code == 0, result.output
    rows = parquet.read_table(out).to_pylist()
    assert [(row["extra_info"]["id"], row["extra_info"]["pass_rate"]) for row in rows] == [("id0", 0.0), ("id1", 0.625)]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    account = json.loads(out.with_suffix(".json").read_text())
    assert account["left_out"] == {"pass rate of at least 0.75": 2} and account["samples"]["rollouts"] == 8


def test_an_evaluation_that_is_not_over_is_refused(sampled):
    lines = (sampled / "responses.jsonl").read_text().splitlines()
    (sampled / "responses.jsonl").write_text("\n".join(lines[:30]) + "\n")
    result = run(
        sampled / "data.parquet", "--samples", sampled / "responses.jsonl", "--out", sampled / "subset.parquet"
    )
    assert result.exit_code == 2
    assert "has 8 samples for 3 of the 4 problems" in " ".join(result.output.replace("│", " ").split())
    assert not (sampled / "subset.parquet").exists()
