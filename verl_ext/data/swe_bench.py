"""SWE-bench Verified as a verl data set for agents: 500 issues of 12 repositories, judged by SWE-bench's own package.

``verl-ext data swe_bench_verified --out DIR`` writes ``DIR/swe_bench_verified.parquet``. Tools and reward are those of
:mod:`verl_ext.data.r2e_gym`. The package ``swebench`` (extra ``agents``) is needed twice:

1. It writes the row's test command: install the repository, apply the test patch, run the patched test files
   (``TestSpec.eval_script``). Only the tool ``submit`` has this command, and sends it to the sandbox at the submission.
2. It judges the log of this command (:func:`is_resolved`): every test in ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` passes.

``make_test_spec`` is not called: it also fetches each repository's requirements from the network, for an image that
exists already. Its function for the evaluation script is called instead.

Differences from SWE-bench's own evaluation: the tests run in the agent's container and not in a new one with the
agent's patch; the container has no network, no capabilities, 4 GB and 2 cores, unless the tools' ``deployment`` says
otherwise; and a log is cut in the middle beyond the tool's ``max_bytes``. A submission can forge a log, because code of
the repository runs in the tests and may print any line. Without a network, no model can resolve instances whose tests
ask servers of the internet; tests of psf/requests ask httpbin.org.

Not verified: nobody has read the data set itself or started an image. Columns and commit come from the hub's page and
from public programs reading the data set, and tests here use rows that imitate it.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.data.catalog import DataSet, Question, Row, text
from verl_ext.data.r2e_gym import INSTRUCTION, first_empty, shell_and_submit
from verl_ext.extras import require

if TYPE_CHECKING:
    from swebench.harness.test_spec.test_spec import TestSpec

ENVIRONMENT, REPOSITORY = "testbed", "/testbed"  # the names in SWE-bench's images
TEST_TIMEOUT = 1800  # seconds, as in ``swebench.harness.run_evaluation``
# Images of 2024 contain the history after the issue, and with it the fix. The objects stay in the packs of git.
SETUP = f"""\
set -e
cd {REPOSITORY}
for remote in $(git remote); do git remote remove "$remote"; done
git for-each-ref --format='%(refname)' --no-merged HEAD | xargs -r -n 1 git update-ref -d
rm -f .git/ORIG_HEAD .git/FETCH_HEAD
git reflog expire --expire=now --all
test -f /opt/miniconda3/bin/activate"""
SHELL_SETUP = f"source /opt/miniconda3/bin/activate && conda activate {ENVIRONMENT} && cd {REPOSITORY}"
LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
TEXTS = ("repo", "version", "instance_id")


def read(row: Row, seed: int) -> Question:
    """The issue, with the instance's id as the answer: tests judge, so no response is compared with it."""
    instance = text(row["instance_id"])
    return Question(text(row["problem_statement"]), instance, (instance, text(row["base_commit"])))


def unwanted(question: Question, row: Row) -> str | None:
    """The reason why no agent can work on a row: an empty column, no tests, or a version that swebench cannot run."""
    require("agents", "swebench")
    if reason := first_empty(row, (*TEXTS, "base_commit", "problem_statement", "test_patch")):
        return reason
    try:
        tests = expected_tests(_expected(row))
    except ValueError:
        return "no lists of tests in FAIL_TO_PASS and PASS_TO_PASS"
    if not _is_known(tests["repo"], tests["version"]):
        return "a version that swebench does not know"
    return None


def extra(row: Row) -> dict[str, Any]:
    """The sandbox of the tools; only ``submit`` gets the test patch and the names of the tests."""
    expected = _expected(row)
    spec = _spec(expected_tests(expected), _script(row))
    sandbox = {"image": spec.instance_image_key, "setup": SETUP, "shell_setup": SHELL_SETUP}
    tests = {"test_command": spec.eval_script, "test_timeout": TEST_TIMEOUT, "grader": "swebench", "expected": expected}
    return {"repo_name": text(row["repo"]), "tools": shell_and_submit(sandbox, tests)}


def expected_tests(expected: str) -> dict[str, Any]:
    """The instance and its tests, from the JSON in a row's ``expected``.

    Returns:
        ``repo``, ``version`` and ``instance_id`` as texts; ``FAIL_TO_PASS`` and ``PASS_TO_PASS`` as lists of names.

    Raises:
        ValueError: the text is no JSON object with these entries, or ``FAIL_TO_PASS`` is empty.
    """
    parsed = json.loads(expected)
    if (
        not isinstance(parsed, dict)
        or not all(isinstance(parsed.get(key), str) and parsed[key] for key in TEXTS)
        or not all(isinstance(parsed.get(key), list) for key in LISTS)
        or not all(isinstance(name, str) for key in LISTS for name in parsed[key])
        or not parsed["FAIL_TO_PASS"]
    ):
        keys = ", ".join((*TEXTS, *LISTS))
        raise ValueError(f"expected={expected[:80]!r} must be a JSON object with {keys}; FAIL_TO_PASS is not empty.")
    return {key: parsed[key] for key in (*TEXTS, *LISTS)}


def is_resolved(log: str, expected: str) -> bool:
    """Whether swebench's report on the log of the row's test command says "resolved".

    Raises:
        ValueError: see :func:`expected_tests`.
        Exception: any of swebench's parsers, for a log that surprises them.
    """
    from swebench.harness.grading import get_eval_report

    tests = expected_tests(expected)
    prediction = {"instance_id": tests["instance_id"], "model_patch": ""}  # None would mean: nothing was submitted
    descriptor = os.memfd_create("log")  # no file is left if this process is killed
    try:
        path = Path(f"/proc/self/fd/{descriptor}")
        path.write_text(log, errors="replace")
        report = get_eval_report(_spec(tests, []), prediction, str(path), include_tests_status=False)
    finally:
        os.close(descriptor)
    return bool(report[tests["instance_id"]]["resolved"])


def _expected(row: Row) -> str:
    entries: dict[str, Any] = {key: text(row[key]) for key in TEXTS}
    for key in LISTS:  # JSON in the data set of 2024, lists in others of the same form
        entries[key] = json.loads(row[key]) if isinstance(row[key], str) else list(row[key] or ())
    return json.dumps(entries)


def _script(row: Row) -> list[str]:
    from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.test_spec.create_scripts import make_eval_script_list

    instance = {key: text(row[key]) for key in TEXTS} | {"test_patch": row["test_patch"]}
    specs = MAP_REPO_VERSION_TO_SPECS[instance["repo"]][instance["version"]]
    commit, patch = text(row["base_commit"]), row["test_patch"]
    return make_eval_script_list(instance, specs, ENVIRONMENT, REPOSITORY, commit, patch)


def _spec(tests: dict[str, Any], script: list[str]) -> TestSpec:
    """The part of a specification that runs and judges tests; the parts that build an image are empty."""
    from swebench.harness.test_spec.test_spec import TestSpec

    return TestSpec(
        **tests,
        repo_script_list=[],
        env_script_list=[],
        eval_script_list=script,
        arch="x86_64",
        language="py",
        docker_specs={},
        namespace="swebench",
    )


@lru_cache(maxsize=1024)
def _is_known(repository: str, version: str) -> bool:
    from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.log_parsers import MAP_REPO_TO_PARSER

    return version in MAP_REPO_VERSION_TO_SPECS.get(repository, {}) and repository in MAP_REPO_TO_PARSER


WARM_UP = (
    "",
    json.dumps({"repo": "psf/requests", "version": "2.4", "instance_id": "-", LISTS[0]: ["-"], LISTS[1]: []}),
)
"""Arguments of :func:`is_resolved` that import swebench, which takes seconds."""

SWE_BENCH_VERIFIED = DataSet(
    "princeton-nlp/SWE-bench_Verified",
    ("data/test-*.parquet",),
    (*TEXTS, "base_commit", "problem_statement", "test_patch", *LISTS),
    read=read,
    file="swe_bench_verified",
    license="not stated; SWE-bench itself is MIT",
    published="500",
    used_by="Prefix Sampling §3.1",
    revision="c104f840cc67f8b6eec6f759ebc8b2693d585d4a",
    unwanted=unwanted,
    ability="software engineering",
    original_id="instance_id",
    template=INSTRUCTION,
    extra=extra,
)
