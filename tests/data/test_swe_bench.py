"""SWE-bench Verified: rows from a small file in its form, and recorded logs of its evaluation script.

:mod:`support.swe_bench` has made the repositories behind the logs, and recorded the logs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pyarrow import Table, parquet
from support.commands import invoke
from support.swe_bench import COLOURED, DJANGO, PYTEST, git, local, make_repository, row

from verl_ext.data import limited, swe_bench
from verl_ext.data import prepare as command
from verl_ext.data.swe_grading import check, grade

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOGS = Path(__file__).parent / "swe_bench_logs"
STYLES = {"pytest": PYTEST, "django": DJANGO, "coloured": COLOURED}
RESOLVED = ["coloured_resolved", "django_resolved", "pytest_resolved"]
BELIEVED = ["pytest_forged", "pytest_own_tests"]  # forged by the agent's code and files: see the module's docstring
UNREADABLE = {"score": 0.0, "acc": 0.0, "timed_out": 0.0, "verifier_error": 0.0}


def log(name: str) -> str:
    return (LOGS / f"{name}.txt").read_bytes().decode()


def expected(style: dict, **changes: object) -> str:
    keys = ("repo", "version", "instance_id", "FAIL_TO_PASS", "PASS_TO_PASS")
    return json.dumps({key: style[key] for key in keys} | changes)


# ---- rows ----


def prepared(folder: Path, rows: list[dict], *arguments: object) -> list[dict]:
    parquet.write_table(Table.from_pylist(rows), folder / "test.parquet")
    source = ("--local", folder / "test.parquet")
    result = invoke(command.main, "swe_bench_verified", "--out", folder, *source, *arguments)
    assert result.exit_code == 0, result.output
    return parquet.read_table(folder / "swe_bench_verified.parquet").to_pylist()


def test_a_row_has_swe_benchs_image_and_only_the_submission_has_the_tests(tmp_path):
    rows = prepared(tmp_path, [row(PYTEST, COMMIT), row(DJANGO, COMMIT)])
    assert [item["data_source"] for item in rows] == ["swe_bench_verified"] * 2
    assert [item["extra_info"]["repo_name"] for item in rows] == ["pydata/xarray", "django/django"]
    assert [item["extra_info"]["original_id"] for item in rows] == ["pydata__xarray-1", "django__django-1"]
    for item, style in zip(rows, (PYTEST, DJANGO), strict=True):
        tools = item["extra_info"]["tools_kwargs"]
        bash, submit = (dict(tools[name]["create_kwargs"]) for name in ("bash", "submit"))
        script = submit.pop("test_command")
        assert "+    " in script and "add(2, 3)" in script and f"git checkout {COMMIT} {style['file']}" in script
        assert (submit.pop("grader"), submit.pop("test_timeout")) == ("swebench", 1800)
        assert submit.pop("expected") == expected(style)
        assert submit == bash and bash["image"] == "swebench/sweb.eval.x86_64.{}:latest".format(
            style["instance_id"].replace("__", "_1776_")
        )
        shown = json.dumps([item["prompt"], bash])
        assert "add(2, 3) returns -1." in shown
        lists = row(style, COMMIT) | {key: style[key] for key in swe_bench.LISTS}  # instead of their JSON
        assert swe_bench.extra(lists) == swe_bench.extra(row(style, COMMIT))
        for secret in ("test_add", "add(2, 3) ==", "assertEqual", "the solution", "a hint", *style["FAIL_TO_PASS"]):
            assert secret not in shown


def test_the_script_is_that_of_make_test_spec():
    """For a version whose image needs no file from the network, the field's own entry point can be asked."""
    from swebench.harness.test_spec.test_spec import make_test_spec

    source = row(PYTEST, COMMIT, repo="psf/requests", version="2.4", instance_id="psf__requests-1")
    spec = make_test_spec(source, namespace="swebench")
    submit = swe_bench.extra(source)["tools"]["submit"]
    assert submit["test_command"] == spec.eval_script and submit["image"] == spec.instance_image_key


def test_rows_without_judge_or_issue_are_left_out_and_counted(tmp_path):
    good = row(PYTEST, COMMIT)
    bad = [
        row(PYTEST, COMMIT, version="0.1"),
        row(PYTEST, COMMIT, repo="own/repository"),
        row(PYTEST, COMMIT, FAIL_TO_PASS="[]"),
        row(PYTEST, COMMIT, PASS_TO_PASS="none"),
        row(PYTEST, COMMIT, problem_statement=" "),
        row(PYTEST, COMMIT, test_patch=""),
        good,
    ]
    assert len(prepared(tmp_path, [good, *bad])) == 1
    account = json.loads((tmp_path / "swe_bench_verified.json").read_text())
    assert account["left_out"] == {
        "a version that swebench does not know": 2,
        "no lists of tests in FAIL_TO_PASS and PASS_TO_PASS": 2,
        "no problem_statement": 1,
        "no test_patch": 1,
        "repeated question": 1,
    }


def test_the_setup_removes_the_history_after_the_issue(tmp_path):
    base = make_repository(PYTEST, tmp_path)
    testbed = tmp_path / "testbed"
    (testbed / "sums.py").write_text("the solution\n")
    git(testbed, "commit", "--quiet", "--all", "--message", "Fix of the issue")
    fix = git(testbed, "rev-parse", "HEAD").strip()
    git(testbed, "tag", "v2")
    git(testbed, "update-ref", "refs/remotes/origin/main", fix)
    git(testbed, "remote", "add", "origin", "https://example.org/sums")
    git(testbed, "branch", "later")
    git(testbed, "reset", "--quiet", "--hard", base)
    git(testbed, "tag", "v1")
    (testbed / ".git" / "FETCH_HEAD").write_text(f"{fix}\n")  # ORIG_HEAD is there since the reset
    setup = ["bash", "-c", local(swe_bench.SETUP, tmp_path)]
    assert "Fix of the issue" in git(testbed, "log", "--all", "--reflog", "--oneline")
    subprocess.run(setup, check=True)
    subprocess.run(setup, check=True)  # a second time, when nothing is left to remove
    assert "Fix of the issue" not in git(testbed, "log", "--all", "--reflog", "--oneline")
    assert not list((testbed / ".git").glob("*_HEAD"))
    assert git(testbed, "tag") == "v1\n" and git(testbed, "rev-parse", "HEAD").strip() == base
    assert git(testbed, "remote") == "" and git(testbed, "branch", "--format=%(refname:short)") == "main\n"


# ---- verdicts on recorded logs ----


@pytest.mark.parametrize("name", sorted(path.stem for path in LOGS.iterdir()))
def test_swebench_judges_the_recorded_logs(name):
    style = STYLES[name.partition("_")[0]]
    assert swe_bench.is_resolved(log(name), expected(style)) is (name in RESOLVED or name in BELIEVED)


@pytest.mark.parametrize("name", RESOLVED)
def test_a_log_with_other_line_ends_or_control_characters_is_read(name):
    tests, text = expected(STYLES[name.partition("_")[0]]), log(name)
    assert swe_bench.is_resolved(text.replace("\n", "\r\n"), tests)
    noise = "\x00\x07\x1b[2J\x1b]0;title\x07\udcff\u2028\x85 \ufffd\n"
    start = ">>>>> Start Test Output'\n"
    assert swe_bench.is_resolved(noise + text.replace(start, start + noise), tests)


@pytest.mark.parametrize("name", RESOLVED)
def test_a_log_without_an_end_or_with_a_reported_fault_is_not_resolved(name):
    tests, text = expected(STYLES[name.partition("_")[0]]), log(name)
    for cut in ("", text[: text.index(">>>>> End")], text[text.index(">>>>> End") :]):
        assert not swe_bench.is_resolved(cut, tests)
    for fault in ("Patch Apply Failed", "Reset Failed", "Tests Errored", "Tests Timed Out"):
        assert not swe_bench.is_resolved(f"{text}>>>>> {fault}\n", tests)
    assert not swe_bench.is_resolved(text, expected(STYLES[name.partition("_")[0]], PASS_TO_PASS=["test_other"]))


# ---- graders ----


def test_the_graders_verdict_comes_from_another_process():
    assert grade("swebench", expected(PYTEST), log("pytest_resolved"), None)["score"] == 1.0
    assert grade("swebench", expected(PYTEST), log("pytest_unresolved"), 0) == UNREADABLE
    summary = "== short test summary info ==\nPASSED t.py::test_a\n"
    assert grade("r2e_gym", '{"test_a": "PASSED"}', summary, 1)["score"] == 1.0
    assert grade("r2e_gym", '{"test_a": "FAILED"}', summary, 0)["score"] == 0.0
    assert grade("exit_code", None, "", 0)["score"] == 1.0
    assert grade("exit_code", None, "PASSED", 1)["score"] == grade("exit_code", None, "", None)["score"] == 0.0


def test_a_log_that_a_parser_cannot_read_in_time_or_at_all_is_no_success_and_counted(monkeypatch):
    sympy = expected(PYTEST, repo="sympy/sympy", version="1.9")
    slow = f": '>>>>> Start Test Output'\n{' a' * 300_000}\n: '>>>>> End Test Output'\n"  # quadratic time in its parser
    monkeypatch.setattr(limited, "TIMEOUT", 1.0)
    assert grade("swebench", sympy, slow, 0) == UNREADABLE | {"timed_out": 1.0}
    unknown = expected(PYTEST, version="0.1")  # swebench raises KeyError
    assert grade("swebench", unknown, log("pytest_resolved"), 0) == UNREADABLE | {"verifier_error": 1.0}
    monkeypatch.undo()
    assert grade("swebench", expected(PYTEST), log("pytest_resolved"), None)["score"] == 1.0


@pytest.mark.parametrize(
    ("grader", "row_expects", "message"),
    [
        ("pytest", None, "grader=pytest is not valid: use one of exit_code, r2e_gym, swebench"),
        ("exit_code", "{}", "expected='{}' needs a grader that reads it: r2e_gym, swebench"),
        ("r2e_gym", None, "expected='null' must be a JSON object of test names"),
        ("swebench", None, "expected='null' must be a JSON object with repo, version, instance_id, FAIL_TO_PASS"),
        ("swebench", expected(PYTEST, FAIL_TO_PASS=[]), "FAIL_TO_PASS is not empty"),
        ("swebench", expected(PYTEST, PASS_TO_PASS="[]"), "must be a JSON object with repo"),
        ("swebench", expected(PYTEST, version=""), "must be a JSON object with repo"),
    ],
)
def test_a_row_that_nobody_can_judge_is_refused(grader, row_expects, message):
    with pytest.raises(ValueError, match=message):
        check(grader, row_expects)
    check("exit_code", None)
    check("swebench", expected(PYTEST))
