"""The quickstart's runs: as many at the same time as the machine holds, with their steps, and with what failed."""

import importlib.util
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"
LOG = """\
\x1b[36m(pid=7)\x1b[0m INFO: Platform override from VERL_PLATFORM: cpu
(PolicyTaskRunner pid=7) 08:32:19 step 1 | reward 0.469
(PolicyTaskRunner pid=7) Training Progress: 1/100
(RewardLoopWorker pid=8) KeyError: '/loky-8-bv6ehnlf'
error: trainer.nnodes=0 is not valid
"""


@pytest.fixture
def train(monkeypatch):
    """The module of ``train.py``, which is a script."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("quickstart_train", FOLDER / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(out: Path, at_once: str, **runs: str) -> subprocess.CompletedProcess:
    """Runs whose trainings are lines of bash."""
    words = [word for name, script in runs.items() for word in (name, "bash", "-c", script, ":::")]
    command = [sys.executable, FOLDER / "train.py", out, at_once, *words]
    return subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=60)


def shown(result: subprocess.CompletedProcess) -> list[str]:
    """Lines that stay."""
    return [line for line in result.stdout.splitlines() if not line.startswith("training ")]


def test_steps_and_errors_of_a_run_are_shown_and_all_else_is_in_its_log(tmp_path):
    (tmp_path / "text").write_text(LOG)
    lines = shown(trained(tmp_path, "", grpo="cat text"))
    assert lines[1:-1] == ["grpo  step 1 | reward 0.469", "grpo  error: trainer.nnodes=0 is not valid"]
    assert (tmp_path / "grpo.log").read_text() == LOG


def test_a_line_that_arrives_in_parts_is_one_line(tmp_path):
    result = trained(tmp_path, "", grpo="printf 'step 1 | rew'; sleep 1; echo 'ard 0.5'")
    assert "grpo  step 1 | reward 0.5" in shown(result)


def test_the_part_of_each_run_that_starts_is_shown(tmp_path):
    scripts = {"grpo": "Platform override\\nanother line", "vip": "ray init kwargs\\nstep 1 | reward 0.5"}
    result = trained(tmp_path, "2", **{name: f"printf '{text}\\n'; sleep 2" for name, text in scripts.items()})
    assert result.stdout.splitlines()[-3].endswith(" s  grpo: checks of the configuration, vip")


def test_runs_train_at_the_same_time(tmp_path):
    meet = "touch {}; until [[ -e {} ]]; do sleep 0.05; done"
    result = trained(tmp_path, "2", grpo=meet.format("a", "b"), vip=meet.format("b", "a"))
    assert result.returncode == 0
    assert shown(result)[0] == "2 runs at a time share the cores; AT_ONCE=1 trains them one after the other."


def test_runs_train_one_after_the_other(tmp_path):
    result = trained(tmp_path, "1", grpo="sleep 1; touch a", vip="[[ -e a ]]")
    assert (result.returncode, "at a time" in result.stdout) == (0, False)


def test_a_finished_run_is_not_trained_again_unless_its_command_has_changed(tmp_path):
    add = "echo trained >> {}"
    for _ in range(2):
        result = trained(tmp_path, "", grpo=add.format("a"), vip=add.format("b"))
    assert shown(result) == ["grpo: trained before", "vip: trained before"]
    result = trained(tmp_path, "", grpo=add.format("a"), vip=add.format("b") + " # BUDGET=8")
    assert "grpo: trained before" in shown(result)
    assert [(tmp_path / name).read_text().count("trained") for name in "ab"] == [1, 2]


def test_a_run_whose_metrics_were_replaced_is_trained_again(tmp_path):
    assert trained(tmp_path, "", grpo="echo trained >> a").returncode == 0
    assert trained(tmp_path, "", grpo="false").returncode == 1
    assert "trained before" not in trained(tmp_path, "", grpo="echo trained >> a").stdout
    assert (tmp_path / "a").read_text().count("trained") == 2


def test_a_failed_run_is_named_with_the_end_of_its_log_and_the_others_finish(tmp_path):
    result = trained(tmp_path, "2", grpo="seq 30; false", vip="sleep 1; touch a")
    assert (result.returncode, result.stderr) == (1, "error: grpo failed\n")
    assert f"grpo  failed; the end of {tmp_path}/grpo.log:\n11\n" in result.stdout
    assert (tmp_path / "a").exists()
    assert [(tmp_path / f"{name}.done").exists() for name in ("grpo", "vip")] == [False, True]


@pytest.mark.parametrize(
    ("cores", "available", "limit", "runs"),
    [
        (1, 23e9, math.inf, 1),
        (3, 23e9, math.inf, 1),
        (4, 23e9, math.inf, 2),
        (16, 23e9, math.inf, 4),
        (16, 9.9e9, math.inf, 1),
        (16, 4e9, math.inf, 1),
        (16, 23e9, 16_000_000_000, 3),
        (16, 12e9, 16_000_000_000, 2),
    ],
)
def test_each_run_has_its_cores_and_its_memory(train, monkeypatch, cores, available, limit, runs):
    monkeypatch.setattr(train, "memory_limit", lambda: limit)
    monkeypatch.setattr(train.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(train.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    assert train.room() == runs


def test_an_interrupt_waits_until_the_runs_have_ended(tmp_path):
    script = "trap 'sleep 1; touch ended; exit' INT; touch ready; while :; do sleep 0.1; done"
    command = [sys.executable, FOLDER / "train.py", tmp_path, "", "grpo", "bash", "-c", script]
    shown = tmp_path / "shown"
    with shown.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.DEVNULL,
            process_group=0,
            # A shell's job in the background ignores the signal, and so would all processes that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    while not (tmp_path / "ready").exists() or "starts" not in shown.read_text():  # the run may be ahead of train.py
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=60) != 0
    assert (tmp_path / "ended").exists()


def test_one_line_moves_on_a_terminal_below_the_steps(tmp_path):
    terminal, its_other_end = pty.openpty()
    command = [sys.executable, FOLDER / "train.py", tmp_path, "", "grpo", "echo", "step 1 | reward 0.469"]
    subprocess.run(command, stdout=its_other_end, timeout=60, check=True)
    os.close(its_other_end)
    text = os.read(terminal, 1 << 16)
    assert text.count(b"\n") == 3  # the start, a step, and the end
    assert b"\r\x1b[Kgrpo  step 1 | reward 0.469\r\n" in text
