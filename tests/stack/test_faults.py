"""The short version of tests/faults.sh. tests/stack/test_training.py has a fault that a run recovers from."""

from __future__ import annotations

import pytest
from faults.running import CASES
from faults.verdict import REFUSED

pytestmark = pytest.mark.stack


def test_a_worker_that_dies_ends_the_run_with_its_name(task, tmp_path):
    outcome, why = CASES["an agent-loop worker dies"](task, tmp_path)
    assert outcome == REFUSED, why
