"""Trials with a stand-in for the training: it writes metrics and ends as told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from verl_ext.first_run import trainings
from verl_ext.first_run.place import Place
from verl_ext.first_run.table import FAILED, NOT_TRIED, PASSED
from verl_ext.first_run.trainings import Trial, attempt, few_rollouts, resume_fault, trials
from verl_ext.policy import MODES

PLACE = Place("cpu", 1, 1, "model")
STAND_IN = """
import json, os, pathlib, signal, sys, time
behaviour = json.loads(sys.argv[1])
started = pathlib.Path("started")
part = 2 if started.exists() else 1
started.touch()
told = behaviour[part - 1]
stop = []
print("ray init kwargs: {}", flush=True)
signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
pathlib.Path("checkpoints").mkdir(exist_ok=True)
if told.get("waits", True):  # otherwise it ends by itself, and a signal at its very end would change its status
    pathlib.Path("record.jsonl").write_text(json.dumps({"event": "step", "step": told["first"]}))
while part == 1 and told.get("waits", True) and not stop:
    time.sleep(0.01)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(told["first"], told["last"] + 1):
        data = {"rollouts/sampled": 8, "tokens/sampled": 40, "rollouts/trained": 8, "timing_s/step": 2.0}
        data |= {name + "_total": value * step for name, value in data.items()}
        data |= {"rollouts/buffered": 0, "rollouts/discarded_total": 0, "rollouts/failed_total": 0}
        file.write(json.dumps({"step": step, "data": data | told.get("more", {})}) + "\\n")
print(told.get("says", ""))
if told.get("hangs"):
    time.sleep(600)
sys.exit(told["status"])
"""
FIRST, SECOND = {"first": 1, "last": 1, "status": 75}, {"first": 2, "last": 3, "status": 0}


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """The row of a trial whose two parts behave as told, and its folder."""

    def run(first: dict, second: dict = SECOND, limit: float = 60.0):
        line = [sys.executable, "-c", STAND_IN, json.dumps([first, second])]
        monkeypatch.setattr(trainings, "command", lambda *_: line)
        said = []
        row = attempt(Trial("grpo", "sync"), PLACE, tmp_path / "data", tmp_path / "trial", limit, said.append)
        return row, tmp_path / "trial", said

    return run


def test_stopped_and_resumed(tried):
    row, folder, said = tried(FIRST)
    assert (row.what, row.result, row.why) == ("grpo, sync", PASSED, "")
    assert row.rollouts_per_second == 8 * 3 / 6.0 and row.seconds > 0
    assert row.peak_bytes is None and row.predicted_bytes is None
    assert not (folder / "checkpoints").exists() and (folder / "run.log").exists()
    assert said[0] == "starts" and "is asked to stop after its first step: Ray" in said and "resumes" in said
    assert tried(FIRST)[0].result == PASSED  # the folder of an earlier trial is emptied
    assert tried({**FIRST, "last": 2}, {**SECOND, "first": 3})[0].result == PASSED  # the second step was under way


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ({"first": 1, "last": 0, "status": 2, "waits": False, "says": "error: bad key"}, SECOND,
         "it ended with status 2, not with 75 after SIGUSR1: bad key"),
        ({"first": 1, "last": 3, "status": 0}, SECOND, "it trained all 3 steps before SIGUSR1 stopped it"),
        (FIRST, {"first": 2, "last": 2, "status": 1, "says": "CUDAError: out"},
         "resumed, it ended with status 1: CUDAError: out"),
        (FIRST, {"first": 1, "last": 3, "status": 0}, "it trained the steps [1] and then [1, 2, 3], not 1 to 3 in two"),
        (FIRST, SECOND | {"more": {"rollouts/failed_total": 1}}, "the counts of rollouts of step 2 do not add up"),
        (FIRST, SECOND | {"more": {"tokens/sampled": 41}}, "tokens/sampled_total did not go on from the checkpoint's"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_sentence_with_the_log(tried, first, second, sentence):
    row, folder, _ = tried(first, second)
    assert row.result == FAILED and row.why.startswith(sentence) and row.why.endswith(f" ({folder}/run.log)")
    assert row.rollouts_per_second is None and row.seconds > 0


def test_a_training_that_hangs_is_killed_at_its_limit(tried):
    row, folder, _ = tried({**FIRST, "hangs": True, "says": "error: waits for ever"}, limit=3.0)
    assert row.result == FAILED and 3 <= row.seconds < 60
    assert row.why.startswith("it had not ended within --limit, after step 1; the log ends with: waits for ever (")


def test_a_place_that_cannot_run_the_mode(tmp_path):
    row = attempt(Trial("grpo", "separate_async"), Place("h100", 1, 1, "m"), tmp_path, tmp_path / "t", 9.0, print)
    assert row.result == NOT_TRIED and "there is only one" in row.why and row.seconds is None


def test_a_model_that_does_not_fit_is_a_row(tmp_path):
    row = attempt(Trial("grpo", "sync"), Place("h100", 1, 1, "Qwen/Qwen3-32B"), tmp_path, tmp_path / "t", 9.0, print)
    assert row.result == FAILED and row.why.startswith("gpus=1 leave no room for the update: ")


def test_peak_memory_is_verls_metric_in_bytes_and_both_parts_count(tried, monkeypatch):
    monkeypatch.setattr(Place, "predicted_memory", lambda *_: 4e9)
    monkeypatch.setattr(sys.modules[__name__], "PLACE", Place("h100", 1, 1, "Qwen/Qwen2.5-3B"))
    slow = {**FIRST, "more": {trainings.PEAK: 3.0, "timing_s/step": 5.0}}
    row, _, _ = tried(slow, {**SECOND, "more": {trainings.PEAK: 2.0}})
    assert (row.peak_bytes, row.predicted_bytes) == (3 * 2**30, 4e9)
    assert row.rollouts_per_second == 8 * 3 / (5 + 2 + 2)


def test_one_recipe_comes_first_in_all_modes():
    plan = trials(["pods", "grpo", "vip"], MODES)
    assert plan[:3] == [Trial("grpo", mode) for mode in MODES]
    assert plan[3:5] == [Trial("pods", "sync"), Trial("vip", "sync")] and len(plan) == len(set(plan)) == 9
    assert trials(["vip"], ["sync"]) == [Trial("vip", "sync")]


def test_a_recipe_without_small_settings_gets_few_rollouts(tmp_path, monkeypatch):
    assert few_rollouts("vip") == "experiment=_small"
    monkeypatch.setattr(trainings, "recipes", lambda: {"mine": Path(tmp_path / "config" / "mine.yaml")})
    assert few_rollouts("mine") == "actor_rollout_ref.rollout.n=4"


def test_a_run_without_steps_has_not_resumed():
    assert resume_fault({}, {1: {}, 2: {}, 3: {}}).startswith("it trained the steps [] and then [1, 2, 3]")


def test_a_folder_that_cannot_be_emptied_is_a_row(tried, tmp_path, monkeypatch):
    (tmp_path / "trial").mkdir()
    monkeypatch.setattr(trainings.shutil, "rmtree", lambda *_, **__: None)
    row, folder, _ = tried(FIRST)
    assert row.result == FAILED and row.why.startswith(f"{folder} cannot be emptied: ")


@pytest.mark.parametrize(("address", "inside"), [(None, True), ("10.0.0.1:6379", False)])
def test_on_a_cluster_a_training_has_the_folder_of_its_user(tmp_path, address, inside):
    """Ray hands the current folder on to the workers of a cluster that the training joins."""
    line = [sys.executable, "-c", "import os, sys; print(os.getcwd(), *sys.argv[1:])"]
    with trainings._started(line, replace(PLACE, address=address), tmp_path, tmp_path / "log", 1) as training:
        assert training.wait(60) == 0
    printed = f"{tmp_path}\n" if inside else f'{Path.cwd()} hydra.run.dir="{tmp_path}/hydra"\n'
    assert (tmp_path / "log").read_text() == printed
