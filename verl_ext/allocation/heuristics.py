"""Rules of thumb that the papers compare with: hard-first (HORA §4.2), inverse accuracy and variance (VIP App. C.1).

VIP's two rules set counts in proportion to a weight, within bounds. Webster's method rounds the counts and keeps their
sum: the next rollout goes to the prompt with the largest weight / (n + 1/2), where n counts the prompt's rollouts so
far. The paper instead solves a relaxation and rounds by its Algorithm 2, but Algorithm 2 needs an objective, and these
weights define none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.allocation import greedy

EPSILON = 1e-12, 1e12  # limits within which weights are neither 0 nor infinite


def hard_first(successes: ArrayLike, budget: int, *, upper: ArrayLike | None = None) -> np.ndarray:
    """(n,) int64 additional rollouts, all to prompts without a success so far, evenly (HORA §4.2, ablation).

    If no prompt is without a success, or ``upper`` stops these prompts, the remaining rollouts go evenly to the other
    prompts, so that the budget is spent.

    Args:
        successes: (n,) correct rollouts so far.
        budget: additional rollouts in all.
        upper: scalar or (n,), most additional rollouts; None: no limit.

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    successes = checks.within("successes", checks.vector("successes", successes), 0, np.inf)
    n, budget = successes.size, int(checks.budget(budget, None))
    counts = np.zeros(n, dtype=np.int64)
    upper = np.full(n, budget) if upper is None else checks.integers("upper", upper, n)
    greedy.require_feasible(budget, counts, upper, np.ones(n))
    hard = successes == 0
    for_hard = min(budget, int(upper[hard].sum()))
    for rows, share in ((hard, for_hard), (~hard, budget - for_hard)):
        if rows.any():
            counts[rows] = greedy.maximize(greedy.even, [counts[rows]], share, counts[rows], upper[rows])
    return counts


def inverse_accuracy(
    success_rates: ArrayLike, budget: int, *, lower: ArrayLike, upper: ArrayLike, epsilon: float = 0.01
) -> np.ndarray:
    """(n,) int64 counts in proportion to 1 - p + epsilon, within bounds (VIP Appendix C.1).

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    return proportional(1 - rates + checks.number("epsilon", epsilon, *EPSILON), budget, lower=lower, upper=upper)


def inverse_variance(
    success_rates: ArrayLike | None,
    budget: int,
    *,
    lower: ArrayLike,
    upper: ArrayLike,
    epsilon: float = 0.01,
    reward_variance: ArrayLike | None = None,
) -> np.ndarray:
    """(n,) int64 counts in proportion to 1 / (variance + epsilon), within bounds (VIP Appendix C.1).

    The variance is ``reward_variance``, or p (1 - p) without ``reward_variance``.

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    if reward_variance is not None:
        spread = checks.within("reward_variance", checks.vector("reward_variance", reward_variance), 0, 1e300)
    elif success_rates is None:
        raise ValueError("success_rates=None needs reward_variance.")
    else:
        rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
        spread = rates * (1 - rates)
    return proportional(1 / (spread + checks.number("epsilon", epsilon, *EPSILON)), budget, lower=lower, upper=upper)


def proportional(weights: ArrayLike, budget: int, *, lower: ArrayLike, upper: ArrayLike) -> np.ndarray:
    """(n,) int64 counts in proportion to ``weights``, within bounds; equal weights spread the budget evenly.

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    weights = checks.positive("weights", checks.vector("weights", weights))
    lower, upper = (checks.integers(name, bound, weights.size) for name, bound in (("lower", lower), ("upper", upper)))
    return greedy.maximize(_webster, [weights], checks.budget(budget, None), lower, upper)


def _webster(weights: np.ndarray) -> greedy.Gain:
    return lambda groups, counts: weights[groups] / (counts + 0.5)
