"""Secrets stay out of configurations: verl prints them, trackers store them, hydra writes them to disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from verl_ext.driver.preflight.bad_config import BadConfig

NAME = re.compile(r"(^|_)(api_?key|access_?key|auth_?token|hf_?token|secret|secret_?key|password)$", re.IGNORECASE)
PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")


def refuse_secrets(values: dict[str, Any]) -> None:
    """Refuse a key that holds a secret, without showing it.

    Args:
        values: the resolved configuration, as plain containers.

    Raises:
        BadConfig: naming the key, and where the secret belongs.
    """
    for path, value in _texts(values):
        name = path.rpartition(".")[2]
        if NAME.search(name) or PASSWORD_IN_ADDRESS.search(value):
            raise BadConfig(
                f"{path} holds a secret, and configurations are printed, logged and saved under .hydra: set it in the "
                "environment instead, and delete the copies of it that hydra has written"
            )


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{index}]")
    elif isinstance(value, str) and value:
        yield path, value
