"""Value of a group's pass rate for learning: the criteria of Prefix Sampling App. E, Tables 11 and 12.

All functions broadcast arrays. They assume one prompt, rewards of 0 and 1, and n independent rollouts with success
rate p, k of which succeeded. All are symmetric in success and failure, and largest in the middle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks


class PairCount(NamedTuple):
    """A row of Table 12."""

    successes: int
    pass_rate: float
    pairs: int
    relative: float


def reward_entropy(p: ArrayLike) -> np.ndarray:
    """Bits in one reward: H(p) = -p log2 p - (1 - p) log2 (1 - p), 0 at both ends (E.1).

    Raises:
        ValueError: p outside [0, 1].
    """
    p = _rates(p)
    q = 1 - p
    # 0 log 0 is 0.
    return 0.0 - p * np.log2(np.where(p > 0, p, 1)) - q * np.log2(np.where(q > 0, q, 1))


def survival(p: ArrayLike, n: ArrayLike) -> np.ndarray:
    """Probability of a group passing the filter, with not all rewards equal: 1 - p^n - (1 - p)^n (E.2).

    Raises:
        ValueError: p outside [0, 1], or n less than 2.
    """
    p, n = _rates(p), _group_sizes(n)
    return 1 - p**n - (1 - p) ** n


def advantage_energy(k: ArrayLike, n: ArrayLike) -> np.ndarray:
    """Mean squared RLOO advantage in a group with k successes (E.3, eq. 13 to 16).

    The baseline of a rollout is the mean reward of the n - 1 others, so a success has the advantage
    1 - (k - 1) / (n - 1) = (n - k) / (n - 1), a failure -k / (n - 1), and the mean of the squares is

        (k (n - k)^2 + (n - k) k^2) / (n (n - 1)^2) = k (n - k) / (n - 1)^2.

    Raises:
        ValueError: n less than 2, or k not a whole number in [0, n].
    """
    return contrastive_pairs(k, n) / (_group_sizes(n) - 1) ** 2


def contrastive_pairs(k: ArrayLike, n: ArrayLike) -> np.ndarray:
    """Pairs of a success and a failure in a group with k successes: k (n - k) (E.4).

    Raises:
        ValueError: n less than 2, or k not a whole number in [0, n].
    """
    n = _group_sizes(n)
    k = _whole("k", k, least=0)
    if (k > n).any():
        raise ValueError(f"k={k.tolist()} must not be above n={n.tolist()}.")
    return k * (n - k)


def expected_pairs(p: ArrayLike, n: ArrayLike) -> np.ndarray:
    """Such pairs before the group is sampled: E[k (n - k)] = n (n - 1) p (1 - p) for k ~ Binomial(n, p) (E.4).

    Raises:
        ValueError: p outside [0, 1], or n less than 2.
    """
    p, n = _rates(p), _group_sizes(n)
    return n * (n - 1) * p * (1 - p)


def pair_table(n: int) -> list[PairCount]:
    """Table 12, for a group of any size: a row for each of 0, 1, ..., n successes.

    Raises:
        ValueError: n is not a whole number of at least 2.
    """
    n = checks.integer("n", n, least=2)
    pairs = contrastive_pairs(np.arange(n + 1), n).tolist()
    return [PairCount(k, k / n, count, count / max(pairs)) for k, count in enumerate(pairs)]


def _rates(p: ArrayLike) -> np.ndarray:
    return checks.within("p", checks.vector("p", np.ravel(p)), 0, 1).reshape(np.shape(p))


def _group_sizes(n: ArrayLike) -> np.ndarray:
    return _whole("n", n, least=2)


def _whole(name: str, values: ArrayLike, least: int) -> np.ndarray:
    return checks.integers(name, np.ravel(values), np.size(values), least).reshape(np.shape(values))
