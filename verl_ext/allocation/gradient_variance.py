"""VIP: minimise the summed variance of the prompts' gradients (VIP §4 and §5.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.allocation import greedy

LEAST = {"rloo": 2, "dr_grpo": 3}  # the variance is convex and decreasing from here on


def allocate(
    success_rates: ArrayLike | None,
    budget: float,
    *,
    lower: ArrayLike,
    upper: ArrayLike,
    estimator: str = "rloo",
    reward_variance: ArrayLike | None = None,
    costs: ArrayLike | None = None,
) -> np.ndarray:
    """Rollouts per prompt that minimise sum_q Var(G_q): the exact integer optimum of VIP eq. 5.

    Var(G) = a (n - 1) / n^2 for Dr. GRPO (Proposition 4.2) and a / (n - 1) for RLOO (Proposition 4.3), with
    a = 4 s^2 p (1 - p) for rewards of -1 and 1, or a = s^2 Var(R) for any reward (Appendix E). As in the paper, the
    variance s^2 of the projected gradient is the same for all prompts; multiply known values into
    ``reward_variance``.

    The paper solves the continuous relaxation and rounds (Algorithm 2); benchmarks/vip_relaxation.py has that form.

    Args:
        success_rates: (n,) in [0, 1]; may be None if ``reward_variance`` is given, which takes precedence.
        budget: rollouts in all, C; with ``costs``, units of cost.
        lower: scalar or (n,), L, at least 3 for Dr. GRPO and 2 for RLOO.
        upper: scalar or (n,), U.
        estimator: "rloo" or "dr_grpo".
        reward_variance: (n,) at least 0.
        costs: (n,) expected cost of one rollout of each prompt, for instance in tokens.

    Returns:
        (n,) int64; sums to ``budget`` (with ``costs``: costs at most ``budget``, and no further rollout fits). Rollouts
        without gain, of success rates 0 and 1, go to the lowest index.

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    scale = _scale(success_rates, reward_variance)
    lower, upper = _bounds(lower, upper, scale.size, estimator)
    costs = None if costs is None else checks.positive("costs", checks.vector("costs", costs, scale.size))
    return greedy.maximize(_GAINS[estimator], [scale], checks.budget(budget, costs), lower, upper, costs=costs)


def variance(
    counts: ArrayLike,
    success_rates: ArrayLike | None,
    *,
    estimator: str = "rloo",
    reward_variance: ArrayLike | None = None,
) -> np.ndarray:
    """(n,) Var(G_q) of each prompt for s^2 = 1 (VIP Propositions 4.2, 4.3, E.1 and E.2). ``counts`` may be real.

    Raises:
        ValueError: the argument named in the message is out of range or of the wrong shape.
    """
    scale = _scale(success_rates, reward_variance)
    checks.choice("estimator", estimator, tuple(LEAST))
    counts = checks.within("counts", checks.vector("counts", counts, scale.size), LEAST[estimator] - 1, np.inf)
    if estimator == "dr_grpo":
        return scale * (counts - 1) / counts**2
    checks.positive("counts - 1", counts - 1)
    return scale / (counts - 1)


def _scale(success_rates: ArrayLike | None, reward_variance: ArrayLike | None) -> np.ndarray:
    """a_q of the paper, for s^2 = 1."""
    size = None
    if success_rates is not None:
        rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
        if reward_variance is None:
            return 4 * rates * (1 - rates)
        size = rates.size
    if reward_variance is None:
        raise ValueError("success_rates=None needs reward_variance.")
    return checks.within("reward_variance", checks.vector("reward_variance", reward_variance, size), 0, np.inf)


def _bounds(lower: ArrayLike, upper: ArrayLike, n: int, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    checks.choice("estimator", estimator, tuple(LEAST))
    return checks.integers("lower", lower, n, LEAST[estimator]), checks.integers("upper", upper, n)


def _rloo_gain(scale: np.ndarray) -> greedy.Gain:
    """a / (n - 1) - a / n."""

    def gain(groups: np.ndarray | slice, counts: np.ndarray) -> np.ndarray:
        n = counts.astype(np.float64)
        return scale[groups] / (n * (n - 1))

    return gain


def _dr_grpo_gain(scale: np.ndarray) -> greedy.Gain:
    """a (n - 1) / n^2 - a n / (n + 1)^2 = a (n^2 - n - 1) / (n (n + 1))^2."""

    def gain(groups: np.ndarray | slice, counts: np.ndarray) -> np.ndarray:
        n = counts.astype(np.float64)
        return scale[groups] * ((n * (n - 1) - 1) / (n * (n + 1)) ** 2)

    return gain


_GAINS = {"rloo": _rloo_gain, "dr_grpo": _dr_grpo_gain}
