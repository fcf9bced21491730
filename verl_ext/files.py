"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; after the block, the temporary file replaces ``path``.

    The content reaches the disk before the rename, and the rename before the next statement runs: neither a kill nor a
    power cut leaves half a file. If the block raises, ``path`` stays as before and the temporary file is removed, which
    frees its space on a full disk. A process that has the old file open goes on reading the old content.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        yield unfinished
        _sync(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all; errors as of :func:`written_whole`."""
    with written_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
