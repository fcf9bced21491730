"""What pytest says of each test, read from the "short test summary info" that ``pytest -rA`` prints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

HEADING = "short test summary info"
STATUSES = ("PASSED", "FAILED", "ERROR")  # where a line has several, the first of these counts
CONTROL = re.compile(r"\x1b\[[0-9;]*m|\r")


def statuses(log: str) -> dict[str, str]:
    """Test names with their status; empty where pytest did not get as far as its summary.

    A name is what follows the file, with dots, and without pytest's reason: ``FAILED t.py::A::test_x - KeyError`` is
    the test ``A.test_x``. This is how R2E-Gym has named the outcomes that it expects.
    """
    found: dict[str, str] = {}
    _, heading, summary = CONTROL.sub("", log).rpartition(HEADING)
    for line in summary.split("\n") if heading else ():
        status = next((status for status in STATUSES if status in line), None)
        if status is not None:
            found[_name(".".join(line.split("::")[1:]))] = status
    return found


def expected_statuses(expected: str) -> dict[str, str]:
    """The outcomes that a data set expects, from their JSON.

    Raises:
        ValueError: no JSON object, or an empty one.
    """
    parsed = json.loads(expected)
    if not isinstance(parsed, Mapping) or not parsed:
        raise ValueError(f"expected={expected[:80]!r} must be a JSON object of test names with their status.")
    return {_name(CONTROL.sub("", str(name))): str(status) for name, status in parsed.items()}


def is_as_expected(log: str, expected: str) -> bool:
    """Whether exactly the expected tests ran, each with the expected status; some are expected to fail.

    Raises:
        ValueError: see :func:`expected_statuses`.
    """
    return statuses(log) == expected_statuses(expected)


def _name(text: str) -> str:
    return text.split(" - ")[0].strip()
