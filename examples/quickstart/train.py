"""Trains the quickstart's runs, as many at the same time as cores and memory allow, and shows their steps.

    python examples/quickstart/train.py OUT AT_ONCE NAME COMMAND... [::: NAME COMMAND...]...

``AT_ONCE`` is the number of runs at the same time, or empty. The output of a run goes to ``OUT/NAME.log``. When a run
has finished, its command is written to ``OUT/NAME.done``, and this command is not started again.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import psutil
from follow import MovingLine

from verl_ext.first_run.node import memory_limit
from verl_ext.first_run.run_log import stage

GB, CORES = 5, 2  # of a run; on two cores, two runs at the same time took as long as one after the other
INTERVAL = 0.25  # seconds between two looks at the runs
SHOWN = 20  # lines from the end of a failed run's log
# Lines of a run that are shown. Errors about /loky- are left out: a reward worker's pool prints them if it ends after
# the process that counts its semaphores, and the run is not affected.
KEPT = re.compile(r"step [0-9/]+ (\||trains on|is the last).*|^error: .*|[A-Za-z.]+Error: (?!'/loky-).*")


class Run:
    """A training run. ``part`` names the part of the run that is starting."""

    def __init__(self, out: Path, name: str, command: list[str]):
        self.name, self.command, self.part = name, command, ""
        self.log, self.done = out / f"{name}.log", out / f"{name}.done"

    def is_done(self) -> bool:
        return self.done.exists() and self.done.read_text() == shlex.join(self.command)

    def start(self) -> None:
        self.started, self._rest = time.monotonic(), b""
        self.done.unlink(missing_ok=True)  # of another command, whose metrics this run replaces
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)
        self._read = open(self.log, "rb")

    def lines(self) -> list[str]:
        """Lines to show, of the log's lines since the last call."""
        *lines, self._rest = (self._rest + self._read.read()).replace(b"\r", b"\n").split(b"\n")
        kept = []
        for line in (line.decode(errors="replace").strip() for line in lines):
            if found := KEPT.search(line):
                kept.append(found[0])
            self.part = "" if found else stage(line) or self.part
        return kept

    def end(self) -> str:
        """How the ended run ended."""
        self._read.close()
        if self.process.returncode == 0:
            self.done.write_text(shlex.join(self.command))
            return f"done in {time.monotonic() - self.started:.0f} s"
        end = self.log.read_text(errors="replace").splitlines()[-SHOWN:]
        return "\n".join([f"failed; the end of {self.log}:", *end])


def room() -> int:
    """Runs that this machine can train at the same time: each needs ``CORES``, and ``GB`` of memory."""
    memory = min(psutil.virtual_memory().available, memory_limit())
    return max(1, min(len(os.sched_getaffinity(0)) // CORES, int(memory / 1e9 / GB)))


def train(runs: list[Run], at_once: int) -> list[Run]:
    """Train ``runs``, ``at_once`` at the same time. A failed run does not stop the others. Returns the failed runs."""
    waiting, running, failed = list(runs), [], []
    moving = MovingLine("training")
    width = max(len(run.name) for run in runs)
    try:
        while waiting or running:
            for run in waiting[: at_once - len(running)]:
                waiting.remove(run)
                running.append(run)
                run.start()
                moving.keep(f"{run.name:<{width}}  starts; its output: {run.log}")
            moving.text = ", ".join(f"{run.name}: {run.part}" if run.part else run.name for run in running)
            moving.show()
            time.sleep(INTERVAL)
            for run in list(running):
                has_ended = run.process.poll() is not None  # before its last lines are read
                for line in run.lines():
                    moving.keep(f"{run.name:<{width}}  {line}")
                if has_ended:
                    running.remove(run)
                    failed += [run] if run.process.returncode else []
                    moving.keep(f"{run.name:<{width}}  {run.end()}")
    except KeyboardInterrupt:  # the terminal has interrupted the runs, too
        for run in running:
            run.process.wait()
        raise
    return failed


def main(out: str, at_once: str, *arguments: str) -> None:
    commands = [list(words) for is_end, words in groupby(arguments, key=":::".__eq__) if not is_end]
    runs = [Run(Path(out), name, command) for name, *command in commands]
    left = [run for run in runs if not run.is_done()]
    for run in runs:
        if run not in left:
            print(f"{run.name}: trained before")
    if not left:
        return
    together = min(len(left), int(at_once or room()))
    if together > 1:
        print(f"{together} runs at a time share the cores; AT_ONCE=1 trains them one after the other.")
    if failed := train(left, together):
        sys.exit(f"error: {', '.join(run.name for run in failed)} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
