"""How long generation and training take."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from verl_ext import checks


@dataclass(frozen=True)
class Hardware:
    """Inference engines that share a queue, and an update that costs by the token.

    Each of ``engines`` x ``slots`` places generates one response at a time, at ``seconds_per_token``; responses wait in
    the order in which they were asked for, and the next goes to the place that is free first (list scheduling). So a
    wave lasts as long as its slowest response, and a barrier leaves places idle until then. The driver looks for
    finished waves every ``poll_interval`` seconds. A step's update takes ``update_seconds`` (weight transfer and all
    else that does not depend on the batch) plus ``update_seconds_per_token`` for every token trained.

    Not modelled: that engines slow down as they fill up (``seconds_per_token`` is that of a full one), prefill and
    prefix caching, waits for rewards and tools, validation.

    Raises:
        ValueError: naming the argument that is out of range.
    """

    engines: int = 8
    slots: int = 128
    seconds_per_token: float = 0.02
    update_seconds: float = 20.0
    update_seconds_per_token: float = 1e-5
    poll_interval: float = 0.05

    def __post_init__(self):
        checks.integer("engines", self.engines, 1)
        checks.integer("slots", self.slots, 1)
        for name in ("seconds_per_token", "poll_interval"):
            checks.positive_number(name, getattr(self, name))
        for name in ("update_seconds", "update_seconds_per_token"):
            checks.number(name, getattr(self, name), 0)

    def update_time(self, tokens: int) -> float:
        """Seconds of an update on so many generated tokens."""
        return self.update_seconds + self.update_seconds_per_token * tokens


class Slots:
    """Places of all engines; responses are given to them in the order in which they come.

    Args:
        hardware: how many there are, and how fast.
    """

    def __init__(self, hardware: Hardware):
        self.seconds_per_token = hardware.seconds_per_token
        self._free = [0.0] * (hardware.engines * hardware.slots)  # a heap: when each will be free

    def schedule(self, tokens: np.ndarray, now: float) -> np.ndarray:
        """(n,) seconds at which responses of ``tokens`` (n,) that are asked for ``now`` will be complete."""
        free, push = self._free, heapq.heapreplace
        ends = []
        for duration in (tokens * self.seconds_per_token).tolist():
            end = max(free[0], now) + duration
            push(free, end)
            ends.append(end)
        return np.array(ends)
