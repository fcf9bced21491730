"""What tests of sandboxes share."""

from __future__ import annotations

import pytest
from support.shells import wait_for


@pytest.fixture
def nothing_is_left():
    """Every sandbox of the test is stopped after it."""
    from verl_ext.driver.tools import sandbox

    yield
    wait_for(lambda: not sandbox.running(), collect=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
