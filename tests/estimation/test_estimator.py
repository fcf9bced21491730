"""What estimators over features share: prompts are found by row."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.estimation.estimator import Features


def test_rows_are_int64_also_without_a_prompt():
    features = Features("features", np.eye(3))
    assert features.rows(np.array([2, 0], dtype=np.int32)).tolist() == features.rows([2, 0]).tolist() == [2, 0]
    assert features.rows(np.array([2], dtype=np.int32)).dtype == features.rows([]).dtype == np.int64


@pytest.mark.parametrize("rows", [[0, 3], [-1, 2]])
def test_rows_that_do_not_exist_are_refused(rows):
    with pytest.raises(ValueError, match=rf"rows has {rows[0]} to {rows[1]}; they must be in \[0, 3\)"):
        Features("features", np.eye(3)).rows(rows)
