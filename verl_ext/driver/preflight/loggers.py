"""Where a run is logged: verl opens its loggers only when engines and weights are up."""

from __future__ import annotations

import importlib.util
import os

from omegaconf import DictConfig

from verl_ext.driver.preflight.bad_config import refuse_if

WITHOUT_A_SERVER = ("offline", "disabled", "dryrun")  # wandb's modes


def check_loggers(config: DictConfig) -> None:
    """Raise BadConfig for a logger that verl does not know, and for wandb where nobody is logged in."""
    from verl.utils.tracking import Tracking

    chosen, key = config.trainer.logger, "trainer.logger"
    names = [chosen] if isinstance(chosen, str) else list(chosen or [])
    known = bool(names) and all(name in Tracking.supported_backend for name in names)
    refuse_if(not known, config, key, f"list one or more of {', '.join(Tracking.supported_backend)}")
    missing = _what_wandb_lacks() if "wandb" in names else None
    refuse_if(missing is not None, config, key, f"wandb {missing}, or use [console,tensorboard]")


def _what_wandb_lacks() -> str | None:
    """What keeps wandb from starting, by its own search for a key; a key is not tried, nothing is sent."""
    if os.environ.get("WANDB_MODE") in WITHOUT_A_SERVER:
        return None
    if importlib.util.find_spec("wandb") is None:
        return "is not installed; pip install wandb"
    from wandb.errors import AuthenticationError

    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:
        return None  # of a version that looks for its key elsewhere: it says so itself, only later
    settings = wandb_setup.singleton().settings
    if settings.mode in WITHOUT_A_SERVER:
        return None
    try:
        found = authenticate_session(
            host=settings.base_url, source="trainer.logger", prompt=False, verify=False, update_session=False
        )
    except AuthenticationError as error:
        return f"cannot log in ({error}); correct that, set WANDB_MODE=offline"
    return (
        None
        if found
        else f"has no key for {settings.base_url}; run wandb login, set WANDB_API_KEY or WANDB_MODE=offline"
    )
