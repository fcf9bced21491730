"""Real processes: they are waited for, explained when they die, and gone afterwards, whatever the end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from verl_ext.evaluation import child

# What vLLM does: a worker process, and no end as long as a connection is open.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("worker", worker.pid, flush=True)
time.sleep(600)
"""
USER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # neither is ignored, whoever runs this
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pathlib import Path
from verl_ext.evaluation import child
child.STOP = 0.5
with child.child([sys.executable, "-c", Path(sys.argv[1]).read_text()], Path(sys.argv[2])):
    time.sleep(600)
"""


def python(code):
    return [sys.executable, "-c", code]


def wait_for_worker(log):
    deadline = time.monotonic() + 60
    while not (log.exists() and "worker" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return psutil.Process(int(log.read_text().split()[1]))


def assert_gone(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(30)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_it_and_its_workers_are_stopped_at_the_end(tmp_path, monkeypatch, error):
    monkeypatch.setattr(child, "STOP", 0.5)
    log = tmp_path / "log"
    with contextlib.suppress(*([error] if error else [])):
        with child.child(python(STUBBORN), log) as process:
            worker = wait_for_worker(log)
            if error:
                raise error
    assert process.returncode == -signal.SIGKILL
    assert_gone(worker)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_they_are_stopped_when_a_signal_ends_this_command(tmp_path, number):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    log = tmp_path / "log"
    user = subprocess.Popen([*python(USER), tmp_path / "stubborn.py", log], stderr=subprocess.DEVNULL)
    worker = wait_for_worker(log)
    user.send_signal(number)
    code = user.wait(60)
    assert code == (-signal.SIGINT if number == signal.SIGINT else 128 + number)
    assert_gone(worker)


def test_one_that_dies_is_explained_with_the_end_of_its_log(tmp_path):
    code = (
        "import sys\n"
        "print('WARNING [a.py:1] This can cause errors like `OSError: [Errno 24]`')\n"
        "print('(Engine pid=3) ERROR 11-21 [core.py:9] ValueError: no room for a KV cache')\n"
        "print('RuntimeError: see root cause above')\n"
        "sys.exit(3)\n"
    )
    log = tmp_path / "log"
    with pytest.raises(child.ChildError) as error:
        with child.child(python(code), log) as process:
            child.wait(process, lambda: False, "Starting it", log, Console(quiet=True))
    said = str(error.value)
    assert said.startswith(
        "Starting it failed: it ended with status 3 (ValueError: no room for a KV cache); its log is "
    )
    assert f"its log is {log} and ends with:\n" in said and said.endswith("\n  RuntimeError: see root cause above")

    with pytest.raises(child.ChildError, match=f"ended with signal 9; its log, {log}, is empty"):
        with child.child(python("import os; os.kill(os.getpid(), 9)"), log) as process:
            child.wait(process, lambda: False, "Starting it", log, Console(quiet=True))


def test_one_that_is_not_ready_in_time_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "STOP", 0.5)
    log = tmp_path / "log"
    with pytest.raises(child.ChildError, match="Starting it failed: it was not ready after 1 s; its log is"):
        with child.child(python(STUBBORN), log) as process:
            wait_for_worker(log)
            child.wait(process, lambda: False, "Starting it", log, Console(quiet=True), timeout=1.0)
    assert process.returncode == -signal.SIGKILL


def test_one_that_ends_well_is_waited_for(tmp_path):
    log = tmp_path / "log"
    before = signal.getsignal(signal.SIGTERM)
    with child.child(python("print('done')"), log) as process:
        child.wait(process, lambda: process.poll() == 0, "Doing it", log, Console(quiet=True))
    assert log.read_text() == "done\n" and process.returncode == 0
    assert signal.getsignal(signal.SIGTERM) == before
