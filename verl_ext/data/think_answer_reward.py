"""Mathematical answers in ``<think>...</think><answer>...</answer>``: a reward for the format and one for the answer.

``reward.custom_reward_function.path=pkg://verl_ext.data.think_answer_reward``
"""

from __future__ import annotations

import re

from verl_ext.data import math_reward
from verl_ext.data.limited import tagged_answer

TEXT = r"(?:(?!</?(?:think|answer)>).)*"  # without another tag
FORMAT = re.compile(rf"\s*<think>{TEXT}</think>\s*<answer>{TEXT}</answer>\s*", re.DOTALL)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    format_weight: float = 0.5,
    **_,
) -> dict[str, float]:
    """``score = format_weight * format + (1 - format_weight) * acc``.

    Only the text in the last ``<answer>`` tags is compared with ``ground_truth``, as a line ``Answer: ...`` would be.

    Returns:
        ``score``; ``format`` in {0, 1}; ``acc``, ``timed_out`` and ``verifier_error`` as of
        :func:`verl_ext.data.math_reward.compute_score`.
    """
    answer = " ".join((tagged_answer(solution_str) or "").split())
    verdict = math_reward.compute_score(data_source, answer and f"{math_reward.MARK} {answer}", ground_truth)
    formatted = float(FORMAT.fullmatch(solution_str) is not None)
    score = format_weight * formatted + (1 - format_weight) * verdict["acc"]
    return {**verdict, "score": score, "format": formatted}
