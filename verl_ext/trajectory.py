"""The tokens of a response, and prefixes from which other rollouts can start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """Consecutive tokens with the same origin: ``start <= position < stop``."""

    start: int
    stop: int
    generated: bool


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The tokens of a response: turns that the model generated, and observations that an environment answered.

    A prefix of a trajectory is a trajectory too. A trajectory takes five bytes per token.

    Args:
        tokens: (T,) token ids, T at least 1.
        generated: (T,) True where the model generated the token; the first entry must be True.

    Raises:
        ValueError: the arrays differ in length, are empty, or begin with an observation.
    """

    tokens: np.ndarray
    generated: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", np.asarray(self.tokens, dtype=np.int32))
        object.__setattr__(self, "generated", np.asarray(self.generated, dtype=bool))
        if self.tokens.ndim != 1 or self.tokens.shape != self.generated.shape or not self.tokens.size:
            raise ValueError(
                f"tokens and generated must be of one length of at least 1, got {self.tokens.shape} and "
                f"{self.generated.shape}"
            )
        if not self.generated[0]:
            raise ValueError("generated: a response begins with a token of the policy")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.tokens.nbytes + self.generated.nbytes

    @property
    def spans(self) -> list[Span]:
        """Turns of the policy and observations, alternating, beginning with a turn."""
        spans, start = [], 0
        for generated, members in groupby(self.generated.tolist()):
            stop = start + len(list(members))
            spans.append(Span(start, stop, generated))
            start = stop
        return spans

    def prefix(self, ratio: float) -> Trajectory | None:
        """The first part of the trajectory; None if that would be the whole trajectory.

        An interaction is a turn with the observation that answers it. A trajectory with K interactions is cut after
        max(1, ⌊ratio·K⌋) of them, a trajectory without interactions after max(1, ⌊ratio·T⌋) tokens.

        Source: *Rollout Pass-Rate Control*, §2.2; the formula is missing in the text of the paper that we have.

        Raises:
            ValueError: ``ratio`` is not between 0 and 1, both excluded.
        """
        if not 0 < ratio < 1:
            raise ValueError(f"ratio must be between 0 and 1, got {ratio}")
        ends = [span.stop for span in self.spans if not span.generated]
        if ends:
            stop = ends[max(1, _floor(ratio * len(ends))) - 1]
        else:
            stop = max(1, _floor(ratio * len(self)))
        return None if stop >= len(self) else Trajectory(self.tokens[:stop], self.generated[:stop])

    def state_dict(self) -> dict:
        """JSON-able form: the tokens, and the lengths of the spans."""
        return {"tokens": self.tokens.tolist(), "spans": [span.stop - span.start for span in self.spans]}

    @classmethod
    def from_state_dict(cls, state: Mapping) -> Trajectory:
        turns = np.arange(len(state["spans"])) % 2 == 0
        return cls(np.array(state["tokens"], dtype=np.int32), np.repeat(turns, state["spans"]))


def _floor(product: float) -> int:
    """⌊product⌋, where ratios are sums of steps: 0.3 - 0.02 is a little less than 0.28."""
    return int(product + 1e-9)
