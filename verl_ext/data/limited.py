"""Judging a model's answers. An answer is untrusted text: verifiers run in processes with limited time and memory."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import TimeoutError, wait
from functools import cache
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

# A caller gets a process for every 16 cores: verl's 8 reward workers of a node together use half of its cores.
CORES = 16
FEWEST = 2  # least number of processes of a caller
TIMEOUT = 15.0  # seconds per answer
MEMORY = 2 << 30  # bytes: what a process holds after its start may grow by so many
LOOK_PERIOD = 1.0  # seconds between two looks at whether the pool of a waiting call still works


class TooExpensive(Exception):
    """Raised by a verifier that stops itself at a limit of time or memory."""


def judge(verifier: Callable[..., bool], *arguments: Any, warm_up: tuple[Any, ...] | None = None) -> dict[str, float]:
    """The reward for an answer: 1.0 if ``verifier(*arguments)`` is true, 0.0 for anything else.

    The verifier runs in another process, which is killed after ``TIMEOUT`` seconds or ``MEMORY`` bytes. An answer that
    is too expensive, or that makes the verifier raise, is a wrong answer and not a failed rollout.

    Args:
        verifier: importable, and the arguments picklable.
        warm_up: arguments of a first call in each new process, before any limit: for imports that take seconds.

    Returns:
        ``score`` and ``acc``; ``timed_out``: whether the limits ended the call; ``verifier_error``: whether the
        verifier raised. All four are in {0, 1}.
    """
    outcome = _outcome(verifier, arguments, warm_up)
    correct = float(outcome == "correct")
    return {
        "score": correct,
        "acc": correct,
        "timed_out": float(outcome == "timed_out"),
        "verifier_error": float(outcome == "verifier_error"),
    }


def tagged_answer(text: str) -> str | None:
    """The text in the last ``<answer>`` tags, or None. The time is linear; a regular expression's can be quadratic."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return None if start < 0 else text[start + len("<answer>") : text.find("</answer>", start)].strip()


def _outcome(verifier: Callable[..., bool], arguments: tuple[Any, ...], warm_up: tuple[Any, ...] | None) -> str:
    pool = _pool(verifier, warm_up)
    try:
        return _scheduled(pool, verifier, arguments)
    except RuntimeError:  # a thread of the pool died: replace the pool, once for each call
        if pool is _pool(verifier, warm_up):
            _pool.cache_clear()
        try:
            return _scheduled(_pool(verifier, warm_up), verifier, arguments)
        except RuntimeError as error:
            # A new process imports the caller's script. Without the guard, this import would start processes, too.
            remedy = 'in a script, call the reward under if __name__ == "__main__":'
            raise RuntimeError(f"the processes that judge answers do not start; {remedy}") from error


def _scheduled(pool: ProcessPool, verifier: Callable[..., bool], arguments: tuple[Any, ...]) -> str:
    """The outcome of a call. Raises RuntimeError if the pool is broken, since calls in its queue would never end."""
    future = pool.schedule(_call, args=(verifier, arguments), timeout=TIMEOUT)
    while not wait([future], LOOK_PERIOD).done:
        if not pool.active:
            raise RuntimeError("the pool of processes that judge answers has broken")
    try:
        return future.result()
    except (TimeoutError, ProcessExpired):
        return "timed_out"


def workers() -> int:
    """Processes of a caller, for instance of a reward worker of verl, on this machine."""
    return max(FEWEST, len(os.sched_getaffinity(0)) // CORES)


@cache
def _pool(verifier: Callable[..., bool], warm_up: tuple[Any, ...] | None) -> ProcessPool:
    # Spawned, not forked: the caller, a reward worker, runs threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=workers(), context=context, initializer=_start, initargs=(verifier, warm_up))


def _start(verifier: Callable[..., bool], warm_up: tuple[Any, ...] | None) -> None:
    if warm_up is not None:
        verifier(*warm_up)
    # Pebble's own handler waits for the end of a C call, and the process that judges would wait with it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = data_pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _call(verifier: Callable[..., bool], arguments: tuple[Any, ...]) -> str:
    """Every exception ends here: some cannot be pickled, and ``SystemExit`` would end the caller.

    If the caller has been killed, nobody ends this process after ``TIMEOUT`` seconds. The system ends it after twice as
    many seconds of processor time, even within a C call.
    """
    limit, hard = math.ceil(sum(os.times()[:2]) + 2 * TIMEOUT), resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        return "correct" if verifier(*arguments) else "wrong"
    except (TooExpensive, MemoryError):
        return "timed_out"
    except BaseException:
        return "verifier_error"
