"""maj@k: probability that the majority answer among k of a problem's n samples is correct (self-consistency)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from verl_ext import checks

EXACT_OPERATIONS = 20_000  # array operations of some microseconds each, about 0.1 s per problem
DRAWS = 1024  # where the exact sum would take longer; their errors average out over problems


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
        return _exact(votes, credit, silent, k)
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


def _exact(votes: np.ndarray, credit: np.ndarray, silent: int, k: int) -> float:
    """Sum over v of P(the most votes are v, won by a correct answer), with each sample drawn at rate k / n.

    Every answer gets binomial(votes, k / n) draws, independently; dividing by P(k draws in all) conditions on that. All
    terms are positive, so nothing cancels. The rows of ``state[0]`` hold, by number of answers with v votes (none has
    more), the probability of each number of draws; ``state[1]`` the same times the summed credit of those answers.
    """
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
