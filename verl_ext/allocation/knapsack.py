"""Knapsack-RL: maximise the value of a non-zero gradient over the prompts of a batch (Knapsack-RL §4)."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.allocation import greedy

GRADIENTS = ("grpo", "rloo")  # both give a group no gradient if all its rewards are equal
CONFIDENCE = 0.9  # alpha of Proposition 1; with 0.9, a rate of 0.9 needs 22 rollouts, the cost in Table 2


def allocate(
    success_rates: ArrayLike,
    budget: float,
    *,
    lower: ArrayLike = 2,
    upper: ArrayLike = 128,
    info_gain: bool = True,
    gradient: str = "grpo",
    fallback: bool = True,
    costs: ArrayLike | None = None,
) -> np.ndarray:
    """Rollouts per prompt that maximise sum_i Value(N_i, p_i) (Knapsack-RL eq. 5 and 6, Proposition 4).

    Value(N, p) = ProbNonZeroGradient(N, p) * InfoGain(p), with ProbNonZeroGradient(N, p) = 1 - p^N - (1 - p)^N and
    InfoGain(p) = p (1 - p)^2 (Proposition 2).

    ``fallback`` (Appendix C) divides the rollouts without value. A prompt has enough rollouts when max(p, 1 - p)^N is
    at most 0.1 (:func:`rollouts_needed`). Its gradient is then non-zero with probability 0.86 or more: Proposition 1
    leaves out min(p, 1 - p)^N, which matters near p = 1/2 only. The budget goes, in this order, to: ``lower`` for all
    prompts; prompts with rates between 0 and 1, by value, until they have enough in total; prompts with rate 0, in
    equal shares; prompts between 0 and 1 again; prompts with rate 1, in equal shares.

    Args:
        success_rates: (n,) in [0, 1].
        budget: rollouts in all; with ``costs``, units of cost.
        lower: scalar or (n,), N_low, at least 1. A prompt's first rollout adds no value, and the second does. From 0
            rollouts on, values are therefore not concave, and the greedy procedure of Proposition 4 is not optimal.
        upper: scalar or (n,), N_up.
        info_gain: False drops InfoGain from the value (Table 3, ablation).
        gradient: "grpo" or "rloo", which Appendix E gives the same value.
        fallback: False allocates by value only; gains of zero go to the lowest index.
        costs: (n,) expected cost of one rollout, for instance its tokens.

    Returns:
        (n,) int64; sums to ``budget`` (with ``costs``: costs at most ``budget``).

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    checks.choice("gradient", gradient, GRADIENTS)
    info_gain, fallback = checks.flag("info_gain", info_gain), checks.flag("fallback", fallback)
    n = rates.size
    lower, upper = checks.integers("lower", lower, n, least=1), checks.integers("upper", upper, n)
    costs = None if costs is None else checks.positive("costs", checks.vector("costs", costs, n))
    budget = checks.budget(budget, costs)
    objective = partial(_gain, info_gain=info_gain)
    if not fallback or ((rates > 0) & (rates < 1)).all():
        return greedy.maximize(objective, [rates], budget, lower, upper, costs=costs)
    return _with_fallback(objective, rates, budget, lower, upper, costs)


def value(counts: ArrayLike, success_rates: ArrayLike, *, info_gain: bool = True) -> np.ndarray:
    """(n,) Value(N, p) (Knapsack-RL eq. 6), without InfoGain where ``info_gain`` is False.

    Raises:
        ValueError: the argument named in the message is out of range or of the wrong shape.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    likely = nonzero_gradient(counts, rates)
    return likely * rates * (1 - rates) ** 2 if info_gain else likely


def nonzero_gradient(counts: ArrayLike, success_rates: ArrayLike) -> np.ndarray:
    """(n,) probability of a non-zero gradient from N rollouts, 1 - p^N - (1 - p)^N (Knapsack-RL §3.2); 0 if N is 0.

    Raises:
        ValueError: the argument named in the message is out of range or of the wrong shape.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    counts = checks.integers("counts", counts, rates.size)
    return np.where(counts > 0, 1 - rates**counts - (1 - rates) ** counts, 0.0)


def rollouts_needed(success_rates: ArrayLike, *, confidence: float = CONFIDENCE) -> np.ndarray:
    """(n,) float64: ceil(ln(1 - confidence) / ln(max(p, 1 - p))) (Knapsack-RL Proposition 1); inf at rates 0 and 1.

    Raises:
        ValueError: a rate outside [0, 1] or a confidence outside (0, 1).
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must lie between 0 and 1, both excluded.")
    slowest = np.maximum(rates, 1 - rates)
    with np.errstate(divide="ignore"):
        return np.where(slowest < 1, np.ceil(np.log1p(-confidence) / np.log(slowest) - 1e-9), np.inf)


def _gain(rate: np.ndarray, *, info_gain: bool) -> greedy.Gain:
    """Value(N + 1) - Value(N) = InfoGain(p) * (q p^N + p q^N), with q = 1 - p."""
    worth = rate * (1 - rate) ** 2 if info_gain else np.ones_like(rate)
    log_rate = np.log(rate, out=np.full(rate.size, _LOG_ZERO), where=rate > 0)
    log_miss = np.where(rate < 1, np.log1p(-np.minimum(rate, 1 - 2**-53)), _LOG_ZERO)
    of_rate, of_miss = worth * (1 - rate), worth * rate

    def gain(groups: np.ndarray | slice, counts: np.ndarray) -> np.ndarray:
        result = of_rate[groups] * np.exp(counts * log_rate[groups])
        result += of_miss[groups] * np.exp(counts * log_miss[groups])
        return result

    return gain


_LOG_ZERO = -1000.0  # exp(-1000) is 0, and 0 * -1000 is 0 where 0 * -inf would be nan


def _with_fallback(
    objective: greedy.Objective,
    rates: np.ndarray,
    budget: float,
    lower: np.ndarray,
    upper: np.ndarray,
    costs: np.ndarray | None,
) -> np.ndarray:
    unit = np.ones(lower.size) if costs is None else costs
    greedy.require_feasible(budget, lower, upper, unit)
    unsolved, solved = rates == 0, rates == 1
    between = ~unsolved & ~solved
    needs = np.clip(rollouts_needed(rates), lower, upper)

    def room(rows: np.ndarray, most: np.ndarray) -> float:
        return float((most - lower)[rows] @ unit[rows])

    left = budget - float(lower @ unit)
    for_between = min(left, room(between, needs))
    for_unsolved = min(left - for_between, room(unsolved, upper))
    for_between = min(left - for_unsolved, room(between, upper))
    for_solved = min(left - for_unsolved - for_between, room(solved, upper))
    counts = lower.copy()
    for rows, share, rule, columns in (
        (between, for_between, objective, [rates]),
        (unsolved, for_unsolved, greedy.even, [lower]),
        (solved, for_solved, greedy.even, [lower]),
    ):
        if rows.any():
            counts[rows] = greedy.maximize(
                rule,
                [column[rows] for column in columns],
                share + float(lower[rows] @ unit[rows]),
                lower[rows],
                upper[rows],
                costs=None if costs is None else costs[rows],
            )
    return counts
