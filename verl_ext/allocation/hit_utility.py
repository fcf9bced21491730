"""HORA: maximise the posterior probability that additional rollouts hit a correct answer (HORA §3.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks
from verl_ext.allocation import greedy

Prior = tuple[ArrayLike, ArrayLike]
MOST = 1e12  # largest successes, trials and prior parameters: up to here rounding keeps gains decreasing
FAR = 1e4  # from here on the logarithm of the gamma function is too coarse, and Stirling's series is exact


def allocate(
    successes: ArrayLike,
    trials: ArrayLike,
    budget: float,
    *,
    prior: Prior = (1.0, 1.0),
    lower: ArrayLike = 0,
    upper: ArrayLike | None = None,
    costs: ArrayLike | None = None,
) -> np.ndarray:
    """Additional rollouts per prompt that maximise the summed hit utility (HORA eq. 4, Algorithm 1, Phase B).

    With successes c of t trials and prior Beta(a0, b0), the posterior is Beta(a, b) = Beta(a0 + c, b0 + t - c) (eq. 2),
    the hit utility U(n) = 1 - E[(1 - P)^n] = 1 - B(a, b + n) / B(a, b) (eq. 3 and 7), and the gain of one more
    M(n) = B(a + 1, b + n) / B(a, b) (eq. 5), strictly decreasing in n.

    Args:
        successes: (n,) correct rollouts, 0 <= successes <= trials; fractions are accepted.
        trials: (n,) or scalar, rollouts so far.
        budget: additional rollouts in all; with ``costs``, units of cost.
        prior: (a0, b0), each a scalar or (n,), greater than 0 and at most 1e12, as are successes and trials.
        lower: scalar or (n,), fewest additional rollouts.
        upper: scalar or (n,), most additional rollouts; None: no limit.
        costs: (n,) expected cost of one rollout, for instance its tokens.

    Returns:
        (n,) int64; sums to ``budget`` (with ``costs``: costs at most ``budget``, and no further rollout fits).

    Raises:
        ValueError: the argument named in the message is not finite, out of range, of the wrong shape or infeasible.
    """
    alpha, beta = posterior(successes, trials, prior=prior)
    n = alpha.size
    costs = None if costs is None else checks.positive("costs", checks.vector("costs", costs, n))
    budget = checks.budget(budget, costs)
    lower = checks.integers("lower", lower, n)
    most = int(budget if costs is None else budget // costs.min() + 1)  # more than fit, so that no budget is too large
    upper = np.full(n, max(most, lower.max())) if upper is None else checks.integers("upper", upper, n)
    # Rounding of lgamma separates equal gains by more than the default tie distance.
    return greedy.maximize(_gain, [alpha, beta], budget, lower, upper, costs=costs, tie=1e-11)


def posterior(successes: ArrayLike, trials: ArrayLike, *, prior: Prior = (1.0, 1.0)) -> tuple[np.ndarray, np.ndarray]:
    """(alpha, beta) of the Beta posterior of each success rate, each (n,) (HORA eq. 2).

    Raises:
        ValueError: the argument named in the message is not finite, out of range or of the wrong shape.
    """
    successes = checks.within("successes", checks.vector("successes", successes), 0, MOST)
    trials = checks.within("trials", checks.vector("trials", trials, successes.size), 0, MOST)
    if (successes > trials).any():
        row = int(np.argmax(successes > trials))
        raise ValueError(f"successes[{row}]={successes[row]:g} is more than trials[{row}]={trials[row]:g}.")
    if not isinstance(prior, (tuple, list)) or len(prior) != 2:
        raise ValueError(f"prior={prior!r} must be a pair (alpha, beta) of numbers or (n,) arrays.")
    alpha, beta = (
        checks.positive(name, checks.vector(name, entry, successes.size), MOST)
        for name, entry in zip(("prior[0]", "prior[1]"), prior, strict=True)
    )
    return alpha + successes, beta + trials - successes


def utility(successes: ArrayLike, trials: ArrayLike, additional: ArrayLike, *, prior: Prior = (1.0, 1.0)) -> np.ndarray:
    """(n,) probability that at least one of ``additional`` rollouts is correct (HORA eq. 3 and 7).

    Raises:
        ValueError: the argument named in the message is not finite, out of range or of the wrong shape.
    """
    alpha, beta = posterior(successes, trials, prior=prior)
    additional = checks.integers("additional", additional, alpha.size)
    return -np.expm1(_log_ratio(alpha + beta, additional) - _log_ratio(beta, additional))


def prior_from_prediction(success_rates: ArrayLike, strength: ArrayLike = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """A learned prior: (s p, s (1 - p)), each (n,) (HORA eq. 14). Strength 2 and rate 0.5 are the uniform prior.

    Raises:
        ValueError: a rate outside (0, 1) or a strength that is not greater than 0.
    """
    rates = checks.vector("success_rates", success_rates)
    if ((rates <= 0) | (rates >= 1)).any():
        row = int(np.argmax((rates <= 0) | (rates >= 1)))
        raise ValueError(f"success_rates[{row}]={rates[row]:g} must lie between 0 and 1, both excluded.")
    strength = checks.positive("strength", checks.vector("strength", strength, rates.size))
    return strength * rates, strength * (1 - rates)


def _log_ratio(z: np.ndarray, step: np.ndarray) -> np.ndarray:
    """log(gamma(z) / gamma(z + step))."""
    from scipy.special import gammaln  # half of this package's import time

    ratio = gammaln(z) - gammaln(z + step)
    far = np.flatnonzero(z > FAR)
    if far.size:
        z, step = z[far], step[far]
        ratio[far] = step * (1 - np.log(z + step)) - (z - 0.5) * np.log1p(step / z)
        ratio[far] += (1 / z - 1 / (z + step)) / 12
    return ratio


def _gain(alpha: np.ndarray, beta: np.ndarray) -> greedy.Gain:
    step = alpha + 1
    constant = np.log(alpha) - np.log(alpha + beta) - _log_ratio(beta, step)

    def gain(groups: np.ndarray | slice, counts: np.ndarray) -> np.ndarray:
        return np.exp(constant[groups] + _log_ratio(beta[groups] + counts, step[groups]))

    return gain
