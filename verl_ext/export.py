"""``verl-ext export CHECKPOINT --out FOLDER``: a trained model as a folder that transformers and vLLM load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_ext import extras
from verl_ext.checks import require
from verl_ext.errors import RunError, option_errors
from verl_ext.files import check_folder


def main(
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N of a run, or the run's folder for its last one.")],
    out: Annotated[Path, typer.Option(help="Folder to make for weights, tokenizer and configuration.")],
    push: Annotated[str | None, typer.Option(help="OWNER/NAME of a model on the hub, to upload the folder to.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new model on the hub private.")] = False,
) -> None:
    """Write the model of a checkpoint as a folder that transformers and vLLM load, in bfloat16.

    verl merges the shards of FSDP or Megatron, and unpickles them: export only checkpoints that you trust. --push uses
    the hub's token (HF_TOKEN, or hf auth login).
    """
    try:
        with option_errors():
            check_folder(out)
            require(not out.exists() or not any(out.iterdir()), "--out", str(out), "it holds files, name a new folder")
            require(push is None or push.count("/") == 1, "--push", push, "use OWNER/NAME")
            require(push is not None or not private, "--private", private, "it is for --push")
            extras.require("cpu", "verl")
            from verl_ext.driver.export import export

            actor = export(checkpoint, out)
            typer.echo(f"{actor} -> {out}")
            if push is not None:
                typer.echo(upload(out, push, private))
    except RunError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(error.exit_code) from error


def upload(folder: Path, repository: str, private: bool) -> str:
    """Upload a folder as a model on the hub, which is made if there is none; returns the model's address.

    Raises:
        RunError: the hub cannot be reached, or refuses.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub = HfApi()
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except (OSError, ValueError, httpx.HTTPError, HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RunError(f"{folder} is written, but {repository} cannot be uploaded to ({reason})") from error
    return str(address)
