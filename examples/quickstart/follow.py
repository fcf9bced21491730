"""Shows a command's output as one moving line: the command's title, its running time, and its last line of output.

    COMMAND 2>&1 | tee LOG | python examples/quickstart/follow.py TITLE

Where standard output is no terminal, the line is printed when it has changed, and every four seconds. Needs the
standard library only, because it shows the installation too.
"""

from __future__ import annotations

import os
import re
import sys
import time
from selectors import EVENT_READ, DefaultSelector
from shutil import get_terminal_size

EVERY = 4.0  # seconds between two lines where standard output is no terminal


class MovingLine:
    """One line: title, seconds so far, and ``text``."""

    def __init__(self, title: str):
        self.title, self.text, self.shown = title, "", None
        self.start, self.printed = time.monotonic(), -EVERY
        self.on_terminal = sys.stdout.isatty()

    def show(self) -> None:
        now = time.monotonic()
        line = f"{self.title} {now - self.start:4.0f} s  {self.text}"
        if self.on_terminal:
            print("\r" + line[: get_terminal_size().columns - 1] + "\x1b[K", end="", flush=True)
        elif now - self.printed >= (1.0 if self.text != self.shown else EVERY):
            print(line, flush=True)
            self.shown, self.printed = self.text, now

    def keep(self, text: str) -> None:
        """Print ``text`` above the line, for good."""
        print(("\r\x1b[K" if self.on_terminal else "") + text, flush=True)
        self.printed = time.monotonic()


def follow(title: str) -> None:
    """Show standard input until it ends."""
    moving, rest, content = MovingLine(f"{title:<50}"), b"", b" "
    selector = DefaultSelector()
    selector.register(sys.stdin, EVENT_READ)
    while content:
        moving.show()
        if not selector.select(1.0):
            continue
        content = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, rest = (rest + content).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").strip()
            moving.text = text if re.search(r"\w", text) else moving.text
    moving.printed = -EVERY  # the last line stays
    moving.show()
    print(end="\n" if moving.on_terminal else "")


if __name__ == "__main__":
    follow(*sys.argv[1:])
