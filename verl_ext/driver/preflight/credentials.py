"""Checks credentials: none in the configuration, and a wandb login where wandb is used."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

from verl_ext.driver.preflight.faults import Faults

NAME = re.compile(r"(^|_)(api_?key|access_?key|auth_?token|hf_?token|secret|secret_?key|password)$", re.IGNORECASE)
PASSWORD_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
WITHOUT_A_SERVER = ("offline", "disabled", "dryrun")  # wandb's modes


def secrets(values: dict[str, Any]) -> list[str]:
    """One sentence for each key with a secret; the secrets themselves are not shown.

    verl prints the configuration, trackers store it, and hydra writes it to disk.

    Args:
        values: the resolved configuration, as plain containers.
    """
    return [
        f"{path} holds a secret, and configurations are printed, logged and saved under .hydra: set it in the "
        "environment instead, and delete the copies hydra has written"
        for path, value in _texts(values)
        if NAME.search(path.rpartition(".")[2]) or PASSWORD_IN_ADDRESS.search(value)
    ]


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{index}]")
    elif isinstance(value, str) and value:
        yield path, value


def check_wandb(faults: Faults) -> None:
    """Refuse wandb where nobody is logged in: verl opens loggers late, after the engines and weights are loaded."""
    chosen = faults["trainer.logger"]
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    if "wandb" in names and (obstacle := _obstacle_to_wandb()):
        faults.refuse("trainer.logger", chosen, f"wandb {obstacle}, or use [console,tensorboard]")


def _obstacle_to_wandb() -> str | None:
    """The reason why wandb cannot start, found by wandb's own search for a key. The key is not sent anywhere."""
    if os.environ.get("WANDB_MODE") in WITHOUT_A_SERVER:
        return None
    if importlib.util.find_spec("wandb") is None:
        return "is not installed; pip install wandb"
    from wandb.errors import AuthenticationError

    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:
        return None  # another version of wandb; wandb itself reports a missing key later
    settings = wandb_setup.singleton().settings
    if settings.mode in WITHOUT_A_SERVER:
        return None
    try:
        found = authenticate_session(
            host=settings.base_url, source="trainer.logger", prompt=False, verify=False, update_session=False
        )
    except AuthenticationError as error:
        return f"cannot log in ({error}); correct the key, set WANDB_MODE=offline"
    missing = f"has no key for {settings.base_url}; run wandb login, set WANDB_API_KEY or WANDB_MODE=offline"
    return None if found else missing
