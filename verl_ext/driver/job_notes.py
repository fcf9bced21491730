"""Notes that all processes of a Ray job can read, held by the cluster itself, not by a process or a node."""

from __future__ import annotations

import ray
from ray.experimental import internal_kv


def write(name: str, value: str) -> None:
    internal_kv._internal_kv_put(_key(name), value.encode())


def read(name: str) -> str | None:
    """What was last written under ``name``; None if nothing was."""
    value = internal_kv._internal_kv_get(_key(name))
    return None if value is None else value.decode()


def _key(name: str) -> bytes:
    return f"verl_ext/{ray.get_runtime_context().get_job_id()}/{name}".encode()
