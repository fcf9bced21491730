"""Where a sandbox runs: a tool's ``deployment`` as a function that makes places.

- ``docker``: containers of docker or podman on this machine (:mod:`~verl_ext.sandbox.containers`).
- ``modal``, ``fargate``, ``daytona``: machines elsewhere, started by swe-rex; ``remote``: a swe-rex server that
  somebody else has started (:mod:`~verl_ext.sandbox.servers`).
- ``local``: processes of this machine, which is no sandbox.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from verl_ext.checks import COUNT, POSITIVE, TEXT, InvalidValue, Kind, one_of
from verl_ext.sandbox.containers import Container, Limits
from verl_ext.sandbox.places import Local, Place

KEY = "config.deployment"
SERVERS = {  # type: swe-rex's module, prefix of its classes, and its setting of the longest life
    "remote": ("swerex.deployment.remote", "Remote", None),
    "modal": ("swerex.deployment.modal", "Modal", "deployment_timeout"),
    "fargate": ("swerex.deployment.fargate", "Fargate", "container_timeout"),
    "daytona": ("swerex.deployment.daytona", "Daytona", "container_timeout"),
}
TYPES = ("docker", *SERVERS, "local")
UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_in_bytes(value: object) -> int | None:
    """``4g`` as 4294967296; None unless ``value`` is a size above 0. k, m, g and t are powers of 1024."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([bkmgt]?)", str(value).lower()) if value is not True else None
    size = int(float(found[1]) * UNITS[found[2]]) if found else 0
    return size or None


def _is_network(value: object) -> bool:
    return isinstance(value, bool) or (TEXT.accepts(value) and not re.match(r"host$|container:|ns:", str(value)))


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


IMAGE = Kind(  # anything that starts with a dash would be an option of the runtime
    lambda value: TEXT.accepts(value) and not str(value).startswith("-"), "use the name of a container image"
)
SIZE = Kind(lambda value: size_in_bytes(value) is not None, "use a number of bytes, such as 4g or 512m")
DOCKER: dict[str, tuple[str, Kind]] = {  # key: name in Limits, valid values
    "container_runtime": ("runtime", one_of("docker", "podman")),
    "network": (
        "network",
        Kind(_is_network, "use false, true, or the name of a network; host would open this machine's own ports"),
    ),
    "memory": ("memory", SIZE),
    "cpus": ("cpus", POSITIVE),
    "pids": ("pids", COUNT),
    "largest_file": ("largest_file", SIZE),
    "open_files": ("open_files", COUNT),
    "disk": ("disk", SIZE.or_null()),
    "pull": ("pull", one_of("missing", "always", "never")),
    "pull_timeout": ("pull_timeout", POSITIVE),
    "startup_timeout": ("startup_timeout", POSITIVE),
    "docker_args": ("arguments", Kind(_are_texts, "use a list of texts")),
}
SIZES = ("memory", "largest_file", "disk")


@dataclass(frozen=True)
class DeploymentConfig:
    """A checked deployment.

    Args:
        type: one of ``TYPES``.
        image: container image for rows that name none.
        settings: :class:`~verl_ext.sandbox.containers.Limits` for ``docker``, swe-rex's configuration for servers.
    """

    type: str
    image: str | None = None
    settings: Any = None

    @property
    def has_images(self) -> bool:
        """Whether a place of this type is made from an image."""
        return self.type == "docker" or "image" in getattr(type(self.settings), "model_fields", {})

    @property
    def lacks_image(self) -> bool:
        """Whether every row must name an image, because a place needs one and this configuration names none."""
        return self.has_images and not self.image


def deployment_config(deployment: Any) -> DeploymentConfig:
    """The checked configuration of a tool's ``deployment``.

    Args:
        deployment: the ``type``, and the settings of this type: the keys of ``DOCKER`` and ``image`` for docker, none
            for local, otherwise those of swe-rex's configuration.

    Raises:
        InvalidValue: the type is not known, or a setting is not valid.
    """
    kind = deployment.get("type") if isinstance(deployment, Mapping) else None
    if kind not in TYPES:
        near = get_close_matches(str(kind), TYPES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InvalidValue(f"{KEY}.type", kind, f"{hint}use one of {', '.join(TYPES)}")
    settings = {name: value for name, value in deployment.items() if name != "type"}
    if kind == "docker":
        return _docker(settings)
    if kind == "local":
        _check_names(kind, settings, ())
        return DeploymentConfig("local")
    return _server(kind, settings)


def deployment_maker(config: DeploymentConfig, image: str | None, lifetime: float) -> Callable[[], Place]:
    """A function to make places; none is started.

    Args:
        config: see :func:`deployment_config`.
        image: container image, for types with images; None means the configuration's image.
        lifetime: seconds until a place ends in any case. A shared server has no end.

    Raises:
        ValueError: this type needs an image, and none is given.
    """
    image = image or config.image
    if config.has_images and not image:
        raise ValueError(f"create_kwargs.image is missing, and {KEY} has no image either.")
    if config.has_images:
        IMAGE.check("create_kwargs.image", image)
    if config.type == "local":
        return Local
    if config.type == "docker":
        return lambda: Container(image, config.settings, lifetime)
    return lambda: _make_server(config, image, lifetime)


def longest_life(config: DeploymentConfig, lifetime: float) -> tuple[float, str]:
    """Seconds until a place ends in any case, and the setting of the tool that decides.

    A shared server and processes of this machine have no end.

    Args:
        config: see :func:`deployment_config`. A provider's own setting comes before ``lifetime``.
        lifetime: of the tool.
    """
    setting = SERVERS[config.type][2] if config.type in SERVERS else None
    if setting is not None and setting in config.settings.model_fields_set:
        return getattr(config.settings, setting), f"deployment.{setting}"
    return math.inf if config.type in ("remote", "local") else lifetime, "lifetime"


def _docker(settings: Mapping[str, Any]) -> DeploymentConfig:
    _check_names("docker", settings, ("image", *DOCKER))
    limits: dict[str, Any] = {}
    for name, value in settings.items():
        kind = IMAGE if name == "image" else DOCKER[name][1]
        kind.check(f"{KEY}.{name}", value)
        if name != "image":
            limits[DOCKER[name][0]] = size_in_bytes(value) if name in SIZES and value is not None else value
    if "arguments" in limits:
        limits["arguments"] = tuple(limits["arguments"])
    return DeploymentConfig("docker", settings.get("image"), Limits(**limits))


def _server(kind: str, settings: Mapping[str, Any]) -> DeploymentConfig:
    from pydantic import ValidationError

    from verl_ext.extras import require

    require("agents", "swerex")
    model = getattr(import_module("swerex.deployment.config"), f"{SERVERS[kind][1]}DeploymentConfig")
    _check_names(kind, settings, tuple(name for name in model.model_fields if name != "type"))
    try:
        checked = model(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (KEY, *first["loc"])))
        value = None if first["type"] == "missing" else first["input"]
        raise InvalidValue(where, value, f"{first['msg']} (type {kind})") from error
    image = str(checked.image) if "image" in settings else None
    return DeploymentConfig(kind, image, checked)


def _check_names(kind: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in settings.items():
        if name not in known:
            valid = f"use {', '.join(known)}" if known else "this type has no settings"
            raise InvalidValue(f"{KEY}.{name}", value, f"it is no setting of type {kind}; {valid}")


def _make_server(config: DeploymentConfig, image: str | None, lifetime: float) -> Place:
    from verl_ext.sandbox.servers import Server, guarded

    module, prefix, setting = SERVERS[config.type]
    life, _ = longest_life(config, lifetime)
    changes: dict[str, Any] = {"image": image} if config.has_images else {}
    if setting is not None:
        changes[setting] = life
    settings = config.settings.model_copy(update=changes)
    deployment = guarded(getattr(import_module(module), f"{prefix}Deployment")).from_config(settings)
    return Server(deployment, shared=config.type == "remote", lifetime=life)
