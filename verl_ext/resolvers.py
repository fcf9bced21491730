"""What the recipes' configurations can compute."""

from __future__ import annotations

from omegaconf import OmegaConf

from verl_ext.checks import is_number


def register_resolvers() -> None:
    """``${add:a,b}``: their sum; null where one of them is no number, so that it is refused by its own name."""
    OmegaConf.register_new_resolver("add", _add, replace=True)


def _add(*terms: object) -> float | None:
    return sum(terms) if all(map(is_number, terms)) else None
