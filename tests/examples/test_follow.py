"""The line that shows how far the quickstart is."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

FOLLOW = Path(__file__).parents[2] / "examples" / "quickstart" / "follow.py"
LOG = """\
\x1b[36m(pid=7)\x1b[0m INFO: Platform override from VERL_PLATFORM: cpu
Started a local Ray instance.
(PolicyTaskRunner pid=7) 08:32:19 step 1 | reward 0.469
(PolicyTaskRunner pid=7) Training Progress: 1/100
(RewardLoopWorker pid=8) KeyError: '/loky-8-bv6ehnlf'
error: trainer.nnodes=0 is not valid
"""


def followed(kind: str, log: str) -> list[str]:
    command = [sys.executable, FOLLOW, kind, "a title"]
    return subprocess.run(
        command, input=log, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


def test_steps_and_errors_of_a_run_are_printed_and_all_else_is_not():
    lines = followed("run", LOG)
    assert [line for line in lines if not line.startswith("a title")] == [
        "step 1 | reward 0.469",
        "error: trainer.nnodes=0 is not valid",
    ]


def test_the_part_of_a_run_that_starts_is_shown():
    assert followed("run", "(pid=7) Platform override\nhello\n")[-1].endswith(" s  checks of the configuration")


def test_the_last_line_of_a_command_stays():
    lines = followed("lines", "first\nlast\n────\n")
    assert lines[-1].startswith("a title")
    assert lines[-1].endswith(" s  last")


def test_a_silent_command_is_shown_again_and_again():
    command = [sys.executable, FOLLOW, "lines", "title"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("title")
    assert process.stdout.readline().startswith("title")  # without a further line of the command
    process.communicate(timeout=60)


def test_one_line_moves_on_a_terminal():
    terminal, its_other_end = pty.openpty()
    process = subprocess.Popen([sys.executable, FOLLOW, "run", "title"], stdin=subprocess.PIPE, stdout=its_other_end)
    process.communicate(LOG.encode(), timeout=60)
    os.close(its_other_end)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's answer at the end
        while part := os.read(terminal, 1 << 16):
            shown += part
    assert shown.count(b"\n") == 3  # a step, an error, and the end
    assert b"step 1 | reward 0.469\r\n" in shown
