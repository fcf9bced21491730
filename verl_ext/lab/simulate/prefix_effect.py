"""What starting from a prefix of a trajectory does to success; shared with the model of the prefix controller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_ext import checks


@dataclass(frozen=True)
class PrefixEffect:
    """A prefix of ratio rho moves the logit of success by gain rho^curvature: up from a success, down from a failure.

    Gains differ from prompt to prompt: gain ~ LogNormal(ln ``median_gain``, ``gain_spread``^2). Above a ``curvature``
    of 1 the end of a trajectory says more than its beginning. Assumed, for want of data: the effect is monotone in the
    ratio, of this form, and of the same size on both sides.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    median_gain: float = 4.0
    gain_spread: float = 0.5
    curvature: float = 1.0

    def __post_init__(self):
        checks.positive_number("median_gain", self.median_gain)
        checks.number("gain_spread", self.gain_spread, 0)
        checks.positive_number("curvature", self.curvature)

    def gains(self, normal: np.ndarray) -> np.ndarray:
        """What a whole successful trajectory adds to the logit, from standard normal numbers."""
        return self.median_gain * np.exp(self.gain_spread * normal)

    def moved(self, logits: np.ndarray, gains: np.ndarray, ratio: np.ndarray | float) -> np.ndarray:
        """Logits behind a prefix; ``gains`` are negative where it is of a failure."""
        return logits + gains * ratio**self.curvature
