"""The stack under test is the CPU's; verl reads that from the environment when it is imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from verl_ext.launch import export_environment

export_environment("cpu")
LOGGERS = ("recipe", "verl_ext", "verl_ext.composition")


@pytest.fixture(autouse=True)
def levels_of_loggers() -> Iterator[None]:
    """Command lines set them for their process; here one test's are not the next one's."""
    before = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
