"""How long responses are, and how long generating them and training on them takes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from verl_ext import checks

POLL = 0.05  # seconds


@dataclass(frozen=True)
class LengthModel:
    """Tokens of a response: LogNormal(ln median, spread^2), times ``wrong_factor`` if wrong, at most ``maximum``.

    A wrong response of ``maximum`` tokens counts as truncated; a correct response of this length does not. Lengths do
    not change during training.

    Args:
        median: tokens of a correct response.
        spread: standard deviation of log(length); with 0.8 the longest 1 % of responses are 6 times the median.
        maximum: tokens at which a response is cut off, ``data.max_response_length``.
        wrong_factor: median length of wrong responses over median length of correct responses.

    Raises:
        ValueError: naming the argument out of range.
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
        """(n,) int64 tokens of n responses; ``correct`` (n,) says which of them are correct."""
        medians = np.where(correct, self.median, self.median * self.wrong_factor)
        tokens = medians * np.exp(self.spread * rng.standard_normal(correct.size))
        return np.clip(np.rint(tokens), 1, self.maximum).astype(np.int64)


@dataclass(frozen=True)
class EngineSpeed:
    """Inference engines with a common queue, and an update with a fixed cost and a cost per token.

    The engines have ``engines`` x ``slots`` slots. A slot generates one response at a time, at ``seconds_per_token``.
    Responses start in the order in which they were requested, each in the first free slot (list scheduling). A wave
    therefore lasts as long as its slowest response, and a barrier leaves slots idle until then. The driver looks for
    finished waves every :data:`POLL` seconds. The update of a step takes ``update_seconds`` (weight transfer and
    other costs independent of the batch) plus ``update_seconds_per_token`` for every token trained.

    Not modelled: engines slowing down as they fill up (``seconds_per_token`` is the speed of a full engine), prefill,
    prefix caching, waiting for rewards and tools, validation.

    Raises:
        ValueError: naming the argument out of range.
    """

    engines: int = 8
    slots: int = 128
    seconds_per_token: float = 0.02
    update_seconds: float = 20.0
    update_seconds_per_token: float = 1e-5

    def __post_init__(self):
        checks.integer("engines", self.engines, 1)
        checks.integer("slots", self.slots, 1)
        checks.positive_number("seconds_per_token", self.seconds_per_token)
        for name in ("update_seconds", "update_seconds_per_token"):
            checks.number(name, getattr(self, name), 0)

    def update_time(self, tokens: int) -> float:
        """Seconds of an update on this many generated tokens."""
        return self.update_seconds + self.update_seconds_per_token * tokens


class Slots:
    """The slots of all engines, filled in the order of the requests."""

    def __init__(self, speed: EngineSpeed):
        self.seconds_per_token = speed.seconds_per_token
        self._free = [0.0] * (speed.engines * speed.slots)  # a heap: the time at which each slot becomes free

    def schedule(self, tokens: np.ndarray, now: float) -> np.ndarray:
        """(n,) seconds at which n responses of ``tokens`` (n,), requested at ``now``, will be complete."""
        free, push = self._free, heapq.heapreplace
        ends = []
        for duration in (tokens * self.seconds_per_token).tolist():
            end = max(free[0], now) + duration
            push(free, end)
            ends.append(end)
        return np.array(ends)

    def begin_again(self, busy: list[float], now: float) -> None:
        """Forget the schedule, except for slots that are busy until the given times, all later than ``now``."""
        self._free = [*busy, *[now] * (len(self._free) - len(busy))]
        heapq.heapify(self._free)
