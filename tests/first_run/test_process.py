"""A training as a subprocess."""

from __future__ import annotations

import json
import sys
import time

import psutil
import pytest

from verl_ext.first_run.process import Training, balances, metrics_of

FINE = {
    "rollouts/sampled": 8,
    "rollouts/sampled_total": 8,
    "rollouts/trained_total": 5,
    "rollouts/buffered": 1,
    "rollouts/discarded_total": 1,
    "rollouts/failed_total": 1,
}


def start(tmp_path, code: str) -> Training:
    return Training([sys.executable, "-c", code], tmp_path, tmp_path / "log", tmp_path / "metrics", {"WORD": "said"})


def test_a_training_runs_in_its_folder_with_its_environment(tmp_path):
    code = "import os; print(os.environ['WORD'], os.getcwd(), os.environ['VERL_FILE_LOGGER_PATH']); exit(3)"
    assert start(tmp_path, code).wait(60) == 3
    assert (tmp_path / "log").read_text() == f"said {tmp_path} {tmp_path}/metrics\n"
    assert start(tmp_path, "print('again')").wait(60) == 0
    assert (tmp_path / "log").read_text() == f"said {tmp_path} {tmp_path}/metrics\nagain\n"


def test_the_stage_of_a_training_is_the_last_of_its_own_log(tmp_path):
    def after(*lines: str) -> str | None:
        training = start(tmp_path, f"print({chr(10).join(lines)!r})")
        training.wait(60)
        return training.stage()

    assert after("hello") is None
    assert after("ray init kwargs: 1", "(pid=1) train dataloader initialized", "hello") == "actor (FSDP)"
    assert after("Platform override") == "checks of the configuration"  # a second start, in the same log
    assert after("bye") is None


def test_waiting_ends_with_the_condition_or_the_time(tmp_path):
    training = start(tmp_path, "import time; time.sleep(600)")
    looked = []
    assert training.wait(60, lambda: len(looked) > 1 or looked.append(1), every=0.01) is None
    with pytest.raises(TimeoutError):
        training.wait(0.05, every=0.01)
    training.kill()


def test_killed_with_all_processes_below(tmp_path):
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    training = start(tmp_path, code)
    parent = psutil.Process(training.process.pid)
    while not (children := parent.children()):
        time.sleep(0.01)
    training.kill()
    assert training.process.returncode == -9
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_steps_are_those_with_rollouts(tmp_path):
    file = tmp_path / "metrics"
    assert metrics_of(file) == {}
    lines = [{"step": 1, "data": FINE}, {"step": 1, "data": {"val": 1}}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "da')
    assert metrics_of(file) == {1: FINE}
    assert balances(FINE) and not balances(FINE | {"rollouts/failed_total": 0})
