"""A process of this command's own: with its log in a file, waited for with progress, and stopped whatever the end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

POLL = 0.5  # seconds
STOP = 20.0  # seconds that it has for ending by itself
LAST_LINES = 10
TAIL = 65536  # bytes of the log's end that are read for these
# As in "(Worker pid=9) ERROR 11-21 23:39:00 [core.py:1346] ValueError: ...", and not within a sentence.
CAUSE = re.compile(r"(?:^|[\])] )((?:\w+\.)*\w+(?:Error|Exception): .+)$", re.MULTILINE)


class ChildError(RuntimeError):
    """The process ended or is not ready in time; says why, and where its log is."""


@contextlib.contextmanager
def child(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    """Start ``command``, with its output in ``log``; at the end, it and all that it has started are gone.

    That holds for Ctrl-C, an exception, and the signals that end a job or a session (SIGTERM, SIGHUP), which become
    ``SystemExit``; for SIGKILL nothing can be done.
    """
    with open(log, "wb") as output, _signals_exit():
        # A session of its own: Ctrl-C goes to this process only, which then stops that one with its workers.
        given = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **given)
        try:
            yield process
        finally:
            _stop(process)


def wait(
    process: subprocess.Popen,
    ready: Callable[[], bool],
    what: str,
    log: Path,
    console: Console,
    timeout: float = math.inf,
) -> None:
    """Until ``ready()``, while the elapsed time and the log's last line are shown.

    Raises:
        ChildError: it has ended before, or needs more than ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    console.print(f"{what}; its log is {log}", markup=False, soft_wrap=True)
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        while not ready():
            if process.poll() is not None and not ready():
                raise ChildError(f"{what} failed: it ended with {_status(process)}{explain(log)}")
            if time.monotonic() > deadline:
                raise ChildError(f"{what} failed: it was not ready after {timeout:g} s{explain(log)}")
            lines = _lines(log)
            progress.update(task, description=lines[-1][:120] if lines else "")
            time.sleep(POLL)


def explain(log: Path) -> str:
    """The first error that the log names, where it is, and its last lines."""
    lines = _lines(log)
    found = CAUSE.search("\n".join(lines))
    cause = f" ({found.group(1)})" if found else ""
    end = "".join(f"\n  {line}" for line in lines[-LAST_LINES:])
    return f"{cause}; its log is {log} and ends with:{end}" if end else f"; its log, {log}, is empty"


def _lines(log: Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def _status(process: subprocess.Popen) -> str:
    code = process.returncode
    return f"status {code}" if code >= 0 else f"signal {-code}"


def _stop(process: subprocess.Popen) -> None:
    try:
        process.terminate()
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        pass  # vLLM waits for open connections, without end
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Signals that would end this process at once raise ``SystemExit`` instead; those that are ignored stay so."""
    fatal = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in fatal:
        signal.signal(number, _raise_exit)
    try:
        yield
    finally:
        for number in fatal:
            signal.signal(number, signal.SIG_DFL)


def _raise_exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
