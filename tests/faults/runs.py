"""The runs of the harness: each is ended when its trial is over, and all of them when the harness is interrupted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
from support.training import Task, TrainingRun

AGENT_LOOPS = Path(__file__).with_name("agent_loops")
started: list[TrainingRun] = []


class NotTried(Exception):
    """This machine cannot produce the fault. The message names the missing part."""


def start(task: Task, recipe: str, folder: Path, *overrides: str) -> TrainingRun:
    """Start a run, to be ended by :func:`stop_all` at the latest."""
    run = TrainingRun(task, recipe, folder, *overrides, python_path=str(AGENT_LOOPS))
    started.append(run)
    return run


def stop(run: TrainingRun) -> None:
    """End the run, if it has not ended."""
    if run.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended meanwhile
            run.kill()


def stop_all() -> None:
    """End the processes that :func:`start` has started."""
    for run in list(started):
        stop(run)


def last_error(log: str) -> str:
    """The error message at the end of a run; '' if there is none."""
    return next((line for line in reversed(log.splitlines()) if line.startswith("error: ")), "")
