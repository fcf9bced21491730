"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write instead; it takes the place of ``path`` when the block has ended well."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    yield unfinished
    os.replace(unfinished, path)
