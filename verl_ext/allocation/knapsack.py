"""Knapsack-RL: maximise the value of a non-zero gradient over the prompts of a batch (Knapsack-RL §4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.allocation import greedy

GRADIENTS = ("grpo", "rloo", "remax", "reinforce")
CONFIDENCE = 0.9  # probability of a non-zero gradient at which a prompt has enough rollouts (22 in Table 2)


def allocate(
    success_rates: ArrayLike,
    budget: float,
    *,
    lower: ArrayLike = 2,
    upper: ArrayLike = 128,
    info_gain: bool = True,
    gradient: str = "grpo",
    fallback: bool = True,
    greedy_probability: ArrayLike | None = None,
    costs: ArrayLike | None = None,
) -> np.ndarray:
    """Rollouts per prompt that maximise sum_i Value(N_i, p_i) (Knapsack-RL eq. 5 and 6, Proposition 4).

    Value(N, p) = ProbNonZeroGradient(N, p) * InfoGain(p), with InfoGain(p) = p (1 - p)^2 (Proposition 2) and
    ProbNonZeroGradient by ``gradient`` (Appendix E): see :func:`nonzero_gradient`.

    ``fallback`` (Appendix C) divides the rollouts without value. A prompt has enough rollouts when its gradient is
    non-zero with probability 0.9 (:func:`rollouts_needed`). The budget goes, in this order, to: ``lower`` for all
    prompts; prompts with rates between 0 and 1, by value, until they have enough in total; prompts with rate 0, evenly;
    prompts between 0 and 1 again; prompts with rate 1.

    Args:
        success_rates: (n,) in [0, 1].
        budget: rollouts in all; with ``costs``, units of cost.
        lower: scalar or (n,), N_low.
        upper: scalar or (n,), N_up.
        info_gain: False drops InfoGain from the value (Table 3, ablation).
        gradient: "grpo" or "rloo", "remax", "reinforce".
        fallback: False allocates by value only; gains of zero go to the lowest index.
        greedy_probability: (n,) in [0, 1], for "remax": probability of sampling the greedy response; None: the success
            rate, as if the greedy response were the correct one.
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
    lower, upper = checks.integers("lower", lower, n), checks.integers("upper", upper, n)
    costs = None if costs is None else checks.positive("costs", checks.vector("costs", costs, n))
    budget = checks.budget(budget, costs)
    repeat = _repeat_probability(rates, gradient, greedy_probability)
    columns = [rates] if greedy_probability is None else [rates, repeat]

    def objective(rate: np.ndarray, greedy_rate: np.ndarray | None = None) -> greedy.Gain:
        worth = rate * (1 - rate) ** 2 if info_gain else np.ones_like(rate)
        if gradient in ("grpo", "rloo"):
            return _grpo_gain(rate, worth)
        return _repeat_gain(_repeat_probability(rate, gradient, greedy_rate), worth)

    if not fallback or ((rates > 0) & (rates < 1)).all():
        return greedy.maximize(objective, columns, budget, lower, upper, costs=costs)
    slowest = np.maximum(rates, 1 - rates) if gradient in ("grpo", "rloo") else repeat
    needs = np.clip(_rollouts_until(slowest, CONFIDENCE), lower, upper)
    return _with_fallback(objective, columns, budget, lower, upper, needs, costs)


def value(
    counts: ArrayLike,
    success_rates: ArrayLike,
    *,
    info_gain: bool = True,
    gradient: str = "grpo",
    greedy_probability: ArrayLike | None = None,
) -> np.ndarray:
    """(n,) Value(N, p) (Knapsack-RL eq. 6), without InfoGain where ``info_gain`` is False.

    Raises:
        ValueError: the argument named in the message is out of range or of the wrong shape.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    likely = nonzero_gradient(counts, rates, gradient=gradient, greedy_probability=greedy_probability)
    return likely * rates * (1 - rates) ** 2 if info_gain else likely


def nonzero_gradient(
    counts: ArrayLike, success_rates: ArrayLike, *, gradient: str = "grpo", greedy_probability: ArrayLike | None = None
) -> np.ndarray:
    """(n,) probability of a non-zero gradient from N rollouts (Knapsack-RL §3.2, Appendix E).

    GRPO and RLOO: 1 - p^N - (1 - p)^N. ReMax: 1 - a^N, where a is the probability of the greedy response. REINFORCE:
    1 - (1 - p)^N.

    Raises:
        ValueError: the argument named in the message is out of range or of the wrong shape.
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    counts = checks.integers("counts", counts, rates.size)
    checks.choice("gradient", gradient, GRADIENTS)
    if gradient in ("grpo", "rloo"):
        return 1 - rates**counts - (1 - rates) ** counts
    return 1 - _repeat_probability(rates, gradient, greedy_probability) ** counts


def rollouts_needed(success_rates: ArrayLike, *, confidence: float = CONFIDENCE) -> np.ndarray:
    """(n,) float64: ceil(ln(1 - confidence) / ln(max(p, 1 - p))) (Knapsack-RL Proposition 1); inf at rates 0 and 1.

    Raises:
        ValueError: a rate outside [0, 1] or a confidence outside (0, 1).
    """
    rates = checks.within("success_rates", checks.vector("success_rates", success_rates), 0, 1)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must lie between 0 and 1, both excluded.")
    return _rollouts_until(np.maximum(rates, 1 - rates), confidence)


def _repeat_probability(rates: np.ndarray, gradient: str, greedy_probability: ArrayLike | None) -> np.ndarray:
    """Probability of a response without gradient: the greedy response (ReMax) or a wrong response (REINFORCE)."""
    if gradient != "remax":
        if greedy_probability is not None:
            raise ValueError(f'greedy_probability is for gradient="remax" only, and gradient={gradient!r}.')
        return 1 - rates
    if greedy_probability is None:
        return rates
    return checks.within(
        "greedy_probability", checks.vector("greedy_probability", greedy_probability, rates.size), 0, 1
    )


def _grpo_gain(rate: np.ndarray, worth: np.ndarray) -> greedy.Gain:
    """Value(N + 1) - Value(N) = worth * (q p^N + p q^N), with q = 1 - p."""
    log_rate, log_miss = _log(rate), np.where(rate < 1, np.log1p(-np.minimum(rate, 1 - 2**-53)), _LOG_ZERO)
    of_rate, of_miss = worth * (1 - rate), worth * rate

    def gain(groups: np.ndarray | slice, counts: np.ndarray) -> np.ndarray:
        result = of_rate[groups] * np.exp(counts * log_rate[groups])
        result += of_miss[groups] * np.exp(counts * log_miss[groups])
        return result

    return gain


def _repeat_gain(repeated: np.ndarray, worth: np.ndarray) -> greedy.Gain:
    """Value(N + 1) - Value(N) = worth * (1 - r) r^N."""
    log_repeated, scale = _log(repeated), worth * (1 - repeated)
    return lambda groups, counts: scale[groups] * np.exp(counts * log_repeated[groups])


_LOG_ZERO = -1000.0  # exp(-1000) is 0, and 0 * -1000 is 0 where 0 * -inf would be nan


def _log(values: np.ndarray) -> np.ndarray:
    return np.log(values, out=np.full(values.size, _LOG_ZERO), where=values > 0)


def _rollouts_until(slowest: np.ndarray, confidence: float) -> np.ndarray:
    """Smallest whole N with slowest^N <= 1 - confidence; inf where there is none."""
    with np.errstate(divide="ignore"):
        return np.where(slowest < 1, np.ceil(np.log1p(-confidence) / np.log(slowest) - 1e-9), np.inf)


def _with_fallback(
    objective: greedy.Objective,
    columns: list[np.ndarray],
    budget: float,
    lower: np.ndarray,
    upper: np.ndarray,
    needs: np.ndarray,
    costs: np.ndarray | None,
) -> np.ndarray:
    unit = np.ones(lower.size) if costs is None else costs
    greedy.require_feasible(budget, lower, upper, unit)
    unsolved, solved = columns[0] == 0, columns[0] == 1
    between = ~unsolved & ~solved

    def room(rows: np.ndarray, most: np.ndarray) -> float:
        return float((most - lower)[rows] @ unit[rows])

    left = budget - float(lower @ unit)
    for_between = min(left, room(between, needs))
    for_unsolved = min(left - for_between, room(unsolved, upper))
    for_between = min(left - for_unsolved, room(between, upper))
    for_solved = min(left - for_unsolved - for_between, room(solved, upper))
    counts = lower.copy()
    for rows, share, rule in (
        (between, for_between, objective),
        (unsolved, for_unsolved, greedy.even),
        (solved, for_solved, greedy.even),
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
