"""Verifiers that misbehave. The processes that judge answers import this module."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

marked = False  # a caller sets True; only a fork of the caller has this value, too


class CannotBePickled(Exception):
    """Pickle calls the class with one argument, and the class needs two."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def misbehave(kind: str, argument: Any = None) -> Any:
    if kind == "return":
        return argument
    if kind == "sleep":
        time.sleep(600)
    elif kind == "allocate":
        return len(bytes(argument or 8 << 30)) > 0  # a bytearray would also write to all of its pages
    elif kind == "write":
        Path(argument).touch()
    elif kind == "is marked":
        return marked
    elif kind == "dies of SIGTERM":
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    elif kind == "has seconds":  # of processor time
        return argument - 1 < resource.getrlimit(resource.RLIMIT_CPU)[0] - sum(os.times()[:2]) <= argument + 1
    elif kind == "spend":
        until = time.process_time() + argument
        while time.process_time() < until:
            pass
        return True
    elif kind == "die":
        os._exit(3)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "interrupt":
        raise KeyboardInterrupt
    elif kind == "raise":
        raise CannotBePickled("a", "b")
    return None
