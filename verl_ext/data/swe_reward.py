"""The reward of an agent's submission: whether the task's tests passed.

``reward.custom_reward_function.path=pkg://verl_ext.data.swe_reward`` (the name is verl's default, ``compute_score``).

The tool ``submit`` (:mod:`verl_ext.driver.tools.shell`) runs the tests and leaves the verdict in the trajectory's
``extra_fields``. verl's agent loop returns these with the response, its worker sends them to the reward worker as
``tool_extra_fields``, and its ``naive`` reward manager adds them to ``extra_info``. The model has no way to write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERDICT = "tests_passed"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """1 if the tests passed, 0 if they did not or nothing was submitted.

    Returns:
        ``score`` and ``acc`` in {0, 1}, and ``submitted`` in {0, 1}.
    """
    verdict = (extra_info or {}).get(VERDICT)
    score = float(bool(verdict))
    return {"score": score, "acc": score, "submitted": float(verdict is not None)}
