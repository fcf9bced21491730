"""The short version of tests/faults.sh: one fault that a run recovers from, one that ends it."""

from __future__ import annotations

import pytest
from faults.running import CASES
from faults.verdict import RECOVERED, REFUSED

pytestmark = pytest.mark.stack


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("a reward raises, is NaN or infinite", RECOVERED), ("an agent-loop worker dies", REFUSED)],
)
def test_a_fault_is_survived_or_named(fault, expected, task, tmp_path):
    outcome, why = CASES[fault](task, tmp_path)
    assert outcome == expected, why
