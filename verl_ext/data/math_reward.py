"""Mathematical answers, checked by math-verify in worker processes with a time-out.

``reward.custom_reward_function.path=pkg://verl_ext.data.math_reward`` (the name is verl's default, ``compute_score``).
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import TimeoutError
from functools import cache

from pebble import ProcessExpired, ProcessPool

TIMEOUT = 15.0  # seconds per answer; math-verify's own limits (5 s to parse, 5 s to compare) come first
WORKERS = 2  # per reward worker of verl


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_
) -> dict[str, float]:
    """1 if the answer in ``solution_str`` equals ``ground_truth``, else 0.

    A model's answer is untrusted text, and comparing it can take sympy for ever or all memory, so it is done in a
    process that can be killed. One that had to be is wrong and counted in ``timed_out``.

    Returns:
        ``score`` and ``acc`` in {0, 1}, and ``timed_out`` in {0, 1}.
    """
    try:
        correct = _pool().schedule(is_correct, args=(solution_str, ground_truth), timeout=TIMEOUT).result()
        timed_out = False
    except (TimeoutError, ProcessExpired):
        correct, timed_out = False, True
    return {"score": float(correct), "acc": float(correct), "timed_out": float(timed_out)}


def is_correct(solution: str, ground_truth: str) -> bool:
    """Whether math-verify finds the two equal. Its time-outs are signals, so call it from a main thread."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{ground_truth}}}"), parse(solution)))


@cache
def _pool() -> ProcessPool:
    # Not forked: the reward worker that calls this runs threads.
    return ProcessPool(max_workers=WORKERS, context=multiprocessing.get_context("spawn"))
