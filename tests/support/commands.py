"""Commands of the lab, run in this process."""

from __future__ import annotations

import re
from collections.abc import Callable

import typer
from click.testing import Result
from typer.testing import CliRunner


def invoke(command: Callable, *arguments: object, columns: int = 200) -> Result:
    """The result of a command's main function on a terminal of this width."""
    application = typer.Typer()
    application.command()(command)
    return CliRunner().invoke(application, list(map(str, arguments)), env={"COLUMNS": str(columns)})


def flat(result: Result) -> str:
    """The output without line breaks and without the frames of error messages."""
    return re.sub(r"[\s│]+", " ", result.output)
