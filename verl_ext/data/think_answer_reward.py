"""Mathematical answers in ``<think>...</think><answer>...</answer>``: a reward for the format and one for the answer.

``reward.custom_reward_function.path=pkg://verl_ext.data.think_answer_reward``
"""

from __future__ import annotations

import re

from verl_ext.data import math_reward

TEXT = r"(?:(?!</?(?:think|answer)>).)*"  # without another tag
FORMAT = re.compile(rf"\s*<think>{TEXT}</think>\s*<answer>{TEXT}</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
    format_weight: float = 0.5,
    **_,
) -> dict[str, float]:
    """``score = format_weight * format + (1 - format_weight) * acc``.

    Only the text in the last ``<answer>`` tags is compared with ``ground_truth``.

    Returns:
        ``score``; ``format`` and ``acc`` in {0, 1}; ``timed_out`` as in :mod:`~verl_ext.data.math_reward`.
    """
    answers = ANSWER.findall(solution_str)
    verdict = {"acc": 0.0, "timed_out": 0.0}
    if answers:
        answer = answers[-1].strip()
        if "\\boxed" not in answer and "$" not in answer:
            answer = f"\\boxed{{{answer}}}"  # math-verify reads LaTeX only in a box or in dollar signs
        verdict = math_reward.compute_score(data_source, answer, ground_truth)
    formatted = float(FORMAT.fullmatch(solution_str) is not None)
    score = format_weight * formatted + (1 - format_weight) * verdict["acc"]
    return {"score": score, "acc": verdict["acc"], "format": formatted, "timed_out": verdict["timed_out"]}
