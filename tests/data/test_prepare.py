"""Data sets from small files in their own formats; a server on this machine stands in for the hub."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from pyarrow import Table, parquet
from support.commands import flat, invoke
from support.hub import Hub, serving

from verl_ext.data import prepare as command
from verl_ext.data.catalog import CATALOG, PROMPTS
from verl_ext.prompts import prompt_id

DAPO = PROMPTS["answer_line"]
ROWS = {
    "polaris": [{"problem": "1+1?", "answer": "2", "difficulty": "3/8"}, {"problem": "x?", "answer": "\\frac{1}{2}"}],
    "deepmath": [{"question": f"{n}+1?", "final_answer": str(n + 1), "difficulty": 5.0} for n in range(504)]
    + [{"question": f"Is {n} odd?", "final_answer": answer} for n, answer in enumerate(("Yes", "\\text{No}", "no."))],
    "dapo_math": [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": DAPO.format(question=f"{n} {{x}}?"), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"uuid-{n}"},
        }
        for n in range(3)
    ]
    * 100,
    "math12k": [{"problem": "a?", "answer": "3\\sqrt{13}"}, {"problem": "b?", "answer": "\\left(3, 4\\right)"}],
    "ace_reason_math": [
        {"problem": "c?", "answer": "$"},
        {"problem": "a?", "answer": "7"},
        {"problem": "b?", "answer": ""},
    ],
    "deepscaler": [
        {"problem": "Is a?", "answer": "7", "solution": "so"},
        {"problem": " Is\n  a?\n", "answer": "8"},
    ],
    "aime24": [{"id": 60, "problem": "a?", "solution": "s", "answer": "204", "url": "u", "year": "2024"}],
    "aime25": [{"problem": "a?", "answer": "70", "id": "0"}],
    "amc23": [{"id": 0, "question": "a?", "answer": 27.0, "url": "u"}],
    "math500": [{"problem": "a?", "solution": "s", "answer": "p - q", "level": 3, "unique_id": "test/algebra/1.json"}],
    "minerva": [{"question": "a?", "answer": "4.5e33"}],
    "olympiadbench": [
        {"id": 1, "question": "a?", "final_answer": ["$2$"]},
        {"id": 2, "question": "b?", "final_answer": ["$1$", "$-1$"]},
        {"id": 3, "question": "c?", "final_answer": None},
    ],
    "gpqa": [
        {
            "Record ID": f"rec{n}",
            "Question": f"Which, {n}?",
            "Correct Answer": "right\n",
            **{f"Incorrect Answer {k}": f"wrong {k}" for k in (1, 2, 3)},
            "Explanation": "long",
        }
        for n in range(8)
    ],
}
WRITTEN = {name: len(rows) for name, rows in ROWS.items()} | {
    "deepmath": 4,
    "dapo_math": 3,
    "ace_reason_math": 1,
    "deepscaler": 1,
    "olympiadbench": 2,
}
DRAWN = ("deepmath", "gpqa")  # their first rows depend on the seed
FIRST = {  # ground truth and original id of the first row of each other data set
    "polaris": ("2", ""),
    "dapo_math": ("0", ""),
    "math12k": ("3\\sqrt{13}", ""),
    "ace_reason_math": ("7", ""),
    "deepscaler": ("7", ""),
    "aime24": ("204", "60"),
    "aime25": ("70", "0"),
    "amc23": ("27", "0"),
    "math500": ("p - q", "test/algebra/1.json"),
    "minerva": ("4.5e33", ""),
    "olympiadbench": ("2", ""),
}


def store(name: str, folder: Path) -> Path:
    """The rows in the data set's format on the hub."""
    suffix = Path(CATALOG[name].files[0]).suffix
    path = folder / f"{name}{suffix}"
    if suffix == ".parquet":
        parquet.write_table(Table.from_pylist(ROWS[name]), path)
    elif suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ROWS[name][0])
            writer.writeheader()
            writer.writerows(ROWS[name])
    else:
        lines = "\n".join(json.dumps(row) for row in ROWS[name])
        path.write_text(lines if suffix == ".jsonl" else json.dumps(ROWS[name]))
    return path


run = partial(invoke, command.main)


def prepared(name: str, folder: Path, *arguments: object) -> list[dict]:
    result = run(name, "--out", folder / "out", "--local", store(name, folder), *arguments)
    assert result.exit_code == 0, result.output
    return parquet.read_table(folder / "out" / f"{CATALOG[name].file}.parquet").to_pylist()


@pytest.mark.parametrize("name", CATALOG)
def test_every_data_set_becomes_verls_schema(name, tmp_path):
    rows = prepared(name, tmp_path)
    assert len(rows) == WRITTEN[name]
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    assert {row["extra_info"]["split"] for row in rows} == {CATALOG[name].split}
    assert len({row["extra_info"]["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["data_source"] == name and row["reward_model"]["style"] == "rule"
        assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].endswith("within \\boxed{}.")
        identity = prompt_id(row["data_source"], row["prompt"], row["reward_model"]["ground_truth"])
        assert row["extra_info"]["prompt_id"] == identity
    first = rows[0]["reward_model"]["ground_truth"], rows[0]["extra_info"]["original_id"]
    assert name in DRAWN or first == FIRST[name]
    written = tmp_path / "out" / f"{CATALOG[name].file}.parquet"
    assert run("--check", written).exit_code == 0
    account = json.loads(written.with_suffix(".json").read_text())
    assert account["sha256"] == hashlib.sha256(written.read_bytes()).hexdigest()
    (file,) = account["read"]["files"]
    assert file["sha256"] == hashlib.sha256((tmp_path / file["file"]).read_bytes()).hexdigest()
    assert account["read"]["rows"] == file["rows_read"] == len(ROWS[name])
    held_out = 500 if name == "deepmath" else 0
    assert account["rows"] + held_out + sum(account["left_out"].values()) == len(ROWS[name])


@pytest.mark.parametrize("name", ["deepscaler", "math12k"])
def test_a_file_that_is_read_is_not_overwritten(name, tmp_path, monkeypatch):
    """By default, the files are written into the working directory."""
    monkeypatch.chdir(tmp_path)
    path = store(name, tmp_path).rename(tmp_path / f"{CATALOG[name].file}{Path(CATALOG[name].files[0]).suffix}")
    before = path.read_bytes()
    refused = run(name, "--local", path.name)
    assert refused.exit_code == 2 and f"--out .: {path.name} is read, and would be overwritten" in flat(refused)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_was_left_out_is_counted_by_reason(tmp_path):
    for name, left_out in {
        "deepmath": {"yes/no question": 3},
        "dapo_math": {"repeated question": 297},
        "ace_reason_math": {"an answer math-verify cannot read": 1, "no answer": 1},
        "deepscaler": {"repeated question, with another answer": 1},
    }.items():
        result = run(name, "--local", store(name, tmp_path), "--out", tmp_path / "out")
        assert all(f"{count} x {reason}" in flat(result) for reason, count in left_out.items())
        account = json.loads((tmp_path / "out" / f"{CATALOG[name].file}.json").read_text())
        assert account["left_out"] == left_out


def test_answers_and_questions_are_taken_as_math_verify_and_the_paper_want_them(tmp_path):
    assert [row["reward_model"]["ground_truth"] for row in prepared("olympiadbench", tmp_path)] == ["2", "1, -1"]
    rows = prepared("dapo_math", tmp_path, "--prompt", "boxed")
    assert rows[2]["prompt"][0]["content"].startswith("2 {x}?\n\nPlease reason")


def test_another_prompt_gets_a_file_of_its_own_and_keeps_the_ids(tmp_path):
    rows = prepared("math12k", tmp_path)
    path = tmp_path / "math12k.parquet"
    assert run("math12k", "--local", path, "--out", tmp_path / "out", "--prompt", "think_answer").exit_code == 0
    other = parquet.read_table(tmp_path / "out" / "math12k_think_answer.parquet").to_pylist()
    assert [row["extra_info"]["id"] for row in other] == [row["extra_info"]["id"] for row in rows]
    assert "<think>" in other[0]["prompt"][0]["content"]


def test_dapos_own_prompt_is_the_one_that_was_taken_off(tmp_path):
    path = store("dapo_math", tmp_path)
    assert run("dapo_math", "--local", path, "--out", tmp_path / "out", "--prompt", "answer_line").exit_code == 0
    rows = parquet.read_table(tmp_path / "out" / "dapo_math_17k_answer_line.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == [
        row["prompt"][0]["content"] for row in ROWS["dapo_math"][:3]
    ]


FIGURE_4 = """Solve the following math problem step by step. The last line of your
response should be of the form Answer: $Answer (without quotes)
where $Answer is the answer to the problem. Do not wrap $Answer with
\\boxed{ }.

current question: {{question}}

Below are two examples for format reference.
Example question 1: Solve for x: 3x - 5 = 16.

Response:
Add 5 to both sides: 3x = 21.
Divide both sides by 3: x = 7.
Answer: 7

Solve the current question. Remember to put your answer on its own line
after "Answer:"."""


def test_the_worked_example_is_the_figure_of_the_paper(tmp_path):
    path = store("dapo_math", tmp_path)
    assert run("dapo_math", "--local", path, "--out", tmp_path / "out", "--prompt", "worked_example").exit_code == 0
    rows = parquet.read_table(tmp_path / "out" / "dapo_math_17k_worked_example.parquet").to_pylist()
    text = rows[1]["prompt"][0]["content"]
    assert text.split() == FIGURE_4.replace("{{question}}", "1 {x}?").split()  # the figure's lines are wrapped
    assert text.split("\n")[7:11] == FIGURE_4.split("\n")[10:14]  # the example's lines are not joined


def test_options_are_in_a_seeded_order_and_the_letter_names_the_right_one(tmp_path):
    rows = prepared("gpqa", tmp_path)
    for row in rows:
        letter = row["reward_model"]["ground_truth"]
        assert f"\n{letter}) right\n" in row["prompt"][0]["content"]
        assert "\n\nAnswer with the letter of the right option.\n\nPlease reason" in row["prompt"][0]["content"]
    assert len({row["reward_model"]["ground_truth"] for row in rows}) > 1
    assert prepared("gpqa", tmp_path) == rows
    other = prepared("gpqa", tmp_path, "--seed", 1)
    assert other != rows
    assert [row["extra_info"]["id"] for row in other] == [row["extra_info"]["id"] for row in rows]


def test_held_out_problems_are_a_validation_set_and_in_no_training(tmp_path):
    rows = prepared("deepmath", tmp_path)
    test = parquet.read_table(tmp_path / "out" / "deepmath_103k_test.parquet").to_pylist()
    assert (len(rows), len(test)) == (4, 500)
    assert {row["extra_info"]["split"] for row in test} == {"validation"}
    assert not {row["extra_info"]["id"] for row in rows} & {row["extra_info"]["id"] for row in test}
    other = prepared("deepmath", tmp_path, "--seed", 1)
    assert {row["extra_info"]["id"] for row in other} != {row["extra_info"]["id"] for row in rows}
    parquet.write_table(Table.from_pylist(ROWS["deepmath"][:500]), tmp_path / "few.parquet")
    result = run("deepmath", "--local", tmp_path / "few.parquet", "--out", tmp_path / "few")
    assert result.exit_code == 2 and "500 problems are left, and more than 500 are needed" in flat(result)


def test_the_same_files_give_the_same_bytes_and_a_limit_is_noted(tmp_path):
    prepared("polaris", tmp_path)
    first = (tmp_path / "out" / "polaris_53k.parquet").read_bytes()
    prepared("polaris", tmp_path)
    assert (tmp_path / "out" / "polaris_53k.parquet").read_bytes() == first
    assert len(prepared("polaris", tmp_path, "--limit", 1)) == 1
    assert json.loads((tmp_path / "out" / "polaris_53k.json").read_text())["limit"] == 1
    assert len(prepared("deepmath", tmp_path, "--limit", 3)) == 3
    prepared("ace_reason_math", tmp_path, "--limit", 1)
    account = json.loads((tmp_path / "out" / "ace_reason_math.json").read_text())
    assert (account["rows"], account["read"]["rows"]) == (1, 2)  # the first row is left out and does not count


def test_each_problem_of_a_validation_set_is_repeated(tmp_path):
    prepared("gpqa", tmp_path)
    prepared("gpqa", tmp_path, "--repeat", 3)
    once = parquet.read_table(tmp_path / "out" / "gpqa.parquet").to_pylist()
    rows = parquet.read_table(tmp_path / "out" / "gpqa_repeat3.parquet").to_pylist()
    assert [row["extra_info"]["prompt_id"] for row in rows] == 3 * [row["extra_info"]["prompt_id"] for row in once]
    assert [row["prompt"] for row in rows] == 3 * [row["prompt"] for row in once]
    assert [row["extra_info"]["index"] for row in rows] == list(range(3 * len(once)))
    assert run("--check", tmp_path / "out" / "gpqa_repeat3.parquet").exit_code == 0
    account = json.loads((tmp_path / "out" / "gpqa_repeat3.json").read_text())
    assert (account["repeat"], account["rows"]) == (3, 3 * len(once))
    prepared("gpqa", tmp_path, "--sample", 3, "--repeat", 2)
    assert len(parquet.read_table(tmp_path / "out" / "gpqa_sample3_repeat2.parquet")) == 6


def test_a_sample_is_drawn_from_a_validation_set_with_the_seed(tmp_path, monkeypatch):
    """Knapsack-RL validates on at most 100 random rows of each benchmark."""
    whole = {row["extra_info"]["id"]: row for row in prepared("gpqa", tmp_path)}
    drawn = {}
    for seed in range(40):
        for size in (3, 100):
            prepared("gpqa", tmp_path, "--sample", size, "--seed", seed)
        rows = parquet.read_table(tmp_path / "out" / "gpqa_sample3.parquet").to_pylist()
        drawn[seed] = tuple(row["extra_info"]["index"] for row in rows)
        assert len(set(drawn[seed])) == 3 and list(drawn[seed]) == sorted(drawn[seed])
        assert [whole[row["extra_info"]["id"]]["extra_info"]["index"] for row in rows] == list(drawn[seed])
        everything = parquet.read_table(tmp_path / "out" / "gpqa_sample100.parquet").to_pylist()
        assert [row["extra_info"]["index"] for row in everything] == list(range(len(whole)))
    expected = 40 * 3 / len(whole)  # 15 draws of each row
    counts = [sum(index in chosen for chosen in drawn.values()) for index in range(len(whole))]
    assert all(expected / 3 < count < 2 * expected for count in counts)
    prepared("gpqa", tmp_path, "--sample", 3, "--seed", 7)
    again = parquet.read_table(tmp_path / "out" / "gpqa_sample3.parquet").to_pylist()
    assert tuple(row["extra_info"]["index"] for row in again) == drawn[7]
    account = json.loads((tmp_path / "out" / "gpqa_sample3.json").read_text())
    assert (account["sample"], account["seed"], account["rows"]) == (3, 7, 3)


def test_data_with_terms_need_a_token_or_the_file_itself(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no_token"))
    result = run("gpqa", "--out", tmp_path / "out")
    message = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert "gpqa is for users who promise not to reveal examples online, in plain text or images" in message
    assert "page of Idavidrein/gpqa" in message and "HF_TOKEN" in message and "--local" in message
    plan = run("gpqa", "--out", tmp_path / "out", "--dry-run", "--sample", 100).output
    assert "asks of you  not to reveal examples online" in plan and "gpqa_sample100.parquet" in plan
    assert len(prepared("gpqa", tmp_path)) == len(ROWS["gpqa"])


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path):
    result = run("deepmath", "--out", tmp_path / "out", "--dry-run", "--prompt", "plain")
    assert result.exit_code == 0
    assert "zwhe99/DeepMath-103K at main: data/train-*.parquet" in result.output
    assert f"{tmp_path / 'out' / 'deepmath_103k_test_plain.parquet'} and .json" in result.output
    assert "Idavidrein/gpqa at x: " in run("gpqa", "--dry-run", "--revision", "x").output
    assert not list(tmp_path.iterdir())


def test_without_a_name_all_are_listed():
    output = run().output
    assert all(name in output for name in command.DATA_SETS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["polaris_53k"], "NAME=polaris_53k is not valid: use one of polaris, deepmath"),
        (["polaris", "--repeat", "32"], "repeat=32 is for validation sets, and polaris is a training set"),
        (["polaris", "--sample", "100"], "sample=100 is for validation sets, and polaris is a training set; use limit"),
        (["polaris", "--prompt", "poem"], "prompt=poem is not valid: use one of boxed"),
        (["polaris", "--local", "/nowhere.jsonl"], "/nowhere.jsonl: there is no such file."),
        (["--check", "/nowhere.parquet"], "/nowhere.parquet cannot be read"),
        (["--check", "/tmp"], "file=/tmp is not valid: it is a folder, name files"),
        (["--check", "rows.txt"], "file=rows.txt is not valid: it must end in .parquet, .jsonl, .json, .csv"),
        (["polaris", "--out", __file__], "test_prepare.py is a file, name a folder."),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"problem": "a?"}', "lacks the columns ['answer']; it has ['problem']"),
        ("[1]", "entry 1 is no object"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_in_another_format_is_refused_with_the_reason(content, message, tmp_path):
    path = tmp_path / "polaris.jsonl"
    path.write_text(content)
    result = run("polaris", "--local", path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_a_folder_gives_the_files_that_the_hub_would_give(tmp_path):
    folder = tmp_path / "copy" / "data"
    folder.mkdir(parents=True)
    train = [f"train-0000{part}-of-00004" for part in range(4)]
    parts = [*((name, [{"problem": f"{name}?", "answer": "2"}]) for name in reversed(train)), ("test-0", [])]
    for name, rows in parts:
        test = [{"problem": "What is 1 + 1?", "answer": "2"}]
        parquet.write_table(Table.from_pylist(rows or test), folder / f"{name}.parquet")
    assert run("math12k", "--local", folder.parent, "--out", tmp_path / "out").exit_code == 0
    account = json.loads((tmp_path / "out" / "math12k.json").read_text())
    assert [file["file"] for file in account["read"]["files"]] == [f"{name}.parquet" for name in train]
    rows = parquet.read_table(tmp_path / "out" / "math12k.parquet").to_pylist()
    assert [row["prompt"][0]["content"].partition("?")[0] for row in rows] == train
    result = run("polaris", "--local", folder.parent, "--out", tmp_path / "other")
    message = "copy holds no file that matches polaris-data-53K.jsonl; name the files."
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


def test_a_check_names_every_fault(tmp_path):
    good = prepared("polaris", tmp_path)
    faulty = [
        good[0],
        good[0],
        good[1] | {"reward_model": {"style": "rule", "ground_truth": " "}, "extra_info": {"index": 1, "id": "x"}},
        good[1] | {"prompt": [{"role": "user", "content": " "}], "extra_info": {"index": 1, "id": "y"}},
        good[1] | {"prompt": [{"role": "usr", "content": "a?"}], "extra_info": {"index": 1, "id": "z"}},
        good[1] | {"data_source": None, "extra_info": {"index": 1, "id": "z"}},
        good[1] | {"prompt": [*good[1]["prompt"], {"role": "user"}], "extra_info": {"index": 1, "id": "z"}},
        good[1] | {"extra_info": {"index": None, "id": "z"}},
    ]
    parquet.write_table(Table.from_pylist(faulty), tmp_path / "faulty.parquet")
    result = run("--check", tmp_path / "faulty.parquet", "--check", tmp_path / "out" / "polaris_53k.parquet")
    assert result.exit_code == 1
    assert "a prompt that another row has, in 1 rows" in result.output
    assert "ground_truth: it must be a value, in 1 rows" in result.output
    assert "an empty prompt, in 1 rows" in result.output
    assert "assistant, tool, function, in 1 rows" in result.output
    assert "data_source: it must be the name of a data set, in 1 rows" in result.output
    assert "prompt: it must be a list of messages, each with role and content, in 1 rows" in result.output
    assert "extra_info.index: it must be an integer, in 1 rows" in result.output
    assert "polaris_53k.parquet: no fault" in result.output


COMMIT = "0123456789abcdef0123456789abcdef01234567"


R2E_GYM = [
    {
        "repo_name": "sympy",
        "docker_image": f"own/sympy_final:{number}",
        "commit_hash": f"{number:040x}",
        "problem_statement": f"Problem {number}",
        "expected_output_json": '{"test_one": "PASSED"}',
    }
    for number in range(102)
]


SWE_BENCH = [
    {
        "repo": "sympy/sympy",
        "instance_id": f"sympy__sympy-{number}",
        "base_commit": f"{number:040x}",
        "patch": "",
        "test_patch": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1,1 +1,2 @@\n a\n+b\n",
        "problem_statement": f"Problem {number}",
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.9",
        "FAIL_TO_PASS": '["test_one"]',
        "PASS_TO_PASS": "[]",
        "environment_setup_commit": f"{number:040x}",
        "difficulty": "<15 min fix",
    }
    for number in range(3)
]


def as_parquet(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(Table.from_pylist(rows), buffer)
    return buffer.getvalue()


class DataSets(Hub):
    """Three data sets, served as on the hub: by repository, the commit of a revision, and the contents of its files."""

    served = {
        "POLARIS-Project/Polaris-Dataset-53K": (
            "main",
            COMMIT,
            {"polaris-data-53K.jsonl": "\n".join(json.dumps(row) for row in ROWS["polaris"]).encode()},
        ),
        "R2E-Gym/R2E-Gym-Subset": (
            command.R2E_GYM.revision,
            command.R2E_GYM.revision,
            {
                "data/train-00001-of-00002.parquet": as_parquet(R2E_GYM[50:]),
                "data/train-00000-of-00002.parquet": as_parquet(R2E_GYM[:50]),
            },
        ),
        "princeton-nlp/SWE-bench_Verified": (
            command.SWE_BENCH_VERIFIED.revision,
            command.SWE_BENCH_VERIFIED.revision,
            {"data/test-00000-of-00001.parquet": as_parquet(SWE_BENCH)},
        ),
    }

    def do_GET(self):
        for repository, (revision, commit, files) in self.served.items():
            if self.path.startswith(f"/api/datasets/{repository}/revision/{revision}"):
                siblings = [{"rfilename": name} for name in ("README.md", *files)]
                return self.answer(json.dumps({"id": "x", "sha": commit, "siblings": siblings}).encode())
            name = self.path.removeprefix(f"/datasets/{repository}/resolve/{commit}/")
            if name in files:
                return self.answer(files[name], ETag=f'"{name}"', **{"X-Repo-Commit": commit})
        return self.answer(b"{}", status=404)


def fetch(endpoint: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command in a separate process, because huggingface_hub reads its environment variables at import."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    line = [sys.executable, "-m", "verl_ext", "data", *arguments, "--out", str(folder)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def hub():
    with serving(DataSets) as address:
        yield address


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("polaris", {"polaris_53k": 2}),
        ("r2e_gym", {"r2e_gym/train": 2, "r2e_gym/validation": 100}),
        ("swe_bench_verified", {"swe_bench_verified": 3}),
    ],
)
def test_from_a_hub_every_file_is_of_one_commit_which_is_noted(hub, name, files, tmp_path):
    fetched = fetch(hub, tmp_path, name)
    assert fetched.returncode == 0, fetched.stderr
    repository = command.DATA_SETS[name].repository
    _, commit, served = DataSets.served[repository]
    expected = [(Path(file).name, hashlib.sha256(content).hexdigest()) for file, content in sorted(served.items())]
    for stem, rows in files.items():
        account = json.loads((tmp_path / f"{stem}.json").read_text())
        assert (account["repository"], account["commit"], account["rows"]) == (repository, commit, rows)
        assert [(read["file"], read["sha256"]) for read in account["read"]["files"]] == expected


def test_a_hub_without_that_revision_and_no_hub_at_all_are_told_in_one_sentence(hub, tmp_path):
    nowhere = "http://127.0.0.1:9"  # the discard port, on which no process listens
    for result in (fetch(hub, tmp_path, "polaris", "--revision", "gone"), fetch(nowhere, tmp_path, "r2e_gym")):
        assert result.returncode == 2
        assert "cannot be fetched" in result.stderr and "--local" in result.stderr
        assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.parquet"))


def test_the_documentation_has_the_catalog():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    lines = ["| name | repository | split | rows, as published | license | filter | used by |", "|" + "---|" * 7]
    for name, data in command.DATA_SETS.items():
        filter_ = data.filter or "–"
        cells = (f"`{name}`", data.repository, data.split, data.published, data.license, filter_, data.used_by)
        lines.append("| " + " | ".join(cells) + " |")
    assert "\n".join(lines) in page
