"""pass@k from n samples per problem, n at least k; maj@k is in :mod:`verl_ext.evaluation.majority`."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks


def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> np.ndarray:
    """Probability that at least one of k samples, drawn from the n without replacement, is correct.

    1 - C(n - c, k) / C(n, k), which is unbiased for 1 - (1 - p)^k at every p; 1 - (1 - c / n)^k is not (Chen et al.
    2021, "Evaluating Large Language Models Trained on Code", §2.1, eq. 1). With a = min(c, k) and b = max(c, k) the
    quotient is the product over i < a of 1 - b / (n - i); its logarithm is summed, so no factorial can overflow. Time
    grows with the largest min(c, k).

    Args:
        n: samples per problem, at least 1.
        c: correct ones among them, in [0, n].
        k: samples drawn, in [1, n].

    Returns:
        float64 in [0, 1] of the shape the arguments broadcast to; exactly 1 where n - c < k, exactly 0 where c = 0.

    Raises:
        ValueError: an argument is not an integer, not finite or out of range, or the shapes do not broadcast.
    """
    n, c, k = _whole("n", n, 1), _whole("c", c, 0), _whole("k", k, 1)
    shapes = n.shape, c.shape, k.shape
    try:
        n, c, k = np.broadcast_arrays(n, c, k)
    except ValueError as error:
        raise ValueError(f"n, c and k have the shapes {shapes}, which do not broadcast.") from error
    _at_most_n("c", c, n)
    _at_most_n("k", k, n)
    few, many = np.minimum(c, k), np.maximum(c, k)
    certain = n - c < k
    log_miss = np.zeros(n.shape)
    for i in range(int(few[~certain].max(initial=0))):
        # 0 replaces factors after the end of a problem's product, and factors whose log would be infinite
        log_miss += np.log1p(-np.where((i < few) & ~certain, many / (n - np.minimum(i, n - 1)), 0.0))
    return np.where(certain, 1.0, -np.expm1(log_miss))


def _whole(name: str, values: ArrayLike, least: int) -> np.ndarray:
    """``values`` as int64 of the same shape, each at least ``least``."""
    flat = checks.vector(name, np.ravel(values))
    return checks.integers(name, flat, flat.size, least).reshape(np.shape(values))


def _at_most_n(name: str, values: np.ndarray, n: np.ndarray) -> None:
    beyond = values > n
    if beyond.any():
        row = int(np.argmax(beyond))
        raise ValueError(f"{name}={values.flat[row]} must be at most n={n.flat[row]}.")
