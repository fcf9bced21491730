"""R2E-Gym rows for agents, from small files with the columns documented on the hub.

One test runs the commands of a row in a shell, on a folder laid out like R2E-Gym's images, with paths moved below it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from pyarrow import Table, parquet
from support.commands import invoke

from verl_ext.data import prepare as command
from verl_ext.data import r2e_gym as data
from verl_ext.data.swe_reward import is_as_expected, statuses

EXPECTED = {"test_one": "PASSED", "\x1b[1mA.test_two\x1b[0m": "FAILED", "test_three[a - b]": "PASSED"}
FILES = ("train", "validation")
LOG = """\
printed by a test: short test summary info
PASSED forged.py::test_nine
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mtest_one\x1b[0m
PASSED r2e_tests/test_1.py::test_three[a - b]
FAILED r2e_tests/test_1.py::A::test_two - AssertionError: 1 is not 2
SKIPPED [1] r2e_tests/test_1.py:3: no network
==================== 1 failed, 2 passed, 1 skipped in 0.57s ====================
"""


def source(number: int, **changes) -> dict:
    return {
        "repo_name": "sympy",
        "docker_image": f"own/sympy_final:{number}",
        "commit_hash": f"{number:040x}",
        "parsed_commit_content": "{}",
        "execution_result_content": "{}",
        "modified_files": ["sympy/core/basic.py"],
        "relevant_files": ["sympy/core/basic.py"],
        "num_non_test_files": 1,
        "prompt": "how the issue was written",
        "problem_statement": f"[ISSUE]\nProblem {number} with {{braces}}\n[/ISSUE]",
        "expected_output_json": json.dumps(EXPECTED),
        **changes,
    }


def store(path: Path, rows: list[dict]) -> Path:
    parquet.write_table(Table.from_pylist(rows), path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """120 usable rows and seven unusable rows, in two files."""
    rows = [source(number) for number in range(120)]
    rows += [source(120, problem_statement=""), source(121, problem_statement="[ISSUE]\n[/ISSUE]")]
    rows += [source(122, expected_output_json="{}"), source(123, docker_image=None), source(124, commit_hash=" ")]
    rows += [source(0, expected_output_json='{"other": "PASSED"}'), source(1, docker_image="own/rebuilt")]
    folder = tmp_path / "files"
    folder.mkdir()
    store(folder / "train-0.parquet", rows[:60])
    store(folder / "train-1.parquet", rows[60:])
    return folder


run = partial(invoke, command.main)


def prepared(out: Path, *arguments: object) -> dict[str, list[dict]]:
    result = run("r2e_gym", "--out", out, *arguments)
    assert result.exit_code == 0, result.output
    return {name: parquet.read_table(out / "r2e_gym" / f"{name}.parquet").to_pylist() for name in FILES}


def image(row: dict) -> str:
    return row["extra_info"]["tools_kwargs"]["bash"]["create_kwargs"]["image"]


def ids(parts: dict[str, list[dict]]) -> dict[str, str]:
    return {image(row): row["extra_info"]["id"] for rows in parts.values() for row in rows}


def test_rows_say_what_verl_and_the_tools_need(folder, tmp_path):
    parts = prepared(tmp_path, "--local", folder)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 20, "validation": 100}
    assert sorted(ids(parts)) == sorted(f"own/sympy_final:{number}" for number in range(120))
    for name, rows in parts.items():
        found = [(row["extra_info"]["split"], row["extra_info"]["index"]) for row in rows]
        assert found == [(name, index) for index in range(len(rows))]

    row = parts["train"][7]
    number = int(row["reward_model"]["ground_truth"], 16)
    assert (row["data_source"], row["agent_name"]) == ("r2e_gym/sympy", "tool_agent")
    (message,) = row["prompt"]
    assert message["role"] == "user" and f"<issue>\nProblem {number} with {{braces}}\n</issue>" in message["content"]
    tools = row["extra_info"]["tools_kwargs"]
    assert row["extra_info"]["need_tools_kwargs"] is True and set(tools) == {"bash", "submit"}
    submit = tools["submit"]["create_kwargs"]
    assert submit.pop("test_command") == data.TEST_COMMAND
    assert submit.pop("grader") == "r2e_gym" and submit.pop("test_timeout") == 300
    assert is_as_expected(LOG, submit.pop("expected"))
    assert submit == tools["bash"]["create_kwargs"]
    assert submit["image"] == f"own/sympy_final:{number}"


def test_the_account_names_what_was_read_written_and_left_out(folder, tmp_path):
    for name, rows in prepared(tmp_path, "--local", folder).items():
        account = json.loads((tmp_path / "r2e_gym" / f"{name}.json").read_text())
        assert (account["name"], account["rows"]) == ("r2e_gym", len(rows))
        assert [account[key] for key in ("repository", "commit", "prompt")] == [None, None, None]
        assert [(file["file"], file["rows_read"]) for file in account["read"]["files"]] == [
            ("train-0.parquet", 60),
            ("train-1.parquet", 67),
        ]
        assert account["left_out"] == {
            "no problem_statement": 1,
            "no question": 1,
            "no outcomes in expected_output_json": 1,
            "no docker_image": 1,
            "no commit_hash": 1,
            "repeated question": 1,
            "repeated question, with another answer": 1,
        }
        assert account["read"]["rows"] == 127 == 120 + sum(account["left_out"].values())


def test_ids_come_of_image_commit_and_issue_whatever_the_order(tmp_path):
    rows = [source(number) for number in range(110)]
    rows[3]["problem_statement"] = rows[4]["problem_statement"]  # told apart by their commits
    given = store(tmp_path / "given.parquet", rows)
    turned = store(tmp_path / "turned.parquet", rows[::-1])
    found = ids(prepared(tmp_path / "given", "--local", given))
    assert len(set(found.values())) == 110
    assert ids(prepared(tmp_path / "turned", "--local", turned, "--seed", 1)) == found
    content = f"r2e_gym\0{5:040x}\nProblem 5 with {{braces}}\0own/sympy_final:5"
    assert found["own/sympy_final:5"] == hashlib.sha256(content.encode()).hexdigest()[:16]


def test_the_same_seed_gives_the_same_files(folder, tmp_path):
    first, again, other = (prepared(tmp_path / "out", "--local", folder, "--seed", seed) for seed in (0, 0, 1))
    assert first == again
    assert {image(row) for row in first["train"]} != {image(row) for row in other["train"]}
    assert not {image(row) for row in first["train"]} & {image(row) for row in first["validation"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--local", "{tmp}/typo.parquet"), "typo.parquet: there is no such file."),
        (("--local", "{tmp}/empty"), "empty must be a file that ends in .parquet"),
        (("--local", "{tmp}/other.parquet"), "lacks the columns ['repo_name', 'docker_image', 'commit_hash', "),
        (("--local", "{tmp}/few.parquet"), "r2e_gym: 100 problems are left, and more than 100 are needed."),
        (("--prompt", "plain"), "prompt='plain' is not for r2e_gym, which has a prompt of its own; leave it out."),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(tmp_path, arguments, message):
    store(tmp_path / "other.parquet", [{"text": "x"}])
    store(tmp_path / "few.parquet", [source(number) for number in range(100)])
    (tmp_path / "empty").mkdir()
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    result = run("r2e_gym", "--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())
    assert not (tmp_path / "out").exists()


def test_outcomes_are_read_from_the_last_summary():
    assert statuses(LOG) == {"test_one": "PASSED", "A.test_two": "FAILED", "test_three[a": "PASSED"}
    assert statuses("the tests were killed") == {}
    assert not is_as_expected("the tests were killed", json.dumps(EXPECTED))
    assert not is_as_expected(f"{LOG}PASSED r2e_tests/test_1.py::test_four\n", json.dumps(EXPECTED))


@pytest.mark.parametrize("word", ["FAILED", "ERROR", "XFAIL"])
def test_the_reason_of_a_failure_does_not_make_it_a_success(word):
    """Also if the reason is PASSED; unless R2E-Gym has misread that line when the expected outcomes were made."""
    line = "r2e_tests/test_1.py::A::test_two - ValueError: PASSED"
    log = LOG.replace("FAILED r2e_tests/test_1.py::A::test_two - AssertionError: 1 is not 2", f"{word} {line}")
    assert statuses(log)["A.test_two"] == word
    assert is_as_expected(log, json.dumps(EXPECTED)) == (word == "FAILED")
    assert not is_as_expected(log, json.dumps(EXPECTED | {"\x1b[1mA.test_two\x1b[0m": "PASSED"}))
    misread = {name: status for name, status in EXPECTED.items() if status == "PASSED"}
    misread["\x1b[1mA.test_two\x1b[0m - ValueError: PASSED"] = "PASSED"
    assert is_as_expected(log, json.dumps(misread)) and is_as_expected(log.replace("\n", "\r\n"), json.dumps(misread))


def test_a_file_that_cannot_be_imported_stands_for_no_test():
    log = "=== short test summary info ===\nERROR r2e_tests/test_1.py\n=== 1 error in 1.55s ===\n"
    passed = log.replace("ERROR", "PASSED r2e_tests/test_2.py::test_one\nERROR")
    assert not is_as_expected(log, json.dumps({"test_one": "PASSED"}))
    assert not is_as_expected(passed, json.dumps({"test_one": "PASSED", "test_two": "PASSED"}))
    for status in ("ERROR", "FAILED"):
        assert is_as_expected(passed, json.dumps({"test_one": "PASSED", "": status}))
        assert not is_as_expected(passed, json.dumps({"test_one": status, "": status}))


def test_issues_are_taken_from_between_their_marks():
    assert data.issue("x [ISSUE] a [/ISSUE] b [/ISSUE] y") == "a [/ISSUE] b"
    assert data.issue(" no marks ") == "no marks"
    assert data.issue("[ISSUE] no end") == "[ISSUE] no end"


def test_setup_hides_the_tests_and_the_test_command_runs_them(tmp_path):
    testbed, root, tests = tmp_path / "testbed", tmp_path / "root", tmp_path / "r2e_tests"
    (testbed / ".venv" / "bin").mkdir(parents=True)
    for folder in (root, tests):
        folder.mkdir()
    python = testbed / ".venv" / "bin" / "python"  # no link: Python may not find its environment through a link
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (testbed / "run_tests.sh").write_text("python -m pytest -rA -p no:cacheprovider r2e_tests")
    (testbed / "answer.py").write_text("answer = 41\n")
    (tests / "test_1.py").write_text("from answer import answer\n\ndef test_answer():\n    assert answer == 42\n")
    expected = json.dumps({"test_answer": "PASSED"})
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # an image has no plugins of ours

    def bash(command: str) -> subprocess.CompletedProcess:
        for name in ("testbed", "root", "r2e_tests"):  # /root/r2e_tests last, to move the path only once
            command = command.replace(f" /{name}", f" {tmp_path}/{name}").replace(f"=/{name}", f"={tmp_path}/{name}")
        return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)

    result = bash(data.SETUP)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in testbed.iterdir()) == [".venv", "answer.py"]
    assert not tests.exists()
    assert not is_as_expected(bash(data.TEST_COMMAND).stdout, expected)
    (testbed / "answer.py").write_text("answer = 42  # correct\n")
    log = bash(data.TEST_COMMAND).stdout
    assert is_as_expected(log, expected), log
    (testbed / "r2e_tests").unlink()
    (root / "r2e_tests").rename(testbed / "r2e_tests")  # as in images that have the tests there
    assert bash(data.SETUP.replace("run_tests.sh", "nowhere.sh")).returncode != 0
    assert (root / "r2e_tests" / "test_1.py").exists()
