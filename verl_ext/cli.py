"""The command ``verl-ext``: finds a subcommand by name, and imports the module of that subcommand.

The only other subcommand's module that this file imports is launch.py, which is fast to import.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from verl_ext import __version__, extras
from verl_ext.launch import collect_rarely


class Command(NamedTuple):
    """``module:function``, whose parameters typer reads, or ``module:app`` with subcommands; and one line of help."""

    target: str
    help: str


GENERATED = {
    "from": Command("verl_ext.data.columns:main", "Any file or data set of the hub, by its columns."),
    "reasoning_gym": Command("verl_ext.data.reasoning_gym:main", "Puzzles with verifiers."),
    "sql_tasks": Command("verl_ext.data.sql_tasks:main", "Tasks for an agent with a database."),
    "curate": Command("verl_ext.evaluation.curate:main", "The problems of a data set that a model rarely solves."),
}
COMMANDS = {
    "train": Command("verl_ext.launch:main", "Train a model: verl-ext train RECIPE key=value ..."),
    "new": Command("verl_ext.new:main", "Write the files of a method of your own."),
    "first_run": Command("verl_ext.first_run.command:main", "What works on this machine or cluster?"),
    "simulate": Command("verl_ext.lab.simulate.command:main", "Compare recipes without a model."),
    "learn": Command("verl_ext.lab.learn.command:main", "Compare recipes on a small model that learns."),
    "report": Command("verl_ext.lab.report.command:main", "Compare runs: a page, plots and tables."),
    "waste": Command("verl_ext.lab.waste.command:main", "Show how a run's rollouts were used."),
    "fit_probe": Command("verl_ext.lab.fit_probe:main", "Fit a prior of prompt difficulty on logged rollouts."),
    "verify": Command("verl_ext.lab.simulate.verify_record:main", "Run a fresh policy against a run's record."),
    "evaluate": Command("verl_ext.evaluation.command:app", "Sample a model on benchmarks: pass@k, mean@k, maj@k."),
    "export": Command("verl_ext.export:main", "A checkpoint as a model for transformers and vLLM."),
    "data": Command("verl_ext.data.prepare:main", "Write a data set: a published or a generated one."),
    "hardware": Command("verl_ext.hardware.command:main", "Settings with which a model fits on GPUs."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``verl-ext <arguments>``; None: the arguments of this process. A mistake in a name exits with 2."""
    collect_rarely()
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if os.getcwd() not in sys.path:  # python -m searches the current folder for a user's recipe; so does verl-ext
        sys.path.append(os.getcwd())
    try:
        if name in ("--help", "-h"):
            _write("usage: verl-ext COMMAND ... (verl-ext COMMAND --help: its options)", _lines(COMMANDS))
        elif name == "--version":
            _write(f"verl-ext {__version__}", [])
        elif name not in COMMANDS:
            _refuse("command", name, COMMANDS)
        elif name == "train":
            _train(rest)
        elif name == "data" and rest and rest[0] in GENERATED:
            _run(f"data {rest[0]}", GENERATED[rest[0]], rest[1:])
        else:
            if name == "data" and rest == ["--help"]:
                _write("verl-ext data NAME ..., with a name below, or one of these:", _lines(GENERATED))
            _run(name, COMMANDS[name], rest)
    except extras.MissingExtra as error:
        _exit(error)


def _train(arguments: Sequence[str]) -> None:
    extras.require("tools", "yaml")
    from verl_ext.recipes import recipes, summary, table

    if not arguments or arguments[0] in ("--help", "-h"):
        lines = table([(name, summary(name)) for name in recipes()], shutil.get_terminal_size().columns)
        _write("usage: verl-ext train RECIPE key=value ... (verl-ext train RECIPE --help: its keys)", lines)
        return
    recipe, *overrides = arguments
    if recipe not in recipes():
        _refuse("recipe", recipe, recipes())
    sys.argv[1:] = overrides
    _loaded(COMMANDS["train"])(recipe)


def _run(name: str, command: Command, arguments: Sequence[str]) -> None:
    extras.require("tools", "typer", "rich")
    import typer

    target: typer.Typer | Callable[..., Any] = _loaded(command)
    app = target if isinstance(target, typer.Typer) else typer.Typer(add_completion=False)
    if app is not target:
        app.command()(target)
    app(arguments, prog_name=f"verl-ext {name}")


def _loaded(command: Command) -> Any:
    module, _, attribute = command.target.partition(":")
    return getattr(import_module(module), attribute)


def _lines(commands: Mapping[str, Command]) -> list[str]:
    width = max(map(len, commands)) + 4
    return [f"  {name}".ljust(width) + command.help for name, command in commands.items()]


def _write(title: str, lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join([title, *lines]) + "\n")


def _refuse(kind: str, name: str, known: Iterable[str]) -> NoReturn:
    meant = difflib.get_close_matches(name, known, n=1)
    question = f" Did you mean {meant[0]}?" if meant else ""
    _exit(f"{name} is not a {kind}; use one of {', '.join(known)}.{question}")


def _exit(sentence: object) -> NoReturn:
    sys.stderr.write(f"error: {sentence}\n")
    raise SystemExit(2) from None
