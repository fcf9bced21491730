"""Checks credentials: none in the configuration, and a wandb login where wandb is used."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from verl_ext.driver.preflight.faults import Faults

SECRET_NAME = re.compile(
    r"(^|_)(api_?keys?|access_?keys?(_id)?|secret_?keys?|private_?keys?|ssh_?keys?|secrets?|passwords?|passwd|passphrase"
    r"|(db|ftp|mail|proxy|smtp|user)_pass|pwd|credentials?|authorization|cookie|(api|auth|access|refresh|hub|hf)_?tokens?)$"
)
TOKEN_NAME = re.compile(r"(^|_)token$")
TOKEN_OF_A_VOCABULARY = re.compile(
    r"(^|_)(bos|eos|eot|pad|unk|sep|cls|mask|image|video|audio|vision|stop|start|end|begin|think|tool|special)_token$"
)
SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@"  # scheme://user:password@host
    r"|https?://[^/\s@]+@"  # https://token@host
    r"|^[^/\s:@]+:[^/\s@]+@(?!sha)[\w.-]+(:\d+)?$"  # user:password@host:port
    r"|[?&](access_token|auth|api_?key|key|password|secret|sig|signature|token|X-Amz-Signature)=[^&\s]"
    r"|\bBearer\s+\S{8}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\."  # a JSON web token
    r"|\bsk-(proj|ant|svcacct|admin|or)-[\w-]{4}|\bsk-[A-Za-z0-9]{20}"  # OpenAI, Anthropic, OpenRouter
    r"|\bhf_[A-Za-z0-9]{30}|\bnvapi-[\w-]{20}|\bwandb_v1_\w{10}"
    r"|\bgh[opsur]_[A-Za-z0-9]{30}|\bgithub_pat_\w{20}|\bglpat-[\w-]{16}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30}|\bxox[abeprs]-[\w-]{10}"  # AWS, Google, Slack
)
PLACEHOLDER = re.compile(r"(?i)empty|none|null|dummy|no[-_]?key|not[-_]?needed|x+")  # for servers that need no key
CREDENTIAL = re.compile(r"[\w.~+/=-]+")  # and no delimiter, such as </think>
PATH = re.compile(r"(~|\.{1,2})?/")
WITHOUT_A_SERVER = ("offline", "disabled", "dryrun")  # wandb's modes


def secrets(values: dict[str, Any]) -> list[str]:
    """One sentence for each key with a secret; the secrets themselves are not shown.

    verl prints the configuration, trackers store it, and hydra writes it to disk. A secret is known by the key's name
    (``DB_PASSWORD``, ``env_vars.GITHUB_TOKEN``, ``apiKeys[0]``) or by the form of the value (``sk-proj-...``, a
    password in an address). Paths of files with secrets, true, false and null are no secrets.

    Args:
        values: the resolved configuration, as plain containers. A value that was interpolated from the environment
            counts too: verl prints it.
    """
    return [
        f"{'.'.join(path)} holds a secret, and configurations are printed, logged and saved under .hydra: set it in "
        "the environment instead, and delete the copies hydra has written"
        for path, value in _leaves(values)
        if _is_secret(path, value)
    ]


def _is_secret(path: tuple[str, ...], value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        return False
    text = str(value)
    if SECRET_VALUE.search(text):
        return True
    if PLACEHOLDER.fullmatch(text):
        return False
    if any(map(_names_a_secret, path)):
        return not PATH.match(text)
    name = _words(path[-1])
    token = TOKEN_NAME.search(name) and not TOKEN_OF_A_VOCABULARY.search(name)
    return bool(token) and isinstance(value, str) and bool(CREDENTIAL.fullmatch(text)) and not PATH.match(text)


@cache
def _names_a_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(_words(name)))


@cache
def _words(name: str) -> str:
    """``name`` in lower case, its words joined by _, without an index: ``apiKeys[0]`` is ``api_keys``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name.partition("[")[0]).lower()


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path[:-1], f"{path[-1]}[{index}]"))
    else:
        yield path, value


def check_wandb(faults: Faults) -> None:
    """Refuse wandb where nobody is logged in: verl opens loggers late, after the engines and weights are loaded."""
    chosen = faults["trainer.logger"]
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    if "wandb" in names and (obstacle := _obstacle_to_wandb()):
        faults.refuse("trainer.logger", chosen, f"wandb {obstacle}, or use [console,file]")


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
