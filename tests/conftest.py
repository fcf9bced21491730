"""Environment of the tests: the stack is the CPU's, and verl reads its platform from the environment at import."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from verl_ext.launch import collect_rarely, export_environment

collect_rarely()
export_environment("cpu")
os.environ.setdefault("WANDB_MODE", "offline")  # the launch scripts log to wandb, and the tests have no login
# Tests compare printed output, so the width is fixed and colours are off in every terminal.
for forces_a_terminal in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE", "TERMINAL_WIDTH"):
    os.environ.pop(forces_a_terminal, None)
os.environ["TERM"] = "xterm"
LOGGERS = ("recipe", "verl_ext")


@pytest.fixture(autouse=True)
def loggers_at_their_defaults() -> None:
    """Commands and the driver configure loggers for their process; each test starts with unconfigured loggers."""
    for name in [*LOGGERS, *(name for name in logging.root.manager.loggerDict if name.startswith(LOGGERS))]:
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.handlers, logger.propagate, logger.disabled = [], True, False


@pytest.fixture(autouse=True)
def one_environment() -> Iterator[None]:
    """Put back ``os.environ``: ``datasets`` replaces the mapping by a copy when filtering in several processes.

    A module that holds the old mapping, such as rich, would not see variables set by later tests.
    """
    before = os.environ
    yield
    os.environ = before  # noqa: B003 - the same mapping object with its earlier content


@pytest.fixture
def nothing_is_left():
    """Every sandbox is stopped at the end of the test."""
    from support.shells import wait_for  # imports verl

    from verl_ext.sandbox import shell as sandbox

    yield
    wait_for(lambda: not sandbox.running(), collect=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
