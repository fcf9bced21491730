"""pass@k and maj@k from n samples of a problem: probability that one of k samples, or their majority, is correct."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks

EXACT_OPERATIONS = 20_000  # array operations of some microseconds each, about 0.1 s per problem
DRAWS = 1024  # random draws where the exact sum takes longer; errors of draws average out over problems


def pass_at_k(n: ArrayLike, c: ArrayLike, k: ArrayLike) -> np.ndarray:
    """Probability that at least one of k samples, drawn from the n without replacement, is correct.

    1 - C(n - c, k) / C(n, k), which is unbiased for 1 - (1 - p)^k at every p; 1 - (1 - c / n)^k is not (Chen et al.
    2021, "Evaluating Large Language Models Trained on Code", §2.1, eq. 1). With a = min(c, k) and b = max(c, k) the
    quotient is the product over i < a of 1 - b / (n - i); its logarithm is summed, so no factorial can overflow. Time
    grows with the largest min(c, k).

    Args:
        n: samples per problem, at least 1.
        c: correct samples among the n, in [0, n].
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


def majority_at_k(answers: Sequence[Hashable | None], correct: ArrayLike, k: int) -> float:
    """Probability that the majority answer among k samples, drawn from the n without replacement, is correct.

    The majority answer is the answer with the most votes; ties are broken uniformly at random (Wang et al. 2023,
    "Self-Consistency Improves Chain of Thought Reasoning in Language Models"). A sample without an answer (None) is
    among the k but has no vote; without any vote, the result is not correct. The correctness of an answer is the mean
    over its samples: 0 or 1, unless a verifier contradicts itself.

    The exact result sums over the winner's number of votes v and the number of tied answers. Given their sum k, the
    votes are independent binomials (Levin 1981 does the same for multinomials), so the sum is a product of polynomials.
    Beyond ``EXACT_OPERATIONS``, the result is the mean over ``DRAWS`` seeded multivariate hypergeometric draws, with
    ties averaged exactly; its standard error is at most 0.5 / sqrt(DRAWS) = 1.6 %.

    Args:
        answers: (n,) answer of each sample, compared with ``==``; None: no answer.
        correct: (n,) in [0, 1], correctness of each sample.
        k: in [1, n].

    Raises:
        ValueError: an argument is out of range or has the wrong shape.
    """
    correct = checks.within("correct", checks.vector("correct", correct), 0, 1)
    n = correct.size
    if isinstance(answers, str) or len(answers) != n:
        raise ValueError(f"answers has {len(answers)} entries, but correct has {n}.")
    checks.require(checks.is_integer(k) and 1 <= k <= n, "k", k, f"use an integer in [1, {n}]")
    votes, credit = _tally(answers, correct)
    silent = n - int(votes.sum())
    if votes.size == 0:
        return 0.0
    if k == n:  # one outcome only
        return float(_won(votes[None], credit)[0])
    if _operations(votes, k) <= EXACT_OPERATIONS:
        return _exact(tuple(sorted(zip(votes.tolist(), credit.tolist(), strict=True))), silent, k)
    # the time of "marginals" grows with the number of answers, not of samples
    drawn = np.random.default_rng(0).multivariate_hypergeometric([*votes, silent], k, DRAWS, method="marginals")
    return float(_won(drawn[:, :-1], credit).mean())


def _tally(answers: Sequence[Hashable | None], correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Votes for each distinct answer, and the mean correctness of its samples."""
    places: dict[Hashable, int] = {}
    given = [place for place, answer in enumerate(answers) if answer is not None]
    of = np.array([places.setdefault(answers[place], len(places)) for place in given], dtype=np.int64)
    votes = np.bincount(of, minlength=len(places))
    return votes, np.bincount(of, weights=correct[given], minlength=len(places)) / votes


def _won(drawn: np.ndarray, credit: np.ndarray) -> np.ndarray:
    """(draws,) expected correctness of the winner of each row of (draws, answers) votes."""
    most = drawn.max(axis=1, keepdims=True)
    winners = (drawn == most) & (most > 0)
    return winners @ credit / np.maximum(winners.sum(axis=1), 1)


def _operations(votes: np.ndarray, k: int) -> float:
    """Array operations of ``_exact``, where operations on large arrays count several times."""
    total = 0.0
    for v in range(1, min(k, int(votes.max())) + 1):
        able = int((votes >= v).sum())
        total += able * v * (1 + 2 * (min(k // v, able) + 1) * (k + 1) / 4000)
    return total


@lru_cache(maxsize=16384)  # many problems have the same numbers of votes; the limit is for memory
def _exact(tally: tuple[tuple[int, float], ...], silent: int, k: int) -> float:
    """Sum over v of P(the most votes are v, won by a correct answer), with each sample drawn at rate k / n.

    Every answer gets binomial(votes, k / n) draws, independently; dividing by P(k draws in all) conditions on k draws.
    All terms are positive, so no digits cancel. ``state[0, t, d]`` is the probability that d samples are drawn, that t
    answers have v votes, and that no answer has more. ``state[1]`` is this probability times the summed credit of the
    t answers.

    Args:
        tally: votes and credit of each answer, sorted.
        silent: samples without an answer.
        k: samples drawn.
    """
    votes, credit = np.array([size for size, _ in tally]), np.array([value for _, value in tally])
    n = int(votes.sum()) + silent
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])

    def binomial(size: int) -> np.ndarray:
        drawn = np.arange(min(size, k) + 1)
        ways = log_factorial[size] - log_factorial[drawn] - log_factorial[size - drawn]
        return np.exp(ways + drawn * np.log(k / n) + (size - drawn) * np.log1p(-k / n))

    total = 0.0
    for v in range(1, min(k, int(votes.max())) + 1):
        able = votes >= v
        ties = min(k // v, int(able.sum()))
        state = np.zeros((2, ties + 1, k + 1))
        rest = binomial(n - int(votes[able].sum()))  # answers with fewer votes than v, and samples without an answer
        state[0, 0, : rest.size] = rest
        for size, value in zip(votes[able], credit[able], strict=True):
            chance = binomial(int(size))
            after = chance[0] * state
            for below in range(1, v):
                after[:, :, below:] += chance[below] * state[:, :, :-below]
            after[:, 1:, v:] += chance[v] * state[:, :-1, :-v]
            after[1, 1:, v:] += chance[v] * value * state[0, :-1, :-v]
            state = after
        total += float(np.sum(state[1, 1:, k] / np.arange(1, ties + 1)))
    return min(1.0, total / float(binomial(n)[k]))


def _whole(name: str, values: ArrayLike, least: int) -> np.ndarray:
    """``values`` as int64 of the same shape, each at least ``least``."""
    flat = checks.vector(name, np.ravel(values))
    return checks.integers(name, flat, flat.size, least).reshape(np.shape(values))


def _at_most_n(name: str, values: np.ndarray, n: np.ndarray) -> None:
    beyond = values > n
    if beyond.any():
        row = int(np.argmax(beyond))
        raise ValueError(f"{name}={values.flat[row]} must be at most n={n.flat[row]}.")
