"""R2E-Gym's repositories as a verl data set for agents: an issue, a container image, and tests of the result.

``verl-ext data r2e_gym --out DIR`` writes ``DIR/r2e_gym/train.parquet`` and ``validation.parquet``.
``examples/swe_tools.yaml`` holds the tools; the reward is :mod:`verl_ext.data.swe_reward`.

The commands in a row follow R2E-Gym's own runtime (``agenthub/runtime/docker.py`` and ``execution_log_parser.py`` of
github.com/R2E-Gym/R2E-Gym): the repository is in ``/testbed``, tests and their script wait in ``/root``
while the agent works, and a submission passes if every test ends as in ``expected_output_json``. There are three
differences: ``/testbed`` gets its link to the tests only when they run; a failure whose reason holds the word PASSED is
no success; and the error of a file cannot stand for a test that did not run. The tests are hidden, not protected: an
agent looking in ``/root`` finds them, and can change them.

Not verified: columns, file names, license and commit come from the hub's page and from public programs reading the
data set, and tests here use rows that imitate it. Nobody has read the data set itself or started an image. With another
layout of an image, its setup fails, and so does every rollout in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.data.catalog import DataSet, Question, Row, text
from verl_ext.data.swe_reward import expected_statuses

INSTRUCTION = """\
There is a repository in /testbed. Change it so that this issue is resolved:

<issue>
{question}
</issue>

Use the shell to find the cause, to reproduce the problem with a short script, and to change the code. Leave the tests
as they are. When the problem is gone and nothing else is broken, call submit."""
PATH = "PATH=/root/.venv/bin:/root/.local/bin:/root/.cargo/bin:$PATH"
SETUP = """\
set -e
cd /testbed
[ -e /root/.venv ] || ln -s /testbed/.venv /root/.venv
[ ! -e run_tests.sh ] || mv run_tests.sh /root/run_tests.sh
[ ! -d r2e_tests ] || mv r2e_tests /root/r2e_tests
[ ! -d /r2e_tests ] || mv /r2e_tests /root/r2e_tests
find . /root/r2e_tests -name __pycache__ -prune -exec rm -rf {} +
test -f /root/run_tests.sh"""
TEST_TIMEOUT = 300  # seconds
SHELL_SETUP = f"cd /testbed && export {PATH}"
TEST_COMMAND = f"cd /testbed && rm -rf r2e_tests && ln -s /root/r2e_tests r2e_tests && {PATH} bash /root/run_tests.sh"


def read(row: Row, seed: int) -> Question:
    """The issue, with the commit as the answer.

    Tests judge, so no response is compared with the answer; the commit tells apart rows with the same issue.
    """
    question, commit = issue(text(row["problem_statement"])), text(row["commit_hash"])
    return Question(question, commit, (f"{commit}\n{question}", text(row["docker_image"])))


def issue(problem_statement: str) -> str:
    """The text between ``[ISSUE]`` and ``[/ISSUE]``, or the whole text if it has no such marks."""
    _, opened, rest = problem_statement.partition("[ISSUE]")
    inside, closed, _ = rest.rpartition("[/ISSUE]")
    return (inside if opened and closed else problem_statement).strip()


def first_empty(row: Row, columns: Sequence[str]) -> str | None:
    """``no <column>`` for the first of the columns that holds no text; None if all hold one."""
    return next((f"no {column}" for column in columns if not text(row[column])), None)


def shell_and_submit(sandbox: Mapping[str, Any], tests: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the tools ``bash`` and ``submit``: the same sandbox; only ``submit`` gets the tests."""
    return {"bash": sandbox, "submit": {**sandbox, **tests}}


def unwanted(question: Question, row: Row) -> str | None:
    """The reason why no agent can work on a row: an empty column, or no expected outcomes."""
    if reason := first_empty(row, ("repo_name", "docker_image", "commit_hash", "problem_statement")):
        return reason
    try:
        expected_statuses(text(row["expected_output_json"]))
    except ValueError:
        return "no outcomes in expected_output_json"
    return None


def extra(row: Row) -> dict[str, Any]:
    """The repository, also as part of the data source, and the sandbox of the tools."""
    repository, expected = text(row["repo_name"]), expected_statuses(text(row["expected_output_json"]))
    sandbox = {"image": text(row["docker_image"]), "setup": SETUP, "shell_setup": SHELL_SETUP}
    tests = {"test_command": TEST_COMMAND, "test_timeout": TEST_TIMEOUT, "grader": "r2e_gym"}
    tools = shell_and_submit(sandbox, {**tests, "expected": json.dumps(expected)})
    return {"data_source": f"r2e_gym/{repository}", "repo_name": repository, "tools": tools}


R2E_GYM = DataSet(
    "R2E-Gym/R2E-Gym-Subset",
    ("data/train-*.parquet",),
    ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json"),
    read=read,
    file="r2e_gym/train",
    split="train",
    license="Apache-2.0",
    published="4,578",
    used_by="Prefix Sampling §3.1",
    revision="2e8108ff942f24fcb5686badfaf7f9a8808566d5",
    unwanted=unwanted,
    filter="100 held out, at random",
    held_out=100,
    held_out_file="r2e_gym/validation",
    ability="software engineering",
    template=INSTRUCTION,
    extra=extra,
)
