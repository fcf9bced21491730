"""Mathematical answers, checked by math-verify in worker processes with limited time and memory.

``reward.custom_reward_function.path=pkg://verl_ext.data.math_reward`` (the name is verl's default, ``compute_score``).
"""

from __future__ import annotations

from verl_ext.data.limited import TooExpensive, call_limited

TIMEOUT = 15.0  # seconds per answer; math-verify's own limits (5 s to parse, 5 s to compare) come first


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_
) -> dict[str, float]:
    """1 if the answer in ``solution_str`` equals ``ground_truth``, else 0.

    A model's answer is untrusted text: sympy may compare it forever, or use up all memory. A separate
    process does the comparison and is killed at its limits; the answer then counts as wrong and in ``timed_out``.

    Returns:
        ``score`` and ``acc`` in {0, 1}, and ``timed_out`` in {0, 1}.
    """
    try:
        correct = call_limited(is_correct, solution_str, ground_truth, timeout=TIMEOUT, prepare=prepare)
        timed_out = False
    except TooExpensive:
        correct, timed_out = False, True
    return {"score": float(correct), "acc": float(correct), "timed_out": float(timed_out)}


def is_correct(solution: str, ground_truth: str) -> bool:
    """Whether math-verify finds answer and truth equal; its time limits are signals and need a main thread."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{ground_truth}}}"), parse(solution)))


def prepare() -> None:
    """Import math-verify and sympy, including their imports at first use."""
    is_correct(r"\boxed{1}", "1")
