"""Where responses come from: a model on a server that runs already, or a checkpoint."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_ext.evaluation import checkpoint as checkpoints
from verl_ext.evaluation import serving, settings


@dataclass(frozen=True)
class OnServer:
    """A model on a server.

    Attributes:
        url: up to and with ``/v1``.
        model: its name there.
    """

    url: str
    model: str

    @property
    def settings(self) -> dict[str, Any]:
        """What tells its responses from others."""
        return {"model": self.model}

    def start(self, out: Path, console: Console) -> AbstractContextManager[str]:
        """The server's address, for as long as the block lasts."""
        return nullcontext(self.url)


@dataclass(frozen=True)
class FromCheckpoint:
    """A checkpoint, served by :func:`verl_ext.evaluation.serving.serve`, which describes the arguments."""

    checkpoint: checkpoints.Checkpoint
    arguments: list[str]
    timeout: float

    @property
    def model(self) -> str:
        """The name that it is served by."""
        return self.checkpoint.name

    @property
    def settings(self) -> dict[str, Any]:
        """What tells its responses from others; not the port, which is another one each time."""
        return {"checkpoint": self.checkpoint.identity, "server-args": shlex.join(self.arguments)}

    def start(self, out: Path, console: Console) -> AbstractContextManager[str]:
        """The address of its server, for as long as the block lasts; what it prints goes to ``out``."""
        return serving.serve(self.checkpoint, self.arguments, out, console, self.timeout)


def choose(
    server: str | None, model: str | None, checkpoint: Path | None, server_args: str, server_timeout: float
) -> OnServer | FromCheckpoint:
    """The source that the options of these names ask for.

    Raises:
        ValueError: they ask for both or neither, have one that belongs to the other, or one that is not valid.
    """
    if checkpoint is not None and server is not None:
        raise ValueError(f"checkpoint={checkpoint} and server={server} exclude each other; give one of them.")
    if checkpoint is not None:
        if model is not None:
            raise ValueError(f"model={model!r} belongs to --server; a checkpoint's name is the command's to choose.")
        found, arguments = checkpoints.find(checkpoint), serving.parse_arguments(server_args)
        return FromCheckpoint(found, arguments, server_timeout)
    if server is None:
        raise ValueError("checkpoint=None and server=None: one of them must be given.")
    url = settings.parse_server(server)
    if model is None:
        raise ValueError(f"model=None must be the name that the model has on server={server}.")
    if server_args:
        raise ValueError(f"server-args={server_args!r} belongs to --checkpoint; server={server} runs already.")
    return OnServer(url, model)
