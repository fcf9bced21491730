"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRIAL = 1 << 16  # bytes that must fit on a disk


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; after the block, the file or folder made there is moved to ``path``.

    The content reaches the disk before the rename, and the rename before the next statement runs: neither a kill nor a
    power cut leaves half a file. If the block raises, ``path`` stays as before, and the temporary file is removed:
    the disk may be full. Each process has its own temporary path, so of several writers the last leaves its content. A
    file replaces an older file; a process with the old file open goes on reading the old content. A folder replaces
    nothing but an empty folder.

    Raises:
        OSError: the disk is full, the parent folder cannot be written to, or a folder already stands at ``path``.
    """
    path = Path(path)
    unfinished = _temporary(path)
    try:
        yield unfinished
        for part in (*unfinished.rglob("*"), unfinished):
            _sync(part)
        os.replace(unfinished, path)
    except BaseException:
        _remove(unfinished)
        raise
    _sync(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all; errors as of :func:`written_whole`."""
    with written_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def quoted(path: str | Path) -> str:
    """The path as a value on hydra's command line, whose grammar refuses accents and some of ``=,()#&~'``."""
    return json.dumps(str(path), ensure_ascii=False)


def check_folder(out: Path) -> Path:
    """``out``, if it is a folder in which files can be made, or if such a folder can be made.

    Commands call it before they start to work, and make the folder when they have something to write.

    Raises:
        ValueError: ``out`` or a folder above it is a file, or cannot be written to.
    """
    if obstacle := obstacle_to_writing(out):
        raise ValueError(f"--out {out}: {obstacle}.")
    return out


def check_file(out: Path) -> Path:
    """``out``, if a file can be made there; called like :func:`check_folder`.

    Raises:
        ValueError: ``out`` is a folder, or its folder cannot be written to.
    """
    if out.is_dir():
        raise ValueError(f"--out {out}: it is a folder; name a file.")
    check_folder(out.parent)
    return out


def obstacle_to_writing(folder: str | Path) -> str | None:
    """The reason why no file can be made in ``folder``, as a clause of an error message; None without such a reason.

    A missing folder is not made: its nearest parent must be a folder with room for a file of 64 KiB, which is written
    and removed.
    """
    absolute = Path(os.path.abspath(folder))
    nearest = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        return f"{nearest} is a file, name a folder"
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(TRIAL))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{nearest} cannot be written to ({error.strerror}), name another folder"
    return None


def _temporary(path: Path) -> Path:
    """The temporary path of this process. The temporary files of this machine's killed processes are removed."""
    name = f"{path.name}.{socket.gethostname()}-"
    for left in path.parent.glob(f"{glob.escape(name)}*.unfinished"):
        process = left.name[len(name) :].removesuffix(".unfinished")
        if process.isdecimal() and not _is_other(int(process)):
            _remove(left)
    return path.with_name(f"{name}{os.getpid()}.unfinished")


def _is_other(process: int) -> bool:
    """Whether another process than this one runs under the number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        return True
    return process != os.getpid()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
