"""The command ``verl-ext first_run``, with stand-ins for the checks and the trainings."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support.commands import flat, invoke

from verl_ext.first_run import node, nodes, trainings
from verl_ext.first_run.command import main
from verl_ext.first_run.table import FAILED, PASSED, Row


@pytest.fixture
def first_run(tmp_path, monkeypatch):
    """Runs the command with two recipes. ``attempt(trial)`` stands in for a training, and ``checks`` for the checks."""

    def run(attempt, *options: str, checks=()):
        monkeypatch.setattr(trainings, "attempt", lambda trial, *_: attempt(trial))
        if checks is not None:
            monkeypatch.setattr(nodes, "check_nodes", lambda *_: list(checks))
        chosen = ("--hardware", "cpu", "--model", "m", "--recipes", "grpo,vip", "--modes", "sync")
        result = invoke(main, *chosen, "--out", tmp_path / "out", *options)
        rows = json.loads((tmp_path / "out" / "rows.json").read_text())["trainings"]
        return result, {row["what"]: row["result"] for row in rows}

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return run


def passes(trial) -> Row:
    return Row(trial.name, PASSED)


def test_the_exit_status_is_1_if_a_check_or_a_training_fails(first_run):
    assert first_run(passes)[0].exit_code == 0
    result, rows = first_run(lambda trial: Row(trial.name, FAILED), "--again")
    assert result.exit_code == 1 and rows == {"grpo, sync": FAILED, "vip, sync": FAILED}
    assert first_run(passes, checks=[Row("disks", FAILED)])[0].exit_code == 1
    assert first_run(passes)[0].exit_code == 0


def test_nothing_is_trained_on_a_cluster_that_cannot_be_joined(first_run, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result, rows = first_run(passes, "--nodes", "2", checks=None)
    assert result.exit_code == 1 and rows == {}
    assert "nodes in Ray: failed: RAY_ADDRESS=127.0.0.1:1 cannot be joined" in flat(result)


def test_results_of_other_versions_are_not_continued(first_run, monkeypatch):
    monkeypatch.setattr(node, "installed_versions", lambda: {"vllm": "0.20.0"})
    first_run(passes)
    monkeypatch.setattr(node, "installed_versions", lambda: {"vllm": "0.24.0"})
    result, _ = first_run(passes)
    assert result.exit_code == 2
    assert "vllm=0.24.0 is not valid" in flat(result) and "holds a first run with 0.20.0, use another" in flat(result)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_ends_the_command_with_its_status(first_run, number, status):
    def attempt(trial):
        if trial.recipe == "vip":
            os.kill(os.getpid(), number)
        return passes(trial)

    before = signal.getsignal(number)
    result, rows = first_run(attempt)
    assert result.exit_code == status and rows == {"grpo, sync": PASSED}
    assert "the same command goes on with what is lacking" in flat(result)
    assert signal.getsignal(number) is before


def test_a_start_without_a_further_training_is_not_put_back_into_the_queue(first_run):
    def ended_after(*passed: str):
        def attempt(trial):
            if trial.recipe not in passed:
                os.kill(os.getpid(), signal.SIGUSR1)
            return passes(trial)

        return first_run(attempt)[0]

    for passed, status in (((), 1), (("grpo",), 75), (("grpo",), 1)):
        result = ended_after(*passed)
        assert result.exit_code == status
        assert ("use a longer --time of sbatch" in flat(result)) == (status == 1)


def test_what_has_passed_is_kept(first_run):
    first_run(passes)
    result, rows = first_run(lambda trial: Row(trial.name, FAILED))
    assert result.exit_code == 0 and rows == {"grpo, sync": PASSED, "vip, sync": PASSED}
