"""reasoning-gym data sets: verl's schema, disjoint splits, the real verifier."""

import json

import pandas as pd
import pytest

from verl_ext.data import reasoning_gym as data

SIZES = {"train": 64, "validation": 16}
RIGHT = {"score": 1.0, "acc": 1.0, "timed_out": 0.0, "verifier_error": 0.0}
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
    return splits(data.DEFAULT_LEVELS, SIZES, seed=3)


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


@pytest.mark.parametrize("levels", [data.DEFAULT_LEVELS, SUMS], ids=["spell_backward", "chain_sum"])
def test_verifier_judges(levels):
    for row in splits(levels, {"train": 24}, seed=1)["train"].itertuples():
        truth = row.reward_model["ground_truth"]

        def score(answer, row=row, truth=truth):
            return data.compute_score(row.data_source, answer, truth, row.extra_info, unused=1)

        assert score(truth) == RIGHT
        assert score(f" {truth}\n") == RIGHT
        assert score(f"so <answer>{truth}</answer> it is")["score"] == 1.0
        for wrong in ("", truth + "7", truth[:-1], "Q" + truth, truth + " " + truth):
            assert score(wrong) == RIGHT | {"score": 0.0, "acc": 0.0}, wrong


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 2,248.", "2248"),
        ("$1,234,567.50", "1234567.50"),
        ("(3,4)", "4"),
        ("1,2345", "2345"),
        ("9-234", "234"),
        ("x=-5", "-5"),
        ("is...42", "42"),
        ("none", ""),
    ],
)
def test_the_last_number(text, number):
    assert data.extract_answer(text, "number") == number


def test_last_number_of_a_sentence_counts_on_request():
    row = splits(SUMS[1:2], {"train": 1}, seed=1)["train"].iloc[0]
    truth = row.reward_model["ground_truth"]
    sentence = f"From 1 and 2 follows {truth}."
    assert data.compute_score(row.data_source, sentence, truth, row.extra_info)["score"] == 0.0
    assert data.compute_score(row.data_source, sentence, truth, row.extra_info, extract="number")["score"] == 1.0
    assert data.compute_score(row.data_source, "none", truth, row.extra_info, extract="number")["score"] == 0.0
    with pytest.raises(ValueError, match="extract"):
        data.compute_score(row.data_source, sentence, truth, row.extra_info, extract="guess")


def test_the_parameters_of_the_level_decide_how_exact_an_answer_must_be():
    places = {"min_num_decimal_places": 2, "max_num_decimal_places": 2}
    row = splits([data.Level("decimal_arithmetic", 1, places)], {"train": 1}, seed=1)["train"].iloc[0]
    truth = row.reward_model["ground_truth"]
    for off, right in ((0.005, 1.0), (0.05, 0.0)):
        answer = str(float(truth) + off)
        assert data.compute_score(row.data_source, answer, truth, row.extra_info)["score"] == right


def test_score_survives_parquet(tmp_path, frames):
    frames["train"].to_parquet(tmp_path / "train.parquet")
    row = pd.read_parquet(tmp_path / "train.parquet").iloc[0]
    truth = row.reward_model["ground_truth"]
    assert data.compute_score(row.data_source, truth, truth, row.extra_info)["score"] == 1.0


@pytest.mark.parametrize("source", ["reasoning_gym/no_such_task", "gsm8k", "spell_backward", None])
def test_unknown_data_source_is_refused(source, frames):
    with pytest.raises(ValueError, match="data_source"):
        data.compute_score(source, "x", "x", frames["train"]["extra_info"][0])


def test_row_without_entry_is_refused():
    with pytest.raises(ValueError, match="extra_info"):
        data.compute_score("reasoning_gym/chain_sum", "1", "1", {})
    with pytest.raises(ValueError, match="extra_info"):
        data.compute_score("reasoning_gym/chain_sum", "1", "1", {"entry": None})
