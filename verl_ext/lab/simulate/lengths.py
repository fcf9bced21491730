"""How long responses are: long-tailed, cut off at a maximum, and longer when they fail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_ext import checks


@dataclass(frozen=True)
class LengthModel:
    """Tokens ~ LogNormal(ln median, spread^2), times ``wrong_factor`` in a wrong response, and at most ``maximum``.

    A wrong response that reaches the maximum counts as truncated; a correct one is taken to have just fitted. Lengths
    do not change in the course of training.

    Args:
        median: tokens of a correct response.
        spread: standard deviation of the logarithm; with 0.8 the longest 1 % are 6 times the median.
        maximum: ``data.max_response_length``.
        wrong_factor: how much longer wrong responses are.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    median: float = 800.0
    spread: float = 0.8
    maximum: int = 4096
    wrong_factor: float = 1.5

    def __post_init__(self):
        checks.positive_number("median_tokens", self.median)
        checks.number("length_spread", self.spread, 0)
        checks.integer("max_tokens", self.maximum, 1)
        checks.positive_number("wrong_factor", self.wrong_factor)

    def draw(self, correct: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n,) int64 tokens of responses that are ``correct`` (n,) or not."""
        medians = np.where(correct, self.median, self.median * self.wrong_factor)
        tokens = medians * np.exp(self.spread * rng.standard_normal(correct.size))
        return np.clip(np.rint(tokens), 1, self.maximum).astype(np.int64)
