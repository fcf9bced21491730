"""Finds stages and the last error in the log of a run."""

from __future__ import annotations

import re
from pathlib import Path

ERROR = re.compile(r"[\w.]*(?:Error|Exception|Exit)\b.*: .+")
TAIL = 1 << 16  # bytes at the end of a log, where the last error is searched
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Ray prints them before each line of a worker
STAGES = (  # text in the log of a run, and the part that starts there
    ("Platform override", "checks of the configuration"),
    ("ray init kwargs", "Ray"),
    ("Started a local Ray instance", "driver and TransferQueue"),
    ("dataloader initialized", "actor (FSDP)"),
    ("model engine initialized", "rollout engine (vLLM)"),
    ("all initialize finished", "agent loops and first rollouts"),
    ("Passing raw prompts", "rollouts"),
)


def stage(line: str) -> str | None:
    """The part of a run that starts with this line of the log."""
    return next((name for text, name in STAGES if text in line), None)


def last_stage(text: str) -> str | None:
    """The part that starts last in the text of a log; None if none does."""
    return next(filter(None, map(stage, reversed(text.splitlines()))), None)


def last_error(log: Path) -> str:
    """The last line of a log that begins with ``error: ``, else the last line of an exception, else the last line."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        text = COLOURS.sub("", file.read().decode(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [found[0] for line in lines if (found := ERROR.search(line))]
    return (said or raised or lines or ["it has printed nothing"])[-1]
