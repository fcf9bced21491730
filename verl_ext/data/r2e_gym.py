"""R2E-Gym's repositories as a verl data set for agents: an issue, a container image, and tests that judge the result.

``python -m verl_ext.data.prepare r2e_gym --out DIR`` writes ``DIR/r2e_gym/train.parquet`` and ``validation.parquet``.
The tools are those of ``examples/swe_tools.yaml``, the reward is :mod:`verl_ext.data.swe_reward`.

What a row does in its container follows R2E-Gym's own runtime (``agenthub/runtime/docker.py`` and
``execution_log_parser.py`` of github.com/R2E-Gym/R2E-Gym): the repository is in ``/testbed``, tests and the script that
runs them are moved to ``/root`` while the agent works, and a submission passes if every test ends as
``expected_output_json`` says. Two things differ: tests have 280 s (there: 300 s), and the link from ``/testbed`` to
them is made when they run, not before. They are out of the way and not out of reach: an agent that looks in ``/root``
finds them.

Not verified: columns, file names, license and commit are those that the hub's page and public programs that read it
name, and tests here use rows that imitate them; the data set itself was never read, nor an image started. If an image
is laid out differently, setting it up fails, and every rollout with it.
"""

from __future__ import annotations

import json
from typing import Any

from verl_ext.data.catalog import DataSet, Problem, Row, text
from verl_ext.data.pytest_summary import expected_statuses

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
SHELL_SETUP = f"cd /testbed && export {PATH}"
TEST_COMMAND = f"cd /testbed && rm -rf r2e_tests && ln -s /root/r2e_tests r2e_tests && {PATH} bash /root/run_tests.sh"


def problem(row: Row, seed: int) -> Problem:
    """The issue, with the commit in place of an answer: there is nothing to compare a response with, and the commit
    tells apart rows whose issues read the same."""
    question, commit = issue(text(row["problem_statement"])), text(row["commit_hash"])
    return Problem(question, commit, (f"{commit}\n{question}", text(row["docker_image"])))


def issue(problem_statement: str) -> str:
    """The text between ``[ISSUE]`` and ``[/ISSUE]``, or all of it where there are no such marks."""
    _, opened, rest = problem_statement.partition("[ISSUE]")
    inside, closed, _ = rest.rpartition("[/ISSUE]")
    return (inside if opened and closed else problem_statement).strip()


def unwanted(problem: Problem, row: Row) -> str | None:
    """What a row lacks that no agent could do without."""
    for column in ("repo_name", "docker_image", "commit_hash", "problem_statement"):
        if not text(row[column]):
            return f"no {column}"
    try:
        expected_statuses(text(row["expected_output_json"]))
    except ValueError:
        return "no outcomes in expected_output_json"
    return None


def for_agents(row: dict[str, Any], original: Row) -> dict[str, Any]:
    """A row in verl's schema, with the repository's name in its source, and the sandbox that its tools start."""
    repository, expected = text(original["repo_name"]), expected_statuses(text(original["expected_output_json"]))
    sandbox = {"image": text(original["docker_image"]), "setup": SETUP, "shell_setup": SHELL_SETUP}
    tools = {
        "bash": {"create_kwargs": sandbox},
        "submit": {"create_kwargs": {**sandbox, "test_command": TEST_COMMAND, "expected": json.dumps(expected)}},
    }
    extra = {"repo_name": repository, "need_tools_kwargs": True, "tools_kwargs": tools}
    return row | {
        "data_source": f"{row['data_source']}/{repository}",
        "agent_name": "tool_agent",
        "extra_info": row["extra_info"] | extra,
    }


R2E_GYM = DataSet(
    "R2E-Gym/R2E-Gym-Subset",
    ("data/train-*.parquet",),
    ("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json"),
    problem,
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
    complete=for_agents,
)
