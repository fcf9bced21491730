"""Shows a command's output as one moving line: the command's title, its running time, and the part starting now.

    COMMAND 2>&1 | tee LOG | python examples/quickstart/follow.py {lines,run} TITLE

``lines`` shows the last line of the output. ``run`` shows the part of a training run that is starting, and prints the
lines of its steps and errors. Where standard output is no terminal, the moving line is printed when it has changed, and
every four seconds. Needs the standard library only, because it shows the installation too.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from shutil import get_terminal_size

sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, whichever version is installed
from verl_ext.first_run.run_log import COLOURS, stage

EVERY = 4.0  # seconds between two lines where standard output is no terminal
# Lines of a run that are shown. Errors about /loky- are left out: a reward worker's pool prints them if it ends after
# the process that counts its semaphores, and the run is not affected.
KEPT = re.compile(r"step [0-9/]+ (\||trains on|is the last).*|^error: .*|[A-Za-z.]+Error: (?!'/loky-).*")


class MovingLine:
    """One line: title, seconds so far, and ``text``."""

    def __init__(self, title: str):
        self.title, self.text, self.shown = title, "", None
        self.start, self.printed = time.monotonic(), -EVERY
        self.on_terminal = sys.stdout.isatty()

    def show(self) -> None:
        now = time.monotonic()
        line = f"{self.title:<50} {now - self.start:4.0f} s  {self.text}"
        if self.on_terminal:
            print("\r" + line[: get_terminal_size().columns - 1] + "\x1b[K", end="", flush=True)
        elif now - self.printed >= (1.0 if self.text != self.shown else EVERY):
            print(line, flush=True)
            self.shown, self.printed = self.text, now

    def keep(self, text: str) -> None:
        """Print ``text`` above the line, for good."""
        print(("\r\x1b[K" if self.on_terminal else "") + text, flush=True)
        self.printed = time.monotonic()


def follow(of_run: bool, title: str) -> None:
    """Show standard input until it ends."""
    moving, rest, content = MovingLine(title), b"", b" "
    selector = DefaultSelector()
    selector.register(sys.stdin, EVENT_READ)
    while content:
        moving.show()
        if not selector.select(1.0):
            continue
        content = os.read(sys.stdin.fileno(), 1 << 16)
        *lines, rest = (rest + content).replace(b"\r", b"\n").split(b"\n")
        for line in (COLOURS.sub("", line.decode(errors="replace")).strip() for line in lines):
            if not of_run:
                moving.text = line if re.search(r"\w", line) else moving.text
            elif kept := KEPT.search(line):
                moving.keep(kept[0])
                moving.text = ""
            else:
                moving.text = stage(line) or moving.text
    moving.printed = -EVERY  # the last line stays
    moving.show()
    print(end="\n" if moving.on_terminal else "")


if __name__ == "__main__":
    kind, title = sys.argv[1:]
    follow(kind == "run", title)
