"""The command ``verl-ext``: finds the command's function by name, and imports only that function's module."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, NoReturn

from verl_ext import __version__

TOOLS = ("typer", "rich", "yaml", "hydra", "pyarrow", "matplotlib")


class Command(NamedTuple):
    """A command: a function whose parameters typer reads, and the packages that it needs.

    Attributes:
        target: ``module:function``.
        help: one line.
        packages: import names of the packages that the command needs.
        install: arguments of pip that install them.
    """

    target: str
    help: str
    packages: tuple[str, ...] = TOOLS
    install: str = "'verl-ext[tools]'"


DATA = {
    "reasoning_gym": Command(
        "verl_ext.data.reasoning_gym:write",
        "Puzzles with verifiers.",
        (*TOOLS, "reasoning_gym"),
        "'verl-ext[tools,quickstart]'",
    ),
    "sql_tasks": Command("verl_ext.data.sql_tasks:write", "Tasks for an agent with a database."),
    "curate": Command("verl_ext.data.curate:main", "The problems of a data set that a model solves rarely enough."),
}
COMMANDS = {
    "train": Command(
        "verl_ext.launch:main",
        "Train a model: verl-ext train RECIPE key=value ...",
        ("yaml", "hydra", "verl"),
        "'verl-ext[gpu]' (on a CPU: bash examples/install_cpu.sh)",
    ),
    "simulate": Command("verl_ext.lab.simulate.__main__:main", "Compare recipes without a model, before a run."),
    "report": Command("verl_ext.lab.report.__main__:main", "Compare runs: a page, plots and tables."),
    "waste": Command("verl_ext.lab.waste.__main__:main", "Show how a run's rollouts were used, from its rollout log."),
    "verify": Command("verl_ext.lab.simulate.verify_record:main", "Run a fresh policy against the record of a run."),
    "evaluate": Command("verl_ext.evaluation.run:evaluate", "Sample a model on benchmarks: avg@k and pass@k."),
    "data": Command("verl_ext.data.prepare:main", f"Write a data set in verl's schema: a name, or {', '.join(DATA)}."),
    "hardware": Command("verl_ext.hardware.__main__:main", "Settings with which a model fits on GPUs."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``verl-ext <arguments>``; None: the arguments of this process. A mistake in a name exits with 2."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if os.getcwd() not in sys.path:  # python -m searches the current folder for a user's recipe; so does verl-ext
        sys.path.append(os.getcwd())
    if name in ("--help", "-h"):
        _write("usage: verl-ext COMMAND ... (verl-ext COMMAND --help describes its options)\n", COMMANDS)
    elif name == "--version":
        sys.stdout.write(f"verl-ext {__version__}\n")
    elif name not in COMMANDS:
        _refuse("command", name, COMMANDS)
    elif name == "train":
        _train(rest)
    elif name == "data" and rest and rest[0] in DATA:
        _run(f"data {rest[0]}", DATA[rest[0]], rest[1:])
    else:
        if name == "data" and rest == ["--help"]:
            _write("Beside the data sets below: verl-ext data NAME ... with one of these names", DATA)
        _run(name, COMMANDS[name], rest)


def _train(arguments: list[str]) -> None:
    _require("train", COMMANDS["train"])
    from verl_ext.launch import main as launch
    from verl_ext.recipes import recipes, summary, table

    if not arguments or arguments[0] in ("--help", "-h"):
        lines = table([(name, summary(name)) for name in recipes()], shutil.get_terminal_size().columns)
        usage = "usage: verl-ext train RECIPE key=value ... (verl-ext train RECIPE --help: its keys)"
        sys.stdout.write("\n".join([usage, "", *lines, ""]))
        return
    recipe, *overrides = arguments
    if recipe not in recipes():
        _refuse("recipe", recipe, recipes())
    sys.argv[1:] = overrides
    launch(recipe)


def _run(name: str, command: Command, arguments: list[str]) -> None:
    _require(name, command)
    import typer

    module, _, attribute = command.target.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    app = typer.Typer(add_completion=False)
    app.command()(function)
    app(arguments, prog_name=f"verl-ext {name}")


def _require(name: str, command: Command) -> None:
    missing = [package for package in command.packages if find_spec(package) is None]
    if missing:
        _exit(f"verl-ext {name} needs {', '.join(missing)}: pip install {command.install}")


def _refuse(kind: str, name: str, known: Mapping[str, Any]) -> NoReturn:
    meant = difflib.get_close_matches(name, known, n=1)
    question = f"did you mean {meant[0]}? " if meant else ""
    _exit(f"{name} is not a {kind}: {question}Use one of {', '.join(known)}")


def _exit(sentence: str) -> NoReturn:
    sys.stderr.write(f"error: {sentence}\n")
    raise SystemExit(2)


def _write(title: str, commands: Mapping[str, Command]) -> None:
    width = max(map(len, commands)) + 4
    rows = "".join(f"  {name}".ljust(width) + f"{command.help}\n" for name, command in commands.items())
    sys.stdout.write(f"{title}\n{rows}")
