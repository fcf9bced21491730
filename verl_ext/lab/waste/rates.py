"""Posterior of the true success rates, given the recorded groups."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.special import betaincinv, betaln

from verl_ext.lab.waste.log import RolloutLog

BANDS = np.linspace(0, 1, 6)
BAND_NAMES = ("0 to 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %", "80 to 100 %")
LIMITS = (1e-3, 1e4)  # of alpha and beta: without limits the likelihood has no maximum if all rates are equal


def fit_prior(correct: np.ndarray, rollouts: np.ndarray) -> tuple[float, float]:
    """(alpha, beta) of the Beta distribution of success rates under which the counts are most likely.

    The counts are beta-binomial: K of n with P ~ Beta(alpha, beta). If most prompts are always or never solved, a flat
    prior is wrong: it often takes 0 of 8 for a rate well above 0, and so predicts gradients that the log does not have.

    Args:
        correct, rollouts: (G,) counts of each group.
    """
    pairs, times = np.unique(np.stack([correct, rollouts], axis=1), axis=0, return_counts=True)
    k, n = pairs.T.astype(np.float64)

    def loss(logs: np.ndarray) -> float:
        alpha, beta = np.exp(logs)
        return -float(times @ (betaln(alpha + k, beta + n - k) - betaln(alpha, beta))) / times.sum()

    found = minimize(loss, np.zeros(2), method="L-BFGS-B", bounds=[tuple(np.log(LIMITS))] * 2)
    alpha, beta = np.exp(found.x)
    return float(alpha), float(beta)


def band(rates: np.ndarray) -> np.ndarray:
    """(n,) index into :data:`BAND_NAMES` of rates in [0, 1]; a boundary belongs to the band above."""
    return np.clip(np.searchsorted(BANDS, rates, side="right") - 1, 0, len(BAND_NAMES) - 1)


class RecordedRates:
    """A success rate for every prompt at every step, from the prompt's recorded group nearest in time.

    Args:
        log: the recorded groups.
        prior: (alpha, beta) from :func:`fit_prior`.
    """

    def __init__(self, log: RolloutLog, prior: tuple[float, float]):
        self._prompt, self._batch, self._prompts = log.prompt, log.batch, len(log.prompt_ids)
        self._by_prompt = log.by_prompt
        self._places = log.prompt[self._by_prompt] * len(log.batches) + log.batch[self._by_prompt]
        self.alpha = prior[0] + log.correct
        self.beta = prior[1] + log.rollouts - log.correct
        self.mean = self.alpha / (self.alpha + self.beta)
        self.band = band(self.mean)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """(G,) success rates drawn from the posteriors of the groups.

        All groups of a prompt are drawn at the same quantile. Independent draws would make the prompt's rate jump from
        group to group, since few rollouts leave it uncertain, and methods that remember rates would look worse than
        they are.
        """
        quantile = rng.random(self._prompts)[self._prompt]
        return betaincinv(self.alpha, self.beta, quantile)

    def nearest(self, prompts: np.ndarray, batch: int) -> np.ndarray:
        """(n,) rows of the recorded groups nearest to a step; of two equally near groups, the earlier.

        Args:
            prompts: (n,) indices of prompts.
            batch: the step's place among the logged steps, from 0.
        """
        last = self._batch[-1]
        after = np.searchsorted(self._places, prompts * (last + 1) + min(batch, last))
        found = self._by_prompt[np.stack([np.maximum(after - 1, 0), np.minimum(after, self._places.size - 1)])]
        distance = np.where(self._prompt[found] == prompts, np.abs(self._batch[found] - batch), np.inf)
        return np.where(distance[0] <= distance[1], *found)
