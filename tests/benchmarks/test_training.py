"""The trainings that benchmarks start."""

from __future__ import annotations

import sys

import psutil
import pytest
import training

STEP = """\
import os
with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as file:
    file.write('{"step": 1, "data": {"timing_s/step": 2.5}}\\n')
print("trained")
"""


def run(tmp_path, code: str, *look) -> dict[int, dict[str, float]]:
    return training.run_training([sys.executable, "-c", code], tmp_path / "out", "grpo_1", *look)


def test_metrics_and_log_replace_those_of_an_earlier_run(tmp_path):
    for _ in range(2):
        assert run(tmp_path, STEP) == {1: {"timing_s/step": 2.5}}
    assert [(tmp_path / f"out/grpo_1.{ending}").read_text().count("\n") for ending in ("jsonl", "log")] == [1, 1]


def test_the_error_of_a_failed_training_names_its_log(tmp_path):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, STEP + "exit(3)")
    assert ended.value.code == f"error: grpo_1 ended with 3; {tmp_path}/out/grpo_1.log has the reason."


def test_a_training_is_killed_if_it_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "TIMEOUT", 0.2)
    looked = []
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "import time; time.sleep(30)", looked.append)
    assert ended.value.code == f"error: grpo_1 took longer than 0.2 s; {tmp_path}/out/grpo_1.log has its output."
    assert not psutil.pid_exists(looked[0].process.pid)


def test_a_training_is_killed_if_its_benchmark_is_interrupted(tmp_path):
    looked = []

    def interrupt(started) -> None:
        looked.append(started)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "import time; time.sleep(30)", interrupt)
    assert not psutil.pid_exists(looked[0].process.pid)
