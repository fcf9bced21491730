"""How a configuration is refused."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_ext.checks import is_number
from verl_ext.errors import BadConfig


def refuse_if(bad: bool, config: DictConfig, key: str, valid: str) -> None:
    """Raise :class:`BadConfig` in one sentence: key, value, what would be valid."""
    if bad:
        raise BadConfig(f"{key}={OmegaConf.select(config, key)} is not valid: {valid}")


def is_count(value: object) -> bool:
    """An integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_positive(value: object) -> bool:
    """A finite number above 0."""
    return is_number(value) and value > 0
