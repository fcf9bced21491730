"""What the recipes' configurations can compute."""

from __future__ import annotations

from omegaconf import OmegaConf


def register_resolvers() -> None:
    """``${add:a,b}``: their sum."""
    OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)
