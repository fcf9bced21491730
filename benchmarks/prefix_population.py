"""A model of re-rollouts from prefixes, for tests of a prefix controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from recipe.prefix_sampling.prefix_control import PrefixControl
from verl_ext import checks
from verl_ext.lab.simulate.engine import PrefixEffect
from verl_ext.lab.simulate.population import sigmoid

LOGITS = np.linspace(-8, 8, 161)
QUANTILES = [NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)]


@dataclass(frozen=True)
class Children:
    """Groups of n rollouts that will start from a prefix; the prefix ratio is chosen later.

    The random numbers are drawn beforehand, so all controllers meet the same random numbers.

    Attributes:
        logits: (...) logits of success without a prefix.
        gains: (...) change of the logit by a whole parent trajectory; negative for failed parents.
        luck: (..., n) uniform in [0, 1]; a rollout succeeds where its number is below the success rate.
        effect: the model of prefixes.
    """

    logits: np.ndarray
    gains: np.ndarray
    luck: np.ndarray
    effect: PrefixEffect

    def __getitem__(self, index: int) -> Children:
        return Children(self.logits[index], self.gains[index], self.luck[index], self.effect)

    def pass_rates(self, ratio: float, shift: float = 0.0) -> np.ndarray:
        """(...) pass rates observed with a prefix of ``ratio``; ``shift`` is added to the logits."""
        rates = sigmoid(self.effect.moved(self.logits, self.gains, ratio) + shift)
        return (self.luck < rates[..., None]).mean(axis=-1)


@dataclass(frozen=True)
class Population:
    """Prompts of different difficulty, and prefixes that move the logit of success.

    Rollouts of a prompt succeed independently with probability sigmoid(theta), theta ~ N(0, ``difficulty_spread``^2). A
    prompt is in bucket k when k of its n parent rollouts succeed, so the density of theta given k is this
    prior times Binomial(k; n, sigmoid(theta)), normalised. A prefix of ratio rho makes the logit of its n children

        theta + gain rho^curvature + shift    from a success, for buckets k < n/2
        theta - gain rho^curvature + shift    from a failure, for buckets k > n/2

    with one gain per prompt (:class:`~verl_ext.lab.simulate.engine.PrefixEffect`). ``shift`` is drift: children become
    easier or harder during training at the same k and the same ratio.
    """

    n: int = 8
    median_gain: float = 4.0
    gain_spread: float = 0.5
    curvature: float = 1.0
    difficulty_spread: float = 1.5

    def children(self, bucket: int, shape: tuple[int, ...], rng: np.random.Generator) -> Children:
        """Children of random prompts of a bucket; ``shape`` is the shape of their logits."""
        logits = rng.choice(LOGITS, shape, p=self._posterior(bucket))
        gains = self._gains(bucket, rng.normal(size=shape))
        return Children(logits, gains, rng.random((*shape, self.n)), self.effect)

    def pass_rate(self, bucket: int, ratio: float, shift: float = 0.0) -> float:
        """Expected pass rate, over prompts, gains and rollouts."""
        gains = self._gains(bucket, np.array(QUANTILES))
        rates = sigmoid(self.effect.moved(LOGITS[:, None], gains, ratio) + shift)
        return float(self._posterior(bucket) @ rates.mean(axis=1))

    @property
    def effect(self) -> PrefixEffect:
        """The model of prefixes."""
        return PrefixEffect(self.median_gain, self.gain_spread, self.curvature)

    def _gains(self, bucket: int, normal: np.ndarray) -> np.ndarray:
        side = 1 if 2 * bucket < self.n else -1
        return side * self.effect.gains(normal)

    def _posterior(self, bucket: int) -> np.ndarray:
        """(len(LOGITS),) probability of each of ``LOGITS``, given k successes of n."""
        k = checks.number("bucket", bucket, 0, self.n)
        prior = -0.5 * (LOGITS / self.difficulty_spread) ** 2
        likelihood = -k * np.logaddexp(0, -LOGITS) - (self.n - k) * np.logaddexp(0, LOGITS)
        weights = np.exp(prior + likelihood)
        return weights / weights.sum()


def steer(
    control: PrefixControl, children: Mapping[int, Children], shifts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Give a controller the children step by step; all children of a step start from the same ratio.

    Args:
        control: the controller; its state changes.
        children: by controlled bucket, each (steps, groups).
        shifts: (steps,) drift of the logits.

    Returns:
        (steps, buckets) ratios used, and (steps, buckets) mean pass rates observed.
    """
    ratios, pass_rates = np.empty((2, len(shifts), len(control.buckets)))
    for step, shift in enumerate(shifts):
        for column, bucket in enumerate(control.buckets):
            ratios[step, column] = control.ratio(bucket)
            observed = children[bucket][step].pass_rates(ratios[step, column], shift)
            pass_rates[step, column] = observed.mean()
            for pass_rate in observed.tolist():
                control.observe(bucket, pass_rate)
    return ratios, pass_rates
