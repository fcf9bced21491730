"""SIGUSR1 to the waiting driver reaches the training process on any node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from ray.exceptions import RpcError

from verl_ext.driver import stop

pytestmark = pytest.mark.ray

DRIVER = """
import os, signal, sys, time
import ray
from verl_ext.driver.stop import Stopped, stop_on_signal, stop_requested

@ray.remote
class Training:
    def run(self, file):
        open(file, "w").close()
        deadline = time.monotonic() + 60
        while not stop_requested():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise Stopped("stopped after step 7")

before = signal.getsignal(signal.SIGUSR1)
with stop_on_signal():
    if sys.argv[2] == "early":
        os.kill(os.getpid(), signal.SIGUSR1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        ray.get(Training.remote().run.remote(sys.argv[1]))
    except Stopped as stopped:
        sys.stdout.write(str(stopped.args[0]))
assert signal.getsignal(signal.SIGUSR1) is before
"""


def start(folder, when: str) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(folder / "runs"), when]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_signal_while_the_training_runs(tmp_path):
    driver = start(tmp_path, "later")
    deadline = time.monotonic() + 120
    while not (tmp_path / "runs").exists():
        assert driver.poll() is None and time.monotonic() < deadline, driver.communicate()
        time.sleep(0.1)
    driver.send_signal(signal.SIGUSR1)
    output, errors = driver.communicate(timeout=90)
    assert driver.returncode == 0, errors
    assert output.endswith("stopped after step 7")


def test_a_signal_before_ray_is_there(tmp_path):
    driver = start(tmp_path, "early")
    output, errors = driver.communicate(timeout=180)
    assert driver.returncode == 0, errors
    assert output.endswith("stopped after step 7")


def test_a_request_that_ray_could_not_take_is_repeated(monkeypatch, caplog):
    taken, errors = threading.Event(), [RpcError("the head is busy")]

    def request():
        if errors:
            raise errors.pop()
        taken.set()

    monkeypatch.setattr(stop, "_POLL", 0.01)
    monkeypatch.setattr(stop.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(stop, "request_stop", request)
    with stop.stop_on_signal():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken.wait(30)
    assert "could not be passed on, and is repeated: the head is busy" in caplog.text
