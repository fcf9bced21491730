"""Policy state on disk: written whole or not at all, and recognised when it is not ours."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

FILE_NAME = "rollout_policy.json"
VERSION = 1


class BadCheckpoint(RuntimeError):
    """A policy state that is missing, truncated or foreign. The message names the path and what to do."""


def save_state(folder: str | Path, state: dict) -> Path:
    """Write ``state`` (JSON-able) atomically: temporary file, fsync, rename, fsync of the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    body = json.dumps(state, allow_nan=False, sort_keys=True)
    document = json.dumps({"version": VERSION, "sha256": _checksum(body), "state": body})
    path, temporary = folder / FILE_NAME, folder / f"{FILE_NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(document)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path


def load_state(folder: str | Path) -> dict:
    """Inverse of :func:`save_state`.

    Raises:
        BadCheckpoint: the file is missing, truncated, altered, or of another version.
    """
    path = Path(folder) / FILE_NAME
    remedy = "resume from an earlier global_step_* with trainer.resume_mode=resume_path, or start anew"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} does not exist, so this is no checkpoint of ours: {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path} is truncated or not ours ({error}): {remedy}") from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        found = document.get("version") if isinstance(document, dict) else None
        raise BadCheckpoint(f"{path} has version {found!r}, this code reads version {VERSION}: {remedy}")
    if _checksum(document["state"]) != document["sha256"]:
        raise BadCheckpoint(f"{path} does not match its checksum: {remedy}")
    return json.loads(document["state"])


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
