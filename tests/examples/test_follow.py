"""The line that shows how far the installation and the quickstart's preparation are."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

FOLLOW = Path(__file__).parents[2] / "examples" / "quickstart" / "follow.py"


def test_the_last_line_of_a_command_stays():
    command = [sys.executable, FOLLOW, "a title"]
    result = subprocess.run(
        command, input="first\nlast\n────\n", capture_output=True, text=True, check=True, timeout=60
    )
    last = result.stdout.splitlines()[-1]
    assert last.startswith("a title")
    assert last.endswith(" s  last")


def test_a_silent_command_is_shown_again_and_again():
    process = subprocess.Popen(
        [sys.executable, FOLLOW, "title"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("title")
    assert process.stdout.readline().startswith("title")  # without a further line of the command
    process.communicate(timeout=60)


def test_one_line_moves_on_a_terminal():
    terminal, its_other_end = pty.openpty()
    process = subprocess.Popen([sys.executable, FOLLOW, "title"], stdin=subprocess.PIPE, stdout=its_other_end)
    process.communicate(b"first\nlast\n", timeout=60)
    os.close(its_other_end)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's answer at the end
        while part := os.read(terminal, 1 << 16):
            shown += part
    assert shown.count(b"\n") == 1  # the end
    assert shown.count(b"\r") >= 2
