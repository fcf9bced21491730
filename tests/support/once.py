"""Files that tests share, made once for all workers of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder, filled by the first worker to ask; the other workers wait."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name).exists():
            (folder / f"{name}.part").mkdir(exist_ok=True)
            make(folder / f"{name}.part")
            (folder / f"{name}.part").rename(folder / name)
    return folder / name
