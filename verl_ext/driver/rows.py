"""Rows in TransferQueue: the fields that this driver adds, and rows of finished rollouts, written together.

A write takes four messages between three processes, with one row or with a hundred. verl writes each rollout's row by
itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import transfer_queue as tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

MOST = 256  # rows of a write
# Fields of a prompt's row.
ROLLOUTS = "__rollout_n__"  # verl's own: the number of rollouts
SESSION_OFFSET = "session_offset"
PREFIX = "rollout_prefix"  # state_dict() of the prefix, a Trajectory; {} for rollouts without a prefix
SAMPLING = "rollout_sampling"  # state_dict() of the request's Sampling; {} for rollouts sampled as configured
# Extra fields of a trajectory's row.
GENERATED, REPLAYED, TRUNCATED, DIVERGED = "generated_tokens", "prefix_tokens", "truncated", "diverged"
CANCELLED, FAILED = "cancelled", "failed"  # status of the key of a rollout without a row
LATE = "late"  # tag of the rows of a rollout that has taken longer than rollout_driver.agent_timeout


@dataclass(frozen=True)
class _Write:
    """The rows of a rollout, or the status of a prompt."""

    partition: str
    keys: list[str]
    rows: list[dict[str, Any]] | None  # fields of each key; None for tags alone
    tags: list[dict[str, Any]]
    kind: tuple  # writes of a kind can go together
    done: asyncio.Future = field(repr=False)


class Columns(dict):
    """Rows as TransferQueue reads them: name -> values of all rows.

    Values other than tensors stay in a list. A TensorDict would wrap each value in an object of its own, which takes
    more time than the rest of the write. Tensors are nested even if they have one length: TransferQueue stores the rows
    of a dense tensor as views, and a checkpoint would hold the whole tensor once for each row.
    """

    def __init__(self, rows: list[dict[str, Any]]):
        super().__init__({name: _column([row[name] for row in rows]) for name in rows[0]})
        self.batch_size = torch.Size([len(rows)])


def _column(values: list) -> torch.Tensor | list:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if not all(value.dim() for value in values):
        return torch.stack(values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


class Rows:
    """Stands for TransferQueue in verl's agent-loop worker, and writes the rows of many rollouts at once.

    Args:
        storage: name of TransferQueue's backend. Lists of values suit SimpleStorage; other backends get a TensorDict.
    """

    def __init__(self, storage: str):
        self._to_fields: Callable = Columns if storage == "SimpleStorage" else list_of_dict_to_tensordict
        self._waiting: list[_Write] = []
        self._writer: asyncio.Task | None = None

    def given_to(self, function: Callable) -> Callable:
        """``function`` of verl's worker, with these rows in place of TransferQueue. verl's module stays as it is."""
        function = inspect.unwrap(function)  # Ray wraps the methods of an actor for tracing
        names = {**function.__globals__, "tq": self, "list_of_dict_to_tensordict": list}
        return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        await self._write(partition_id, [key], None, [tag])

    async def async_kv_batch_put(
        self, keys: list[str], fields: list[dict[str, Any]], tags: list[dict[str, Any]], partition_id: str
    ) -> None:
        await self._write(partition_id, keys, fields, tags)

    async def _write(self, partition: str, keys: list[str], rows: list[dict] | None, tags: list[dict]) -> None:
        done = asyncio.get_running_loop().create_future()
        kind = partition, None if rows is None else frozenset(rows[0])
        self._waiting.append(_Write(partition, keys, rows, tags, kind, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write_all())
        await done

    async def _write_all(self) -> None:
        """Write until nothing waits. Rows that arrive during a write go into the next write."""
        while self._waiting:
            writes, self._waiting = self._waiting, []
            # Rows go first: if the prompt's end is there and a session's row is not, the session counts as failed.
            for kind in sorted(dict.fromkeys(write.kind for write in writes), key=lambda kind: kind[1] is None):
                for some in _parts(write for write in writes if write.kind == kind):
                    await self._store(some)

    async def _store(self, writes: list[_Write]) -> None:
        """Write together. If this fails, repeat each write by itself, so that a row that does not fit fails alone."""
        try:
            rows = None if writes[0].rows is None else self._to_fields([row for write in writes for row in write.rows])
            await tq.async_kv_batch_put(
                keys=[key for write in writes for key in write.keys],
                partition_id=writes[0].partition,
                fields=rows,
                tags=[tag for write in writes for tag in write.tags],
            )
        except Exception as error:
            if len(writes) > 1:
                for write in writes:
                    await self._store([write])
            elif not writes[0].done.done():
                writes[0].done.set_exception(error)
        else:
            for write in writes:
                if not write.done.done():  # cancelled, with its rollout
                    write.done.set_result(None)


def key_without_row(uid: str, session: int, status: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """Key and tag of a rollout without a row, which is ``CANCELLED`` or ``FAILED`` and has generated ``tokens``."""
    return f"{uid}_{session}_0", {"status": status, GENERATED: tokens, "min_global_steps": None}


def _parts(writes: Iterable[_Write]) -> list[list[_Write]]:
    """The writes in parts of about ``MOST`` rows."""
    parts: list[list[_Write]] = [[]]
    rows = 0
    for write in writes:
        if rows >= MOST:
            parts.append([])
            rows = 0
        parts[-1].append(write)
        rows += len(write.keys)
    return parts
