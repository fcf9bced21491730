"""A reward for trying a machine: any model, trained or not, solves each prompt at the rate in its ``ground_truth``.

``reward.custom_reward_function.path=pkg://verl_ext.first_run.coin``
"""

from __future__ import annotations

import hashlib


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_
) -> dict[str, float]:
    """A coin that depends on the response alone: correct with probability ``ground_truth`` over different responses.

    Groups therefore have reward spread whatever the model can do, and recipes that discard silent groups fill their
    batches.

    Returns:
        ``score`` and ``acc``, both 0 or 1.
    """
    digest = hashlib.sha256(solution_str.encode()).digest()
    correct = float(int.from_bytes(digest[:8], "big") < float(ground_truth) * 2**64)
    return {"score": correct, "acc": correct}
