"""The stack under test is the CPU's; verl reads that from the environment when it is imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from verl_ext.launch import collect_rarely, export_environment

collect_rarely()
export_environment("cpu")
os.environ.setdefault("WANDB_MODE", "offline")  # the launch scripts' logger, which nobody is logged in to here
# What commands print is compared: the same width and no colours, whatever the tests run in.
for forces_a_terminal in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE", "TERMINAL_WIDTH"):
    os.environ.pop(forces_a_terminal, None)
os.environ["TERM"] = "xterm"
LOGGERS = ("recipe", "verl_ext", "verl_ext.one_wave")


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """Command lines set them for their process; here one test's are not the next one's."""
    before = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def one_environment() -> Iterator[None]:
    """``datasets`` puts a copy in place of ``os.environ`` when it filters in processes of its own.

    Whoever holds the mapping of before, as rich does, would not see what the next tests set.
    """
    before = os.environ
    yield
    os.environ = before  # noqa: B003 - the very mapping, with what it held


@pytest.fixture
def nothing_is_left():
    """Every sandbox of the test is stopped after it."""
    from support.shells import wait_for  # imports verl

    from verl_ext.sandbox import shell as sandbox

    yield
    wait_for(lambda: not sandbox.running(), collect=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
