"""Any data set by its columns: local files, a folder in the hub's form, and a server with the hub's answers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from pyarrow import Table, parquet
from support.commands import flat, invoke
from support.hub import Hub, serving

from verl_ext.data import columns as command
from verl_ext.prompts import prompt_id

ROWS = [{"question": f"{n} + 1?", "answer": f"{n} + 1 is {n + 1}.\n#### {n + 1:,}"} for n in range(995, 1015)]
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""
GSM8K = ("--prompt", "question", "--answer", "answer", "--answer-after", "####", "--template", "hashes")


run = partial(invoke, command.main)


def written(folder: Path) -> dict[str, list[dict]]:
    return {path.stem: parquet.read_table(path).to_pylist() for path in folder.glob("*.parquet")}


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def gsm8k(tmp_path) -> Path:
    """A folder with the files of openai/gsm8k on the hub."""
    folder = tmp_path / "gsm8k"
    files = {"main/train-00000-of-00002": ROWS[:8], "main/train-00001-of-00002": ROWS[8:15]}
    files |= {"main/test-00000-of-00001": ROWS[15:], "socratic/train-00000-of-00001": ROWS[:1]}
    for name, rows in files.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(Table.from_pylist(rows), path)
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "csv"])
def test_a_file_is_divided_with_the_seed_in_verls_schema(suffix, tmp_path):
    path = tmp_path / f"sums.{suffix}"
    if suffix == "parquet":
        parquet.write_table(Table.from_pylist(ROWS), path)
    elif suffix == "csv":
        lines = [f'{row["question"]},"{row["answer"]}"' for row in ROWS]
        path.write_text("\n".join(["question,answer", *lines]))
    else:
        path.write_text(("\n".join(map(json.dumps, ROWS))) if suffix == "jsonl" else json.dumps(ROWS))
    splits = {}
    for seed in (0, 1):
        out = tmp_path / str(seed)
        result = run(path, *GSM8K, "--out", out, "--validation", 5, "--seed", seed, "--system", "Be brief.")
        assert result.exit_code == 0, result.output
        splits[seed] = written(out)
    assert {split: len(rows) for split, rows in splits[0].items()} == {"train": 15, "validation": 5}
    assert splits[0]["validation"] != splits[1]["validation"]
    rows = sorted((row for part in splits[0].values() for row in part), key=lambda row: row["prompt"][1]["content"])
    expected = sorted(str(n + 1) for n in range(995, 1015))
    assert sorted(row["reward_model"]["ground_truth"] for row in rows) == expected
    for row in rows:
        number = int(row["reward_model"]["ground_truth"])
        question = f'{number - 1} + 1? Let\'s think step by step and output the final answer after "####".'
        assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        assert row["data_source"] == "sums"
        assert row["extra_info"]["prompt_id"] == prompt_id("sums", row["prompt"], str(number))
    for split, part in splits[0].items():
        assert [row["extra_info"]["index"] for row in part] == list(range(len(part)))
        assert {row["extra_info"]["split"] for row in part} == {split}
    account = json.loads((tmp_path / "0" / "validation.json").read_text())
    assert account["rows"] == 5 and account["read"][0]["rows_read"] == 20
    assert account["read"][0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_integers_with_a_gap_stay_integers(tmp_path):
    """pandas stores such a column as float."""
    pd.DataFrame({"question": ["1?", "2?", "3?"], "answer": [10, None, -7]}).to_parquet(tmp_path / "sums.parquet")
    columns = ("--prompt", "question", "--answer", "answer", "--leave-out")
    assert run(tmp_path / "sums.parquet", *columns, "--out", tmp_path / "out").exit_code == 0
    rows = [row for part in written(tmp_path / "out").values() for row in part]
    assert sorted(row["reward_model"]["ground_truth"] for row in rows) == ["-7", "10"]


def test_numbers_of_single_precision_keep_their_digits(tmp_path):
    answers = pd.Series([0.1, None, 2.0, -1e-7], dtype="float32")
    pd.DataFrame({"question": ["1?", "2?", "3?", "4?"], "answer": answers}).to_parquet(tmp_path / "sums.parquet")
    columns = ("--prompt", "question", "--answer", "answer", "--leave-out")
    assert run(tmp_path / "sums.parquet", *columns, "--out", tmp_path / "out").exit_code == 0
    rows = [row for part in written(tmp_path / "out").values() for row in part]
    assert sorted(row["reward_model"]["ground_truth"] for row in rows) == ["-1e-07", "0.1", "2"]


def test_a_parquet_file_is_read_beyond_its_first_batch(tmp_path):
    parquet.write_table(Table.from_pydict({"answer": range(4100)}), tmp_path / "sums.parquet")
    rows = command.sources.rows(tmp_path / "sums.parquet", ["answer"])
    assert [row["answer"] for row in rows] == list(range(4100))


@pytest.mark.parametrize("name", ["sums-v1.5", "sums-v1.5/train.jsonl"])
def test_the_data_source_is_the_whole_name_of_a_folder_or_a_files_without_its_ending(name, tmp_path):
    (tmp_path / "sums-v1.5").mkdir()
    jsonl(tmp_path / "sums-v1.5/train.jsonl", ROWS[:2])
    columns = ("--prompt", "question", "--answer", "answer", "--answer-after", "####")
    assert run(tmp_path / name, *columns, "--out", tmp_path / "out").exit_code == 0
    (row,) = written(tmp_path / "out")["train"]
    assert row["data_source"] == ("train" if name.endswith("jsonl") else "sums-v1.5")


@pytest.mark.parametrize("line", ["What is 1,000 + 1?,1001", "What is 1000 + 1?"])
def test_a_csv_row_with_another_number_of_cells_is_refused(line, tmp_path):
    (tmp_path / "sums.csv").write_text(f"question,answer\n1 + 1?,2\n{line}\n")
    result = run(tmp_path / "sums.csv", "--prompt", "question", "--answer", "answer", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "row 2 and the header have different numbers of cells" in flat(result)


def test_a_table_of_a_spreadsheet_with_long_fields_and_missing_answers(tmp_path):
    """Excel begins a CSV file with a mark; pandas writes nan for a missing answer."""
    path = tmp_path / "sums.csv"
    rows = [f'{n} + 1?,{n + 1},"{"x" * 140_000}"' for n in range(5)]
    path.write_text("\n".join(["\ufeffquestion,answer,notes", *rows]), encoding="utf-8")
    columns = ("--prompt", "question", "--answer", "answer", "--validation", 1)
    assert run(path, *columns, "--out", tmp_path / "csv").exit_code == 0
    assert sum(map(len, written(tmp_path / "csv").values())) == 5
    rows = [{"question": f"{n} + 1?", "answer": n + 1 if n % 3 else float("nan")} for n in range(9)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = run(tmp_path / "sums.jsonl", *columns, "--out", tmp_path / "jsonl")
    assert result.exit_code == 2 and "3 x no answer (first in row 1 of sums.jsonl)" in flat(result)
    result = run(tmp_path / "sums.jsonl", *columns, "--out", tmp_path / "jsonl", "--leave-out")
    assert result.exit_code == 0, result.output
    truths = [row["reward_model"]["ground_truth"] for part in written(tmp_path / "jsonl").values() for row in part]
    assert sorted(truths) == ["2", "3", "5", "6", "8", "9"]


def test_a_tenth_is_held_out_unless_told_otherwise(tmp_path):
    path = jsonl(tmp_path / "sums.jsonl", ROWS)
    assert run(path, *GSM8K, "--out", tmp_path / "out").exit_code == 0
    assert {split: len(rows) for split, rows in written(tmp_path / "out").items()} == {"train": 18, "validation": 2}
    assert run(path, *GSM8K, "--out", tmp_path / "all", "--validation", 0).exit_code == 0
    assert {split: len(rows) for split, rows in written(tmp_path / "all").items()} == {"train": 20}


def test_at_most_512_rows_are_held_out():
    split = command.Split(rows=[{}] * 6000)
    assert {name: len(part.rows) for name, part in command.hold_out(split, None, 0).items()} == {
        "train": 5488,
        "validation": 512,
    }


def test_an_earlier_validation_file_is_not_left_beside_new_training_rows(gsm8k, tmp_path):
    """Its rows could be among the training rows of this start."""
    path, out = jsonl(tmp_path / "sums.jsonl", ROWS), tmp_path / "out"
    assert run(path, *GSM8K, "--out", out).exit_code == 0
    before = written(out)
    for arguments in ((path, "--validation", 0), (gsm8k, "--subset", "main")):
        refused = run(*arguments, *GSM8K, "--out", out)
        assert refused.exit_code == 2 and written(out) == before
        assert f"--out {out}: it holds validation.parquet of an earlier start" in flat(refused)
    assert run(path, *GSM8K, "--out", out, "--validation", 5).exit_code == 0
    (out / "validation.parquet").unlink()
    assert run(path, *GSM8K, "--out", out, "--validation", 0).exit_code == 0


@pytest.mark.parametrize("name", ["train.json", "train.parquet", "validation.parquet"])
def test_a_file_that_is_read_is_not_overwritten(name, tmp_path):
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(ROWS), path)
    else:
        path.write_text(json.dumps(ROWS))
    (tmp_path / "link").symlink_to(tmp_path)
    before = path.read_bytes()
    for source, out in ((path, tmp_path), (path, tmp_path / "link"), (tmp_path / "link" / name, tmp_path)):
        refused = run(source, *GSM8K, "--out", out)
        assert refused.exit_code == 2
        assert f"--out {out}: {name} is read, and would be overwritten; name another folder." in flat(refused)
    assert path.read_bytes() == before and {file.name for file in tmp_path.iterdir()} == {name, "link"}
    assert run(path, *GSM8K, "--out", tmp_path / "out").exit_code == 0


def test_the_splits_of_a_folder_are_not_overwritten(tmp_path):
    for split, rows in (("train", ROWS[:15]), ("test", ROWS[15:])):
        parquet.write_table(Table.from_pylist(rows), tmp_path / f"{split}.parquet")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused = run(tmp_path, *GSM8K, "--out", tmp_path)
    assert refused.exit_code == 2 and "train.parquet is read, and would be overwritten" in flat(refused)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_interruption_leaves_no_earlier_validation_file(tmp_path, monkeypatch):
    path, out = jsonl(tmp_path / "sums.jsonl", ROWS), tmp_path / "out"
    assert run(path, *GSM8K, "--out", out).exit_code == 0

    def killed_before_validation(file, *rest):
        if file.stem == "validation":
            raise KeyboardInterrupt
        write_rows(file, *rest)

    write_rows = command.write_rows
    monkeypatch.setattr(command, "write_rows", killed_before_validation)
    run(path, *GSM8K, "--out", out, "--seed", 1)
    assert set(written(out)) == {"train"}


def test_a_folder_of_the_hub_keeps_its_splits_and_verls_own_reward_judges_it(gsm8k, tmp_path):
    from verl.utils.reward_score import default_compute_score

    result = run(gsm8k, *GSM8K, "--out", tmp_path / "out", "--subset", "main", "--data-source", "openai/gsm8k")
    assert result.exit_code == 0, result.output
    splits = written(tmp_path / "out")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 15, "test": 5}
    for row in splits["train"]:
        truth = row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], f"So #### {int(truth):,}", truth) == 1.0
        assert default_compute_score(row["data_source"], "#### 7", truth) == 0.0


def test_rows_that_cannot_be_used_are_refused_or_left_out_and_counted(tmp_path):
    rows = [*ROWS[:3], ROWS[0], {"question": "Who?", "answer": "nobody"}, {"question": " ", "answer": "#### 1"}]
    path = jsonl(tmp_path / "sums.jsonl", [*rows, ROWS[1] | {"answer": "#### 5"}])
    result = run(path, *GSM8K, "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert (
        "some rows cannot be used: 1 x repeated question (first in row 4 of sums.jsonl); 1 x no answer (first in row 5 "
        "of sums.jsonl); 1 x no question (first in row 6 of sums.jsonl); 1 x repeated question, with another answer "
        "(first in row 7 of sums.jsonl); correct them, or write the others with --leave-out."
    ) in flat(result)
    result = run(path, *GSM8K, "--out", tmp_path / "out", "--leave-out")
    assert result.exit_code == 0 and result.output.count("1 x no answer") == 1
    assert {split: len(part) for split, part in written(tmp_path / "out").items()} == {"train": 2, "validation": 1}
    accounts = {
        split: json.loads((tmp_path / "out" / f"{split}.json").read_text()) for split in ("train", "validation")
    }
    left_out = {split: sum(account["left_out"].values()) for split, account in accounts.items()}
    assert left_out == {"train": 4, "validation": 0}
    read = accounts["train"]["read"][0]["rows_read"]
    assert read == 7 == sum(account["rows"] for account in accounts.values()) + sum(left_out.values())


@pytest.mark.parametrize(
    ("good", "remedy"), [(0, "add rows that can."), (1, "add rows, or hold out at most 0 by --validation.")]
)
def test_too_few_rows_that_can_be_used_are_counted_and_no_option_is_blamed_that_was_not_given(good, remedy, tmp_path):
    bad = [{"question": "Who?", "answer": "nobody"}, {"question": " ", "answer": "#### 1"}]
    path = jsonl(tmp_path / "sums.jsonl", [*ROWS[:good], *bad])
    result = run(path, *GSM8K, "--out", tmp_path / "out", "--leave-out")
    counted = f"{good} of {good + 2} rows can be used (1 x no answer; 1 x no question)"
    assert result.exit_code == 2
    assert f"value: {counted}, and at least one must be trained on; {remedy}" in flat(result)


def test_a_row_of_jsonl_without_the_key_is_a_row_without_an_answer(tmp_path):
    rows = [*ROWS[:3], {"question": "Who?"}]
    path = jsonl(tmp_path / "sums.jsonl", rows)
    result = run(path, *GSM8K, "--out", tmp_path / "out")
    assert "some rows cannot be used: 1 x no answer (first in row 4 of sums.jsonl)" in flat(result)
    assert run(path, *GSM8K, "--out", tmp_path / "out", "--leave-out").exit_code == 0
    assert sum(len(part) for part in written(tmp_path / "out").values()) == 3


def test_a_line_that_is_not_json_is_refused_by_its_number(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join([*map(json.dumps, ROWS[:2]), "", '{"question": ', json.dumps(ROWS[2])]))
    assert "sums.jsonl cannot be read: line 4 is not JSON (Expecting value)" in flat(
        run(path, *GSM8K, "--out", tmp_path / "out")
    )


@pytest.mark.parametrize("held_out", ["test", "validation"])  # before and behind train in the alphabet
def test_a_question_of_another_split_leaves_the_training_split(held_out, gsm8k, tmp_path):
    (gsm8k / "README.md").write_text(CARD.replace("split: test", f"split: {held_out}"))
    parquet.write_table(Table.from_pylist(ROWS[14:]), gsm8k / "main" / "test-00000-of-00001.parquet")
    arguments = (gsm8k, *GSM8K, "--out", tmp_path / "out", "--subset", "main")
    assert "1 x repeated question (first in row 7 of train-00001-" in flat(run(*arguments))
    assert run(*arguments, "--leave-out").exit_code == 0
    assert {split: len(rows) for split, rows in written(tmp_path / "out").items()} == {"train": 14, held_out: 6}


def test_the_answer_is_what_follows_the_last_mark_and_only_thousands_lose_their_commas(tmp_path):
    answers = ["#### 5? No: #### 7", "#### -1,234.50", "#### 12,34", "#### 1,000,000"]
    path = jsonl(tmp_path / "sums.jsonl", [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)])
    arguments = (path, *GSM8K, "--out", tmp_path / "out", "--validation", 0, "--ability", "chat")
    assert run(*arguments).exit_code == 0
    rows = written(tmp_path / "out")["train"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["7", "-1234.50", "12,34", "1000000"]
    assert {row["ability"] for row in rows} == {"chat"}


def test_the_account_says_how_rows_were_made_and_the_current_folder_has_its_name(gsm8k, tmp_path, monkeypatch):
    monkeypatch.chdir(gsm8k)
    assert run(".", *GSM8K, "--out", tmp_path / "out", "--subset", "socratic", "--validation", 0).exit_code == 0
    account = json.loads((tmp_path / "out" / "train.json").read_text())
    assert account.items() >= {"name": ".", "subset": "socratic", "commit": None, "data_source": "gsm8k"}.items()
    options = {"prompt": "question", "answer": "answer", "answer_after": "####", "template": "hashes", "system": None}
    assert account.items() >= (options | {"seed": 0}).items()


def test_a_template_of_ones_own_may_hold_braces(tmp_path):
    path = jsonl(tmp_path / "sums.jsonl", [{"q": "1 {+} 1?", "a": 2.5}, {"q": "2?", "a": 3}])
    columns = ("--prompt", "q", "--answer", "a", "--out", tmp_path / "out", "--validation", 0)
    assert run(path, *columns, "--template", "{question} Write \\boxed{}.").exit_code == 0
    rows = written(tmp_path / "out")["train"]
    assert [row["prompt"][0]["content"] for row in rows] == ["1 {+} 1? Write \\boxed{}.", "2? Write \\boxed{}."]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2.5", "3"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--prompt": "text"}, "it lacks the columns ['text']; it has ['answer', 'chat', 'question']"),
        ({"--prompt": "chat"}, "column 'chat' holds a list; name a column of texts or numbers."),
        ({"--template": "poem"}, "--template 'poem' must hold {question}, or be one of boxed, think_answer"),
        (
            {"--validation": 2},
            "--validation 2: 2 of 2 rows can be used, and at least one must be trained on; "
            "add rows, or hold out at most 1 by --validation.",
        ),
        ({"--out": __file__}, "test_columns.py is a file, name a folder."),
    ],
)
def test_bad_input_is_refused_in_one_sentence(changed, message, tmp_path):
    path = jsonl(tmp_path / "sums.jsonl", [row | {"chat": [row["question"]]} for row in ROWS[:2]])
    options = {"--prompt": "question", "--answer": "answer", "--answer-after": "####", "--out": tmp_path / "out"}
    result = run(path, *(word for pair in (options | changed).items() for word in pair))
    assert result.exit_code == 2 and message in flat(result), result.output
    assert not (tmp_path / "out").exists()


def test_data_sets_that_are_not_there_are_refused_in_one_sentence(gsm8k, tmp_path):
    end = (*GSM8K, "--out", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "nowhere.jsonl: there is no such file." in flat(run("nowhere.jsonl", *end))
    assert "no/such/folder is neither a file, a folder, nor OWNER/NAME on the hub" in flat(run("no/such/folder", *end))
    (tmp_path / "none.jsonl").write_text("\n")
    assert "0 of 0 rows can be used, and at least one must be trained on; add" in flat(
        run(tmp_path / "none.jsonl", *end)
    )
    assert "empty cannot be read" in flat(run(tmp_path / "empty", *end))
    assert "subset=null is not valid: use one of main, socratic" in flat(run(gsm8k, *end))
    assert "subset=mine is not valid: use one of main, socratic" in flat(run(gsm8k, *end, "--subset", "mine"))
    result = run(gsm8k, *end, "--subset", "main", "--validation", 3)
    assert "has splits of its own, train, test; leave it out." in flat(result)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class DataSets(Hub):
    """Serves the files in ``folder`` as the hub serves the data set ``openai/gsm8k``, with the tag ``v1``."""

    folder: Path

    def do_GET(self):
        path, kind = self.path.partition("?")[0], "/datasets/openai/gsm8k/"
        names = [str(file.relative_to(self.folder)) for file in sorted(self.folder.rglob("*")) if file.is_file()]
        if path.startswith(f"/api{kind}tree/{COMMIT}"):
            under = path.removeprefix(f"/api{kind}tree/{COMMIT}").strip("/")
            found = [{"type": "file", "path": name, "size": 1, "oid": name} for name in names if name.startswith(under)]
            found += [] if under else [{"type": "directory", "path": "main", "oid": "main"}]
            self.answer(json.dumps(found).encode())
        elif path == f"/api{kind}revision/{COMMIT}":
            siblings = [{"rfilename": name} for name in names]
            self.answer(json.dumps({"id": "openai/gsm8k", "sha": COMMIT, "siblings": siblings}).encode())
        elif (name := re.sub(f"{kind}resolve/(v1|{COMMIT})/", "", path)) in names:
            self.answer((self.folder / name).read_bytes(), ETag=f'"{name}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.answer(b"{}", status=404)


@pytest.fixture
def hub(gsm8k) -> Iterator[str]:
    with serving(type("Gsm8k", (DataSets,), {"folder": gsm8k})) as address:
        yield address


def test_a_name_on_the_hub_is_its_data_source_and_the_commit_is_noted(hub, tmp_path):
    """In a separate process, because huggingface_hub reads its environment variables at import."""
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    line = [sys.executable, "-m", "verl_ext", "data", "from", "openai/gsm8k", *GSM8K, "--subset", "main"]
    result = subprocess.run(
        [*line, "--revision", "v1", "--out", str(tmp_path / "out")],
        env=environment | {"NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    splits = written(tmp_path / "out")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 15, "test": 5}
    assert {row["data_source"] for row in splits["train"]} == {"openai/gsm8k"}
    account = json.loads((tmp_path / "out" / "train.json").read_text())
    assert (account["name"], account["subset"], account["commit"]) == ("openai/gsm8k", "main", COMMIT)
