"""swe-rex's deployments: where a sandbox runs, from a tool's configuration and a row's image."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.config import (
    DaytonaDeploymentConfig,
    DockerDeploymentConfig,
    FargateDeploymentConfig,
    LocalDeploymentConfig,
    ModalDeploymentConfig,
    RemoteDeploymentConfig,
)
from swerex.deployment.docker import DockerDeployment
from swerex.deployment.remote import RemoteDeployment

TYPES: dict[str, type[BaseModel]] = {
    "docker": DockerDeploymentConfig,
    "remote": RemoteDeploymentConfig,
    "modal": ModalDeploymentConfig,
    "fargate": FargateDeploymentConfig,
    "daytona": DaytonaDeploymentConfig,
    "local": LocalDeploymentConfig,
}


class Container(DockerDeployment):
    """swe-rex's container, with a certain end.

    - The container ends by itself after ``lifetime`` seconds, in case the process that should stop it was killed.
    - ``stop`` kills the container without asking its server first: swe-rex would wait for a server that hangs.
    - A container that does not come up is an error; swe-rex would read its output forever.

    Args:
        lifetime: seconds.
        kwargs: as of swe-rex's ``DockerDeploymentConfig``.
    """

    def __init__(self, *, lifetime: float, **kwargs: Any):
        super().__init__(**kwargs)
        self._lifetime = lifetime

    def _get_swerex_start_cmd(self, token: str) -> list[str]:
        return ["timeout", "-s", "KILL", f"{self._lifetime:g}", *super()._get_swerex_start_cmd(token)]

    async def _wait_until_alive(self, timeout: float = 10.0) -> None:
        await asyncio.wait_for(super()._wait_until_alive(math.inf), timeout)

    async def stop(self) -> None:
        self._runtime = None
        await super().stop()


class SharedServer(RemoteDeployment):
    """A swe-rex server that somebody else has started, and others use: stopping it would end their shells."""

    async def stop(self) -> None:
        self._runtime = None


def deployment_config(deployment: Mapping[str, Any]) -> BaseModel:
    """swe-rex's own configuration of this deployment.

    Args:
        deployment: its ``type``, and swe-rex's settings for this type.

    Raises:
        ValueError: another type, or a setting that swe-rex does not accept.
    """
    kind = deployment.get("type") if isinstance(deployment, Mapping) else None
    if kind not in TYPES:
        raise ValueError(f"config.deployment={deployment!r} is not valid: type must be one of {', '.join(TYPES)}.")
    settings = {name: value for name, value in deployment.items() if name != "type"}
    try:
        return TYPES[kind](**settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("config.deployment", *first["loc"])))
        raise ValueError(f"{where}={first['input']!r} is not valid for type {kind}: {first['msg']}.") from error


def deployment_maker(config: BaseModel, image: str | None, lifetime: float) -> Callable[[], AbstractDeployment]:
    """A function that makes deployments; nothing is started.

    Args:
        config: see :func:`deployment_config`.
        image: to start from, where this type has images; None: that of the configuration.
        lifetime: seconds after which a docker container ends whatever happens. Modal, Fargate and Daytona have settings
            of their own for that.

    Raises:
        ValueError: this type needs an image, and none is given.
    """
    has_images = "image" in type(config).model_fields
    if has_images and not image and "image" not in config.model_fields_set:
        raise ValueError("create_kwargs.image is missing, and config.deployment has no image either.")

    def make() -> AbstractDeployment:
        own = config.model_copy(update={"image": image} if has_images and image else {})
        if isinstance(own, DockerDeploymentConfig):
            return Container(lifetime=lifetime, **own.model_dump())
        if isinstance(own, RemoteDeploymentConfig):
            return SharedServer(**own.model_dump())
        return own.get_deployment()

    return make
