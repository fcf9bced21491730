"""Functions that take a model's text, run where they can be killed: in processes with limited time and memory."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import TimeoutError
from functools import cache
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

WORKERS = 2  # per process that calls, such as a reward worker of verl
MEMORY = 2 << 30  # bytes that a worker may allocate beyond what it starts with


class TooExpensive(Exception):
    """It took more time or memory than it may."""


def call_limited(
    function: Callable[..., Any], *arguments: Any, timeout: float, prepare: Callable[[], Any] | None = None
) -> Any:
    """``function(*arguments)``, computed in another process; both have to be importable or picklable.

    Args:
        timeout: seconds that the call may take.
        prepare: what a new process does before its first call, out of that time: slow imports, which on a busy machine
            would otherwise use it up.

    Raises:
        TooExpensive: after ``timeout`` seconds, or when memory runs out. What the function raises is raised here.
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
    except RuntimeError:  # a thread of the pool's own has ended with an error, and it takes no more: have a new one
        _pool.cache_clear()
        return _pool(prepare).schedule(function, args=arguments, timeout=timeout)


@cache
def _pool(prepare: Callable[[], Any] | None) -> ProcessPool:
    # Not forked: the reward worker that calls this runs threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=WORKERS, context=context, initializer=_start, initargs=(prepare,))


def _start(prepare: Callable[[], Any] | None) -> None:
    if prepare is not None:
        prepare()
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
