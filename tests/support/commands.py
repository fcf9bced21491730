"""Commands, run in this process: a process of their own would import torch and verl once more."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import sys
from collections.abc import Callable
from unittest.mock import patch

import typer
from click.testing import Result
from hydra.core.global_hydra import GlobalHydra
from typer.testing import CliRunner

from verl_ext import launch


def invoke(command: Callable, *arguments: object, columns: int = 200) -> Result:
    """The result of a command's main function on a terminal of this width."""
    application = typer.Typer()
    application.command()(command)
    return CliRunner().invoke(application, list(map(str, arguments)), env={"COLUMNS": str(columns)})


def flat(result: Result) -> str:
    """The output without line breaks and without the frames of error messages."""
    return re.sub(r"[\s│]+", " ", result.output)


def run_recipe(recipe: str, *arguments: str) -> tuple[int, str, str]:
    """``python -m recipe.<recipe> <arguments>``: exit code, stdout and stderr."""
    thresholds, code = gc.get_threshold(), 0
    GlobalHydra.instance().clear()
    with (
        patch.dict(os.environ),
        patch.object(sys, "argv", [recipe, *arguments]),
        patch.object(launch, "prepare_forks"),  # the workers of a run are no forks of the tests
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            launch.main(recipe)
        except SystemExit as end:
            code = end.code
        finally:
            gc.set_threshold(*thresholds)
            GlobalHydra.instance().clear()
    return code, output.getvalue(), errors.getvalue()
