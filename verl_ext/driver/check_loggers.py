"""Where a run is logged: verl opens its loggers only when engines and weights are up."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlparse

from omegaconf import DictConfig

from verl_ext.driver.bad_config import refuse_if

WITHOUT_A_SERVER = ("offline", "disabled", "dryrun")  # WANDB_MODE


def check_loggers(config: DictConfig) -> None:
    """Raise BadConfig for a logger that verl does not know, and for wandb where nobody is logged in."""
    from verl.utils.tracking import Tracking

    chosen, key = config.trainer.logger, "trainer.logger"
    names = [chosen] if isinstance(chosen, str) else list(chosen or [])
    known = bool(names) and all(name in Tracking.supported_backend for name in names)
    refuse_if(not known, config, key, f"list one or more of {', '.join(Tracking.supported_backend)}")
    login = "wandb has no key; run wandb login, set WANDB_API_KEY or WANDB_MODE=offline, or use [console,tensorboard]"
    refuse_if("wandb" in names and not _wandb_can_start(), config, key, login)


def _wandb_can_start() -> bool:
    """Whether there is a key where wandb looks for one. A key is not tried, nothing is sent."""
    if os.environ.get("WANDB_MODE") in WITHOUT_A_SERVER:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(file).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False
