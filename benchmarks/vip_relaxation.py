"""VIP's own division of a budget: a continuous relaxation, rounded (VIP Theorems 5.1 and 5.2, Algorithm 2).

The package has the exact integer optimum instead, ``gradient_variance.allocate``. This form is here to check the
theorems (tests/benchmarks/test_vip_relaxation.py) and to compare both (benchmarks/allocation.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from verl_ext.allocation import gradient_variance


def continuous(
    success_rates: ArrayLike, budget: float, *, lower: int, upper: int, estimator: str = "rloo"
) -> np.ndarray:
    """(n,) float64 minimiser of the relaxation to real counts, by bisection (eq. 7 and 9).

    Prompts without variance get ``lower``, and an even share of any rollouts beyond the other prompts' ``upper``.
    ``budget`` lies between n times ``lower`` and n times ``upper``; ``lower`` is at least 3 for Dr. GRPO.
    """
    rates = np.asarray(success_rates)
    scale = 4 * rates * (1 - rates)
    varies = scale > 0
    for_varying = min(budget - lower * (~varies).sum(), upper * varies.sum())
    counts = np.empty(scale.size)
    for rows, share, solve in ((varies, for_varying, _INVERSES[estimator]), (~varies, budget - for_varying, _same)):
        if rows.any():
            counts[rows] = _bisect(lambda price: solve(price, scale[rows]), share, lower, upper)  # noqa: B023
    return counts


def allocate_rounded(
    success_rates: ArrayLike, budget: int, *, lower: int, upper: int, estimator: str = "rloo"
) -> np.ndarray:
    """(n,) int64 counts as the paper rounds them: floor, then the largest decrease of variance first (Algorithm 2)."""
    real = continuous(success_rates, budget, lower=lower, upper=upper, estimator=estimator)
    floor = np.clip(np.floor(real + 1e-9), lower, upper)
    return gradient_variance.allocate(success_rates, budget, lower=floor, upper=upper, estimator=estimator)


def _rloo_inverse(price: float, scale: np.ndarray) -> np.ndarray:
    """n with price = a / (n - 1)^2 (VIP eq. 9)."""
    return 1 + np.sqrt(scale / price)


def _dr_grpo_inverse(price: float, scale: np.ndarray) -> np.ndarray:
    """The n of at least 3 with price = a (n - 2) / n^3 (VIP eq. 7): the largest root of a cubic, by cosines."""
    ratio = np.minimum(price / scale, 1 / 27)
    return 2 / np.sqrt(3 * ratio) * np.cos(np.arccos(-3 * np.sqrt(3 * ratio)) / 3)


def _same(price: float, scale: np.ndarray) -> np.ndarray:
    return np.full(scale.size, 1 / price)


_INVERSES = {"rloo": _rloo_inverse, "dr_grpo": _dr_grpo_inverse}


@np.errstate(over="ignore", divide="ignore", under="ignore")
def _bisect(counts_at: Callable[[float], np.ndarray], share: float, lower: int, upper: int) -> np.ndarray:
    """clip(counts_at(price), lower, upper) at the price where it sums to ``share``."""
    low, high = -800.0, 800.0  # of the price's logarithm: wider than any float64
    while low < (middle := (low + high) / 2) < high:
        more = np.clip(counts_at(np.exp(middle)), lower, upper).sum() > share
        low, high = (middle, high) if more else (low, middle)
    return np.clip(counts_at(np.exp(high)), lower, upper)
