"""The reward of an agent's submission, and the reading of R2E-Gym's logs.

``reward.custom_reward_function.path=pkg://verl_ext.data.swe_reward`` (the name is verl's default, ``compute_score``).

The tool ``submit`` (:mod:`verl_ext.driver.tools.shell`) runs the tests, lets the row's grader judge them
(:mod:`verl_ext.data.swe_grading`), and puts the verdict into the trajectory's ``extra_fields``. verl's agent loop
returns these fields with the response, its worker sends them to the reward worker as ``tool_extra_fields``, and its
``naive`` reward manager adds them to ``extra_info``. The model cannot write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

VERDICT = "tests_passed"
SANDBOX_ENDED = "sandbox_ended"  # the model has ended its sandbox before or during the tests
GRADING = ("timed_out", "verifier_error")  # of :func:`verl_ext.data.limited.judge`
HEADING = "short test summary info"  # of the summary that ``pytest -rA`` prints
PASSED = "PASSED"
STATUSES = (PASSED, "FAILED", "ERROR")  # R2E-Gym's order: the first one in a line counts; for PASSED see statuses()
CONTROL = re.compile(r"\x1b\[[0-9;]*m|\r")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """1 if the tests passed, 0 if they did not or nothing was submitted.

    Returns:
        ``score``, ``acc``, ``submitted``, ``sandbox_ended``, ``timed_out`` and ``verifier_error``, all in {0, 1}. The
        last two say that the grader could not read the log of the tests.
    """
    known = extra_info or {}
    score, ended = float(bool(known.get(VERDICT))), bool(known.get(SANDBOX_ENDED))
    submitted = known.get(VERDICT) is not None and not ended
    result = {"score": score, "acc": score, "submitted": float(submitted), SANDBOX_ENDED: float(ended)}
    return result | {name: float(known.get(name) or 0.0) for name in GRADING}


def statuses(log: str, expected: Collection[str] = ()) -> dict[str, str]:
    """Status by test name, from the last summary in pytest's output; empty if pytest printed no summary.

    A name is the text after the file, with dots, without pytest's reason: ``FAILED t.py::A::test_x - KeyError`` is the
    test ``A.test_x``. R2E-Gym names its expected outcomes in the same way.

    Args:
        expected: the names of the expected outcomes, as the data set writes them.
    """
    found: dict[str, str] = {}
    _, heading, summary = CONTROL.sub("", log).rpartition(HEADING)
    for line in summary.split("\n") if heading else ():
        status = next((status for status in STATUSES if status in line), None)
        text = ".".join(line.split("::")[1:])
        # R2E-Gym reads PASSED anywhere in a line, so that a patch with `raise ValueError("PASSED")` would pass: pytest
        # prints the reason of a failure in its line. R2E-Gym keeps the reason in the name of an outcome misread like
        # this: if the data set expects this very text, the line is misread here, too.
        misread = " - " in text and text in expected
        if status == PASSED and not line.startswith(PASSED) and not misread:
            # Also a status that is otherwise not read, such as XFAIL: no expected outcome has it, so the log fails.
            status = line.split(" ")[0]
        if status is not None:
            found[_name(text)] = status
    return found


def expected_statuses(expected: str) -> dict[str, str]:
    """Status by test name, from the JSON of a data set.

    Raises:
        ValueError: the text is not a JSON object, or the object is empty.
    """
    return {_name(name): status for name, status in _outcomes(expected).items()}


def is_as_expected(log: str, expected: str) -> bool:
    """Whether exactly the expected tests ran, each with the expected status, which may be a failure.

    Lines without a name, such as the error of a file that cannot be imported, make one entry with any status, as in
    R2E-Gym's grader. Unlike there, the expected outcomes must have this entry, so that it never replaces a test.

    Raises:
        ValueError: see :func:`expected_statuses`.
    """
    found, wanted = statuses(log, _outcomes(expected)), expected_statuses(expected)
    return found.keys() == wanted.keys() and all(status == wanted[name] for name, status in found.items() if name)


def _outcomes(expected: str) -> dict[str, str]:
    parsed = json.loads(expected)
    if not isinstance(parsed, Mapping) or not parsed:
        raise ValueError(f"expected={expected[:80]!r} must be a JSON object of test names with their status.")
    return {CONTROL.sub("", str(name)): str(status) for name, status in parsed.items()}


def _name(text: str) -> str:
    return text.split(" - ")[0].strip()
