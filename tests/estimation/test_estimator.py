"""What all estimators share: prompts are found by id or by row."""

from __future__ import annotations

import numpy as np

from verl_ext.estimation.estimator import Features


def test_rows_are_int64_also_without_a_prompt():
    named, by_row = Features("features", np.eye(3), ["a", "b", "c"]), Features("features", np.eye(3), None)
    assert named.rows(["c", "a", "c"]).tolist() == [2, 0, 2] and by_row.rows(np.array([2, 0])).tolist() == [2, 0]
    assert named.rows([]).dtype == by_row.rows([]).dtype == np.int64
