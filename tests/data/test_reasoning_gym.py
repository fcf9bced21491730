"""reasoning-gym data sets: verl's schema, disjoint splits, the real verifier."""

import json
import random

import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_ext.data import reasoning_gym as data
from verl_ext.data.levels import shares

SIZES = {"train": 64, "validation": 16}
SUMS = [
    data.Level("chain_sum", digits, {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits})
    for digits in (1, 2, 3)
]


def splits(*arguments, **options):
    """The rows of each split as a data frame."""
    return {split: pd.DataFrame(rows) for split, rows in data.splits(*arguments, **options).items()}


def questions(frame):
    return {json.loads(info["entry"])["question"] for info in frame["extra_info"]}


@pytest.fixture(scope="module")
def frames():
    return splits(data.QUICKSTART, SIZES, seed=3)


def test_rows_have_the_columns_verl_reads(frames):
    for split, frame in frames.items():
        assert list(frame.columns) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
        assert len(frame) == SIZES[split]
        assert [info["index"] for info in frame["extra_info"]] == list(range(SIZES[split]))
        for row in frame.itertuples():
            assert row.data_source == "reasoning_gym/spell_backward"
            assert row.ability == "algorithmic"
            assert [message["role"] for message in row.prompt] == ["user"]
            assert row.reward_model["style"] == "rule"
            assert row.extra_info["split"] == split
            assert row.prompt[0]["content"].endswith(row.reward_model["ground_truth"][::-1])
            assert row.extra_info["difficulty"] == len(row.reward_model["ground_truth"])


def test_levels_get_rows_by_weight(frames):
    heavy = [
        data.Level(level.task, level.difficulty, level.parameters, 1 + 2 * (level.difficulty == 2)) for level in SUMS
    ]
    frame = splits(heavy, {"train": 50}, seed=0)["train"]
    assert [sum(info["difficulty"] == rank for info in frame["extra_info"]) for rank in (1, 2, 3)] == [10, 30, 10]
    assert shares(SUMS, 4) == [2, 1, 1]


def test_splits_share_no_question(frames):
    train, validation = questions(frames["train"]), questions(frames["validation"])
    assert len(train) == 64 and len(validation) == 16
    assert not train & validation


def test_same_seed_same_rows(frames):
    again = splits(data.QUICKSTART, SIZES, seed=3)
    other = splits(data.QUICKSTART, SIZES, seed=4)
    for split in SIZES:
        pd.testing.assert_frame_equal(frames[split], again[split])
        assert questions(frames[split]) != questions(other[split])


def test_global_random_state_is_left_alone():
    random.seed(5)
    before = random.getstate()
    splits(SUMS, {"train": 6}, seed=0)
    assert random.getstate() == before


@pytest.mark.parametrize("levels", [data.QUICKSTART, SUMS], ids=["spell_backward", "chain_sum"])
def test_verifier_judges(levels):
    for row in splits(levels, {"train": 24}, seed=1)["train"].itertuples():
        truth = row.reward_model["ground_truth"]

        def score(answer, row=row, truth=truth):
            return data.compute_score(row.data_source, answer, truth, row.extra_info, unused=1)

        assert score(truth) == {"score": 1.0, "acc": 1.0}
        assert score(f" {truth}\n") == {"score": 1.0, "acc": 1.0}
        assert score(f"so <answer>{truth}</answer> it is")["score"] == 1.0
        for wrong in ("", truth + "7", truth[:-1], "Q" + truth, truth + " " + truth):
            assert score(wrong) == {"score": 0.0, "acc": 0.0}, wrong


def test_last_number_of_a_sentence_counts_on_request():
    row = splits(SUMS[1:2], {"train": 1}, seed=1)["train"].iloc[0]
    truth = row.reward_model["ground_truth"]
    sentence = f"From 1 and 2 follows {truth}."
    assert data.compute_score(row.data_source, sentence, truth, row.extra_info)["score"] == 0.0
    assert data.compute_score(row.data_source, sentence, truth, row.extra_info, extract="number")["score"] == 1.0
    assert data.compute_score(row.data_source, "none", truth, row.extra_info, extract="number")["score"] == 0.0
    with pytest.raises(ValueError, match="extract"):
        data.compute_score(row.data_source, sentence, truth, row.extra_info, extract="guess")


def test_score_survives_parquet(tmp_path, frames):
    frames["train"].to_parquet(tmp_path / "train.parquet")
    row = pd.read_parquet(tmp_path / "train.parquet").iloc[0]
    truth = row.reward_model["ground_truth"]
    assert data.compute_score(row.data_source, truth, truth, row.extra_info)["score"] == 1.0


@pytest.mark.parametrize("source", ["reasoning_gym/no_such_task", "gsm8k", "spell_backward"])
def test_unknown_data_source_is_refused(source, frames):
    with pytest.raises(ValueError, match="data_source"):
        data.compute_score(source, "x", "x", frames["train"]["extra_info"][0])


def test_row_without_entry_is_refused():
    with pytest.raises(ValueError, match="extra_info"):
        data.compute_score("reasoning_gym/chain_sum", "1", "1", {})


def test_level_with_too_few_questions_is_refused():
    with pytest.raises(ValueError, match="fewer than 500 distinct questions"):
        splits(SUMS[:1], {"train": 400, "validation": 100}, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("no_such_task", "no task named"), ("chain_sum:min_terms", "key=value"), ("chain_sum@-1", "weight")],
)
def test_bad_level_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        data.parse_level(text, 1)


def test_levels_are_found_again_in_the_data(frames):
    found = data.levels_of(list(frames.values()))
    assert [(level.task, level.difficulty, level.parameters) for level in found] == [
        (level.task, level.difficulty, level.parameters) for level in data.QUICKSTART
    ]


def test_command_line_writes_both_splits(tmp_path):
    app = data.typer.Typer()
    app.command()(data.main)
    levels = ["--level", "chain_sum:min_terms=2,max_terms=2@3", "--level", "spell_backward"]
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--train", "8", "--validation", "4", *levels])
    assert result.exit_code == 0, result.output
    train = pd.read_parquet(tmp_path / "train.parquet")
    assert sorted(train["data_source"].value_counts().items()) == [
        ("reasoning_gym/chain_sum", 6),
        ("reasoning_gym/spell_backward", 2),
    ]
    assert len(pd.read_parquet(tmp_path / "validation.parquet")) == 4
