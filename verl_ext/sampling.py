"""Settings of the engine for the rollouts of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from verl_ext import checks


@dataclass(frozen=True)
class Sampling:
    """How the rollouts of a request are sampled; None: as verl's configuration says.

    The loss takes probabilities at verl's own temperature and over all tokens. With
    ``algorithm.rollout_correction.rollout_is``, each token is weighted by its probability in the loss / its probability
    when it was sampled.

    Attributes:
        temperature: divides the logits; above 0.
        top_p: the most likely tokens whose probabilities add up to it are sampled; in (0, 1].
        response_length: most tokens of a response, prefix and observations included. A larger number than
            ``data.max_response_length`` has no effect.
    """

    temperature: float | None = None
    top_p: float | None = None
    response_length: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            checks.positive_number("temperature", self.temperature)
        if self.top_p is not None:
            checks.positive_number("top_p", self.top_p, 1)
        if self.response_length is not None:
            checks.integer("response_length", self.response_length, 1)

    def state_dict(self) -> dict:
        """The settings that differ from verl's; JSON-able."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_state_dict(cls, state: Mapping) -> Sampling | None:
        """Inverse of :meth:`state_dict`; None for an empty mapping."""
        return cls(**state) if state else None
