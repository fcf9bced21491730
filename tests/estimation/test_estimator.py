"""What all estimators share: prompts are found by id or by row."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.estimation.estimator import Features


def test_rows_are_int64_also_without_a_prompt():
    named, by_row = Features("features", np.eye(3), ["a", "b", "c"]), Features("features", np.eye(3), None)
    assert named.rows(["c", "a", "c"]).tolist() == [2, 0, 2] and by_row.rows(np.array([2, 0])).tolist() == [2, 0]
    assert named.rows([]).dtype == by_row.rows([]).dtype == np.int64


@pytest.mark.parametrize("rows", [[0, 3], [-1, 2]])
def test_rows_that_do_not_exist_are_refused(rows):
    with pytest.raises(ValueError, match=rf"rows has {rows[0]} to {rows[1]}; they must be in \[0, 3\)"):
        Features("features", np.eye(3), None).rows(rows)
