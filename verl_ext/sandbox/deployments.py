"""Where a sandbox runs: swe-rex's deployment for a tool's configuration and a row's image."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
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

from verl_ext.sandbox.places import Local

TYPES: dict[str, type[BaseModel]] = {
    "docker": DockerDeploymentConfig,
    "remote": RemoteDeploymentConfig,
    "modal": ModalDeploymentConfig,
    "fargate": FargateDeploymentConfig,
    "daytona": DaytonaDeploymentConfig,
    "local": LocalDeploymentConfig,
}


class Container(DockerDeployment):
    """swe-rex's docker container, guaranteed to end.

    - The container ends by itself after ``lifetime`` seconds, even if the process in charge was killed.
    - ``stop`` kills the container without asking the container's server first: swe-rex would wait for a hanging server.
    - If the container does not come up, an error is raised; swe-rex would read the container's output forever.

    Args:
        lifetime: longest life of the container, in seconds.
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
    """A swe-rex server started by somebody else and shared with others: stopping the server would end their shells."""

    async def stop(self) -> None:
        self._runtime = None


def deployment_config(deployment: Mapping[str, Any]) -> BaseModel:
    """swe-rex's own configuration of this deployment.

    Args:
        deployment: the ``type``, and swe-rex's settings for this type.

    Raises:
        ValueError: the type is not known, or swe-rex does not accept a setting.
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


def deployment_maker(config: BaseModel, image: str | None, lifetime: float) -> Callable[[], Any]:
    """A function to make deployments; none is started.

    Args:
        config: see :func:`deployment_config`.
        image: container image, for types with images; None means the configuration's image.
        lifetime: seconds until a docker container ends in any case. Modal, Fargate and Daytona have their own settings
            for this limit.

    Raises:
        ValueError: this type needs an image, and none is given.
    """
    has_images = "image" in type(config).model_fields
    if has_images and not image and "image" not in config.model_fields_set:
        raise ValueError("create_kwargs.image is missing, and config.deployment has no image either.")

    def make() -> Any:
        own = config.model_copy(update={"image": image} if has_images and image else {})
        if isinstance(own, DockerDeploymentConfig):
            return Container(lifetime=lifetime, **own.model_dump())
        if isinstance(own, RemoteDeploymentConfig):
            return SharedServer(**own.model_dump())
        if isinstance(own, LocalDeploymentConfig):
            return Local()
        return own.get_deployment()

    return make
