"""Calls in processes with limited time and memory, for functions of untrusted text from a model."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import TimeoutError
from functools import cache
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

WORKERS = 2  # processes per caller; a caller is, for instance, a reward worker of verl
MEMORY = 2 << 30  # bytes to allocate after a process has started


class TooExpensive(Exception):
    """The call exceeded its limit of time or memory."""


def call_limited(
    function: Callable[..., Any], *arguments: Any, timeout: float, prepare: Callable[[], Any] | None = None
) -> Any:
    """Compute ``function(*arguments)`` in another process.

    Args:
        function: importable, as the arguments must be picklable. Its exceptions are raised here.
        timeout: seconds for the call.
        prepare: called once in each new process, before the clock starts: for imports taking seconds on a busy
            machine.

    Raises:
        TooExpensive: after ``timeout`` seconds, or when memory runs out.
    """
    try:
        return _schedule(prepare, function, arguments, timeout).result()
    except (TimeoutError, ProcessExpired, MemoryError) as error:
        raise TooExpensive(f"{function.__name__}: {type(error).__name__}") from error


def _schedule(
    prepare: Callable[[], Any] | None, function: Callable[..., Any], arguments: tuple, timeout: float
) -> ProcessFuture:
    try:
        return _pool(prepare).schedule(function, args=arguments, timeout=timeout)
    except RuntimeError:  # one of the pool's threads died, and the pool refuses calls from then on: replace the pool
        _pool.cache_clear()
        return _pool(prepare).schedule(function, args=arguments, timeout=timeout)


@cache
def _pool(prepare: Callable[[], Any] | None) -> ProcessPool:
    # Spawned, not forked: the caller, a reward worker, runs threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=WORKERS, context=context, initializer=_start, initargs=(prepare,))


def _start(prepare: Callable[[], Any] | None) -> None:
    if prepare is not None:
        prepare()
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
