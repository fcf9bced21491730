"""Generated data sets of both kinds: verl's columns, disjoint seeded splits, rows by weight, and the commands."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import NamedTuple

import pandas as pd
import pytest
from support.commands import invoke

from verl_ext.data import reasoning_gym, sql_tasks
from verl_ext.data.levels import LAST_TRIES, distinct, draw_splits, shares

SIZES = {"train": 64, "validation": 16}
COLUMNS = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def sums(digits, weight=1.0):
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}
    return reasoning_gym.Level("chain_sum", digits, parameters, weight)


@pytest.fixture(params=[reasoning_gym, sql_tasks], ids=["reasoning_gym", "sql_tasks"])
def data(request):
    return request.param


def questions(rows):
    return {row["prompt"][0]["content"] for row in rows}


def test_splits_have_verls_columns_and_share_no_question(data):
    splits = data.splits(data.DEFAULT_LEVELS, SIZES, seed=3)
    for split, rows in splits.items():
        assert [row["extra_info"]["index"] for row in rows] == list(range(SIZES[split]))
        for row in rows:
            assert [column for column in row if column != "agent_name"] == COLUMNS
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["reward_model"]["style"] == "rule" and row["extra_info"]["split"] == split
    train, validation = questions(splits["train"]), questions(splits["validation"])
    assert (len(train), len(validation)) == (64, 16) and not train & validation


def test_the_seed_decides_and_the_global_random_state_is_left_alone(data):
    random.seed(5)
    before = random.getstate()
    first, again, other = (data.splits(data.DEFAULT_LEVELS, SIZES, seed=seed) for seed in (3, 3, 4))
    assert random.getstate() == before
    assert first == again
    assert all(questions(first[split]) != questions(other[split]) for split in SIZES)


def test_levels_get_rows_by_weight_and_are_found_again():
    rows = reasoning_gym.splits([sums(1), sums(2, 3.0), sums(3)], {"train": 50}, seed=0)["train"]
    assert [sum(row["extra_info"]["difficulty"] == digits for row in rows) for digits in (1, 2, 3)] == [10, 30, 10]
    assert reasoning_gym.levels_of([pd.DataFrame(rows)]) == [sums(1), sums(2), sums(3)]
    levels = [sql_tasks.Level(2), sql_tasks.Level(3, weight=3), sql_tasks.Level(4, largest=99)]
    rows = sql_tasks.splits(levels, {"train": 50}, seed=0)["train"]
    assert [sum(row["extra_info"]["length"] == length for row in rows) for length in (2, 3, 4)] == [10, 30, 10]
    assert sql_tasks.levels_of([pd.DataFrame(rows)]) == [levels[0], sql_tasks.Level(3), levels[2]]
    assert shares([sums(1), sums(2), sums(3)], 4) == [2, 1, 1]


@pytest.mark.parametrize(
    ("module", "texts"),
    [
        (reasoning_gym, ["chain_sum:min_digits=2,max_digits=2@3/0", "chain_sum:min_digits=3,max_digits=3@1"]),
        (sql_tasks, ["2@3/0", "3@1"]),
    ],
)
def test_a_level_has_a_weight_of_its_own_in_the_validation_split(module, texts):
    ranks = [(place,) if module is reasoning_gym else () for place in range(len(texts))]
    levels = [module.parse_level(text, *rank) for text, rank in zip(texts, ranks, strict=True)]
    assert [(level.weight, level.validation_weight) for level in levels] == [(3.0, 0.0), (1.0, None)]
    rows = module.splits(levels, {"train": 8, "validation": 8}, seed=0)
    key = "difficulty" if module is reasoning_gym else "length"
    counts = {split: Counter(row["extra_info"][key] for row in rows[split]) for split in rows}
    easy, hard = sorted(counts["train"])
    assert counts == {"train": {easy: 6, hard: 2}, "validation": {hard: 8}}


def test_levels_without_a_validation_prompt_are_refused():
    with pytest.raises(ValueError, match="above 0 in the validation split is needed"):
        sql_tasks.splits([sql_tasks.Level(2, validation_weight=0)], {"validation": 4}, seed=0)


@pytest.mark.parametrize(
    ("total", "counts"),
    [(0, [0, 0, 0]), (1, [0, 1, 0]), (2, [1, 1, 0]), (3, [1, 2, 0]), (5, [1, 3, 1]), (10, [2, 6, 2])],
)
def test_shares_are_the_nearest_whole_numbers(total, counts):
    assert shares([sums(1), sums(2, 3.0), sums(3)], total) == counts


def test_a_question_is_drawn_once_and_none_that_is_excluded():
    assert list(distinct("abacbda", str.upper, {"C"})) == ["a", "b", "d"]


def test_draws_end_after_20_000_in_a_row_without_a_new_question():
    assert LAST_TRIES == 20_000
    repeats = ["a"] * LAST_TRIES
    draws = iter(["a", *repeats, "b", *repeats, "c", *repeats, "a", "d"])
    assert list(distinct(draws, str, ())) == ["a", "b", "c"]
    assert list(draws) == ["d"]  # no draw after the last try


class Letters(NamedTuple):
    """A level whose questions are these letters."""

    letters: str
    weight: float = 1.0
    validation_weight: float | None = None


def split_of(levels, sizes, seed=0):
    def draw(level, exclude):
        return ((letter, {"letter": letter, "extra_info": {}}) for letter in level.letters if letter not in exclude)

    splits = draw_splits(levels, sizes, seed, draw)
    return {split: "".join(row["letter"] for row in rows) for split, rows in splits.items()}


def test_levels_with_common_questions_share_no_row():
    splits = split_of([Letters("abcdefgh"), Letters("abcdefghijkl")], {"train": 8, "validation": 4})
    assert sorted(splits["train"] + splits["validation"]) == list("abcdefghijkl")
    with pytest.raises(ValueError, match=r"level=.*letters='bca'.* has fewer than 3 distinct questions"):
        split_of([Letters("abc"), Letters("bca")], {"train": 4, "validation": 2})


def test_rows_of_all_levels_are_mixed_in_an_order_of_each_seed_and_split():
    levels, sizes = [Letters("abcdefghijkl"), Letters("ABCDEFGHIJKL")], {"one": 12, "other": 12}
    splits = split_of(levels, sizes)
    for rows in splits.values():
        places = [place for place, letter in enumerate(rows) if letter.isupper()]
        assert len(places) == 6 and places not in (list(range(6)), list(range(6, 12)))
    assert splits == split_of(levels, sizes) != split_of(levels, sizes, seed=1)
    first, second = (
        ["abcdefABCDEF".find(letter) for letter in splits["one"]],
        ["ghijklGHIJKL".find(letter) for letter in splits["other"]],
    )
    assert first != second


@pytest.mark.parametrize(
    ("data", "level", "said"),
    [
        (
            reasoning_gym,
            sums(1),
            "level=chain_sum:min_terms=2.*max_digits=1 has fewer than 500",
        ),
        (sql_tasks, sql_tasks.Level(1), "level=1:9 has fewer than 500 distinct questions"),
    ],
)
def test_a_level_with_too_few_questions_is_refused(data, level, said):
    with pytest.raises(ValueError, match=said):
        data.splits([level], {"train": 400, "validation": 100}, seed=0)
    with pytest.raises(ValueError, match="levels: at least one with a weight above 0 in the train split is needed"):
        data.splits([], {"train": 4}, seed=0)


def run(data, *arguments):
    return invoke(data.main, *arguments, columns=400)


@pytest.mark.parametrize(
    ("data", "levels", "counts"),
    [
        (
            reasoning_gym,
            ["chain_sum:min_terms=2,max_terms=2@3", "spell_backward"],
            {"reasoning_gym/chain_sum": 6, "reasoning_gym/spell_backward": 2},
        ),
        (sql_tasks, ["2:99@3", "4"], {"sql/chain": 8}),
    ],
)
def test_the_command_writes_both_splits(data, levels, counts, tmp_path):
    options = [word for level in levels for word in ("--level", level)]
    result = run(data, "--out", tmp_path, "--train", 8, "--validation", 4, *options)
    assert result.exit_code == 0, result.output
    lines = [line.replace("│", " ").split() for line in result.output.splitlines()]
    assert ["train", "8", str(tmp_path / "train.parquet")] in lines
    assert ["validation", "4", str(tmp_path / "validation.parquet")] in lines
    train = pd.read_parquet(tmp_path / "train.parquet")
    assert dict(train["data_source"].value_counts()) == counts
    assert len(pd.read_parquet(tmp_path / "validation.parquet")) == 4
    if data is sql_tasks:
        assert sorted(info["length"] for info in train["extra_info"]) == [2] * 6 + [4] * 2
        assert "class_name: verl_ext.driver.tools.sqlite.SqliteTool" in (tmp_path / "tools.yaml").read_text()


def test_options_of_the_commands_reach_the_rows(tmp_path):
    levels = ["--level", "chain_sum:min_terms=2,max_terms=2", "--level", "spell_backward"]
    suffix = " Answer in <answer> tags."
    sizes = ["--train", 6, "--validation", 2]
    written = {reasoning_gym: [], sql_tasks: []}
    for seed in (0, 1):
        assert run(reasoning_gym, "--out", tmp_path, *sizes, *levels, "--suffix", suffix, "--seed", seed).exit_code == 0
        train = pd.read_parquet(tmp_path / "train.parquet")
        for prompt, info in zip(train["prompt"], train["extra_info"], strict=True):
            assert prompt[0]["content"] == json.loads(info["entry"])["question"] + suffix
        difficulties = {info["task"]: info["difficulty"] for info in train["extra_info"]}
        assert difficulties == {"chain_sum": 1, "spell_backward": 2}
        written[reasoning_gym].append({prompt[0]["content"] for prompt in train["prompt"]})
        assert run(sql_tasks, "--out", tmp_path, *sizes, "--random-share", 1, "--seed", seed).exit_code == 0
        train = pd.read_parquet(tmp_path / "train.parquet")
        assert [truth["ground_truth"] for truth in train["reward_model"]] == [sql_tasks.OBSERVED] * 6
        written[sql_tasks].append({prompt[0]["content"] for prompt in train["prompt"]})
    assert all(first != second for first, second in written.values())


def test_a_split_has_at_least_one_row(data, tmp_path):
    assert run(data, "--out", tmp_path, "--train", 1, "--validation", 1).exit_code == 0
    for split in ("--train", "--validation"):
        refused = run(data, "--out", tmp_path, split, 0)
        assert refused.exit_code == 2 and f"Invalid value for '{split}'" in refused.output
    said = run(data, "--help").output
    assert all(text in said for text in ("Training prompts.", "Validation prompts.", "The same seed gives the same"))


@pytest.mark.parametrize(
    ("data", "level", "said"),
    [
        (reasoning_gym, "no_such_task", "no task named"),
        (reasoning_gym, "chain_sum:min_terms", "key=value"),
        (reasoning_gym, "chain_sum@-1", "weight=-1.0 is not valid"),
        (reasoning_gym, "chain_sum@1/-1", "validation_weight=-1.0 is not valid"),
        (reasoning_gym, "chain_sum@1/x", "could not convert"),
        (
            reasoning_gym,
            "chain_sum:terms=2",
            "parameter of chain_sum=terms is not valid: use one of min_terms",
        ),
        (reasoning_gym, "chain_sum:seed=2", "parameter of chain_sum=seed is not valid"),
        (reasoning_gym, "chain_sum:min_terms=9", "cannot make entries of chain_sum:min_terms=9"),
        (reasoning_gym, "chain_sum:min_terms=two", "cannot make entries of chain_sum:min_terms=two"),
        (reasoning_gym, "spell_backward:min_word_len=50,max_word_len=50", "Cannot choose from an empty sequence"),
        (reasoning_gym, "composite", "Must specify at least one dataset"),
        (reasoning_gym, "graph_color", "graph_color: its verifier does not accept"),
        (sql_tasks, "", "must be of the form"),
        (sql_tasks, "0", "length=0 is not valid"),
        (sql_tasks, "17", "length=17 is not valid"),
        (sql_tasks, "3:0", "largest=0 is not valid"),
        (sql_tasks, "3@-1", "weight=-1.0 is not valid"),
        (sql_tasks, "3@1/-1", "validation_weight=-1.0 is not valid"),
        (sql_tasks, "three", "must be of the form"),
    ],
)
def test_the_command_refuses_in_one_sentence_before_it_works(data, level, said, tmp_path):
    refused = run(data, "--out", tmp_path / "new", "--level", level)
    assert refused.exit_code == 2 and said in refused.output, refused.output
    assert not (tmp_path / "new").exists()


def test_a_file_in_place_of_the_folder_is_refused(data, tmp_path):
    (tmp_path / "file").write_text("")
    refused = run(data, "--out", tmp_path / "file")
    assert refused.exit_code == 2 and "file is a file, name a folder." in refused.output
