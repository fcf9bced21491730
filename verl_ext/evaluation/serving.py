"""A checkpoint, merged where it is in shards, on a server of this command's own."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console

from verl_ext.evaluation import child
from verl_ext.evaluation.checkpoint import Checkpoint
from verl_ext.evaluation.server import DIRECT, ServerError

HOST = "127.0.0.1"
SET_HERE = ("--model", "--host", "--port", "--uds", "--served-model-name", "--api-key")


def parse_arguments(text: str) -> list[str]:
    """Further arguments of ``vllm serve``, as a shell would split them.

    Raises:
        ValueError: a quotation has no end, or an argument is one that this command sets.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"server-args={text!r} cannot be split into arguments ({error}).") from error
    for argument in arguments:
        if argument.partition("=")[0].replace("_", "-") in SET_HERE:
            raise ValueError(
                f"server-args={text!r} must not set {argument.partition('=')[0]}: the server is this command's own, "
                f"on a free port of {HOST} and without a key."
            )
    return arguments


@contextlib.contextmanager
def serve(
    checkpoint: Checkpoint, arguments: Sequence[str], out: Path, console: Console, timeout: float
) -> Iterator[str]:
    """The address of a server that has the checkpoint, under the checkpoint's name, until the end of the block.

    Args:
        checkpoint: merged first where that is needed, into a folder beside ``out`` that is kept.
        arguments: further ones of ``vllm serve``.
        out: folder for ``server.log`` and ``merge.log``.
        console: for progress.
        timeout: seconds that the server may take to start.

    Raises:
        ChildError: merging failed, or the server ended or did not start in time.
        ServerError: from the block; with the end of the server's log.
    """
    folder = checkpoint.folder if checkpoint.backend is None else merge(checkpoint, out, console)
    log, port = out / "server.log", _free_port()
    with child.child(server_command(folder, checkpoint.name, port, arguments), log) as process:
        what = f"Starting vLLM with {folder}"
        child.wait(process, lambda: _is_healthy(port), what, log, console, timeout)
        try:
            yield f"http://{HOST}:{port}/v1"
        except ServerError as error:
            raise ServerError(f"{error}{child.explain(log)}") from error


def merge(checkpoint: Checkpoint, out: Path, console: Console) -> Path:
    """The checkpoint in Hugging Face format, in a folder beside ``out``; one that is there already is used again.

    Raises:
        ChildError: verl's merger failed.
    """
    target, log = out.resolve().parent / f"merged-{checkpoint.name}", out / "merge.log"
    if target.is_dir():
        return target
    try:
        with TemporaryDirectory(prefix=".merging-", dir=target.parent) as temporary:
            new = Path(temporary) / "model"
            with child.child(merge_command(checkpoint, new), log) as process:
                what = f"Merging {checkpoint.folder} into {target}"
                child.wait(process, lambda: process.poll() == 0, what, log, console)
            os.rename(new, target)
    except OSError as error:
        if not target.is_dir():  # else another evaluation was faster
            raise child.ChildError(f"{target} cannot be written ({error.strerror}).") from error
    return target


def merge_command(checkpoint: Checkpoint, target: Path) -> list[str]:
    """verl's command that writes ``checkpoint`` in Hugging Face format into ``target``."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", str(checkpoint.backend)]
    return [*command, "--local_dir", str(checkpoint.folder), "--target_dir", str(target)]


def server_command(folder: Path, name: str, port: int, arguments: Sequence[str]) -> list[str]:
    """vLLM's command that serves the model in ``folder``; ``arguments`` come last, so they win.

    Without ``--generation-config vllm`` the model's own defaults (top_k, penalties) would apply to what is not set.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", name, "--host", HOST, "--port", str(port), "--generation-config", "vllm"]
    return [*command, *arguments]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def _is_healthy(port: int) -> bool:
    try:
        with httpx.Client(mounts=DIRECT, timeout=5.0) as client:
            return client.get(f"http://{HOST}:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
