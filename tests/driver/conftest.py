"""A TransferQueue, in a Ray of its own, for the tests of a process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def queue() -> None:
    """Stays for the next module's tests; tests/conftest.py ends it before a test that has no queue."""
    from support.queue_rows import start_queue  # imports verl

    start_queue()
