"""Verifiers that misbehave, importable by the processes that judge answers."""

from __future__ import annotations

import os
import sys
import time
from typing import Any


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
        bytearray(8 << 30)
    elif kind == "die":
        os._exit(3)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "interrupt":
        raise KeyboardInterrupt
    elif kind == "raise":
        raise CannotBePickled("a", "b")
    return None
