"""Starts the trainings of the benchmarks, each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from verl_ext.first_run.process import Training
from verl_ext.lab.report.runs import read_run

TIMEOUT = 3600  # seconds of a training
console = Console()


def of_recipe(recipe: str, overrides: Sequence[str]) -> list[str]:
    """The command line of a training with our driver."""
    return [sys.executable, "-m", f"recipe.{recipe}", *overrides]


def run_training(
    command: Sequence[str], folder: Path, name: str, look: Callable[[Training], None] = lambda _: None
) -> Mapping[int, dict[str, float]]:
    """Train, with metrics in ``<name>.jsonl`` and output in ``<name>.log``, which replace files of an earlier run.

    Args:
        command: the command line.
        folder: for both files.
        name: the run's name; both files are named after it.
        look: called with the training about twenty times a second until it ends.

    Returns:
        The metrics of each step.

    Raises:
        SystemExit: the training failed, or took longer than :data:`TIMEOUT` and was killed. The message names the log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    for file in (metrics, log):
        file.unlink(missing_ok=True)
    training = Training(command, Path(), log, metrics, {})

    def looked() -> bool:
        look(training)
        return False

    try:
        with console.status(f"{name} (log: {log})"):
            status = training.wait(TIMEOUT, looked, every=0.05)
    except TimeoutError:
        raise SystemExit(f"error: {name} took longer than {TIMEOUT} s; {log} has its output.") from None
    finally:
        if training.process.poll() is None:
            training.kill()
    if status:
        raise SystemExit(f"error: {name} ended with {status}; {log} has the reason.")
    return read_run([metrics]).records
