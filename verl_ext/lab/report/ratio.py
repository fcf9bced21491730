"""The ratio of two methods' costs over seeds, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ratio(NamedTuple):
    """Cost of the reference / cost of a method: geometric mean over paired seeds, with its 95 % interval."""

    mean: float
    low: float
    high: float


def paired(reference: Sequence[float], method: Sequence[float], chosen_among: int = 1) -> Ratio:
    """How many times less a method needs; Student's t over the logarithms of the ratios of seeds.

    If all seeds have the same ratio, the interval has no width. It then says nothing of chance.

    Args:
        reference: (S,) costs above 0, one per seed; at least two.
        method: (S,) costs of the method with the same seeds.
        chosen_among: number of compared methods, if this method was chosen for its ratio. The interval is widened by
            Bonferroni's correction: with 95 % certainty, the intervals of all these methods hold.
    """
    from scipy import stats  # takes a second, and a report of single runs needs none

    logs = np.log(np.divide(reference, method))
    middle, error = float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(logs.size)
    width = float(stats.t.ppf(1 - 0.025 / chosen_among, logs.size - 1)) * error
    return Ratio(math.exp(middle), math.exp(middle - width), math.exp(middle + width))
