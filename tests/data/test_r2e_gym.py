"""R2E-Gym rows for agents, from a small file with the columns that the hub documents.

One test runs what a row says in a shell, on a folder laid out like R2E-Gym's images, with paths moved below it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

pd = pytest.importorskip("pandas")
typer = pytest.importorskip("typer")

from verl_ext.data import r2e_gym as data  # noqa: E402
from verl_ext.data.pytest_summary import is_as_expected, statuses  # noqa: E402

EXPECTED = {"test_one": "PASSED", "\x1b[1mA.test_two\x1b[0m": "FAILED", "test_three[a - b]": "PASSED"}
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


@pytest.fixture
def folder(tmp_path):
    rows = [source(number) for number in range(20)]
    rows += [source(20, problem_statement=""), source(21, expected_output_json="{}"), source(22, docker_image=None)]
    pd.DataFrame(rows[:12]).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame(rows[12:]).to_parquet(tmp_path / "b.parquet")
    return tmp_path


def run(*arguments):
    app = typer.Typer()
    app.command()(data.write)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_rows_say_what_verl_and_the_tools_need(folder, tmp_path):
    result = run("--source", folder, "--out", tmp_path / "out", "--validation", "4")
    assert result.exit_code == 0, result.output
    frames = {split: pd.read_parquet(tmp_path / "out" / f"{split}.parquet") for split in ("train", "validation")}
    assert {split: len(frame) for split, frame in frames.items()} == {"train": 16, "validation": 4}
    images = [
        info["tools_kwargs"]["bash"]["create_kwargs"]["image"] for f in frames.values() for info in f["extra_info"]
    ]
    assert sorted(images) == sorted(f"own/sympy_final:{number}" for number in range(20))

    row = frames["train"].iloc[0]
    number = int(row["reward_model"]["ground_truth"], 16)
    assert (row["data_source"], row["agent_name"]) == ("r2e_gym/sympy", "tool_agent")
    (message,) = row["prompt"]
    assert message["role"] == "user" and f"<issue>\nProblem {number} with {{braces}}\n</issue>" in message["content"]
    tools = row["extra_info"]["tools_kwargs"]
    assert row["extra_info"]["index"] == 0 and set(tools) == {"bash", "submit"}
    submit = dict(tools["submit"]["create_kwargs"])
    assert submit.pop("test_command") == data.TEST_COMMAND
    assert is_as_expected(LOG, submit.pop("expected"))
    assert submit == tools["bash"]["create_kwargs"]
    assert submit["image"] == f"own/sympy_final:{number}"


def test_what_cannot_be_used_is_left_out_and_counted(folder):
    frames, left_out = data.splits(data.read(str(folder)), validation=0, seed=0)
    assert len(frames["train"]) == 20
    assert left_out == {
        "problem_statement is empty": 1,
        "expected_output_json holds no outcomes": 1,
        "docker_image is empty": 1,
    }


def test_the_same_seed_gives_the_same_split(folder):
    first, again, other = (data.splits(data.read(str(folder)), 4, seed)[0]["validation"] for seed in (0, 0, 1))
    assert first.equals(again) and not first.equals(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation", "20"), "validation=20 must be less than the number of usable rows, 20"),
        (("--source", "{tmp}/other.parquet"), "lacks the columns ['commit_hash'"),
        (("--source", "{tmp}/empty"), "holds no parquet file"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(folder, tmp_path, arguments, message):
    pd.DataFrame([{"text": "x"}]).to_parquet(tmp_path / "other.parquet")
    (tmp_path / "empty").mkdir()
    rows = tmp_path / "rows.parquet"
    pd.DataFrame([source(number) for number in range(20)]).to_parquet(rows)
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    result = run("--source", rows, "--out", tmp_path / "out", *given)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())


def test_outcomes_are_read_from_the_last_summary():
    assert statuses(LOG) == {"test_one": "PASSED", "A.test_two": "FAILED", "test_three[a": "PASSED"}
    # "PASSED" anywhere in a line comes first, as where the expected outcomes were made.
    assert statuses(LOG.replace("1 is not 2", "PASSED"))["A.test_two"] == "PASSED"
    assert statuses("the tests were killed") == {}
    assert not is_as_expected("the tests were killed", json.dumps(EXPECTED))


def test_issues_are_taken_from_between_their_marks():
    assert data.issue("x [ISSUE] a [/ISSUE] b [/ISSUE] y") == "a [/ISSUE] b"
    assert data.issue(" no marks ") == "no marks"
    assert data.issue("[ISSUE] no end") == "[ISSUE] no end"


def test_setup_hides_the_tests_and_the_test_command_runs_them(tmp_path):
    testbed, root, tests = tmp_path / "testbed", tmp_path / "root", tmp_path / "r2e_tests"
    (testbed / ".venv" / "bin").mkdir(parents=True)
    for folder in (root, tests):
        folder.mkdir()
    (testbed / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (testbed / "run_tests.sh").write_text("python -m pytest -rA -p no:cacheprovider r2e_tests")
    (testbed / "answer.py").write_text("answer = 41\n")
    (tests / "test_1.py").write_text("from answer import answer\n\ndef test_answer():\n    assert answer == 42\n")
    expected = json.dumps({"test_answer": "PASSED"})

    def bash(command: str) -> subprocess.CompletedProcess:
        for name in ("testbed", "root", "r2e_tests"):  # /root/r2e_tests last, or it would be moved twice
            command = command.replace(f" /{name}", f" {tmp_path}/{name}").replace(f"=/{name}", f"={tmp_path}/{name}")
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)

    result = bash(data.SETUP)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in testbed.iterdir()) == [".venv", "answer.py"]
    assert not tests.exists()
    assert not is_as_expected(bash(data.TEST_COMMAND).stdout, expected)
    (testbed / "answer.py").write_text("answer = 42  # correct\n")
    log = bash(data.TEST_COMMAND).stdout
    assert is_as_expected(log, expected), log
    assert bash(data.SETUP.replace("run_tests.sh", "nowhere.sh")).returncode != 0
