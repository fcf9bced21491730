"""Runs: every recipe, resumption, and the files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from support.learner import LEVELS, files, prepare
from support.runs import write_log

from verl_ext.lab.learn.run import Length, learn
from verl_ext.lab.learn.sampler import success_rates
from verl_ext.lab.learn.tasks import START, generated
from verl_ext.lab.report.runs import find_runs, read_run
from verl_ext.lab.report.summary import summarize

METHODS = [
    "grpo n=4",
    "dynamic_sampling n=4",
    "greso n=4",
    "mopps n=4 s=3",
    "pods n=6 m=3",
    "reinforce_ada n=2 M=3",
    "speed_rl n_init=2 n_cont=2",
    "pilot_commit n_pilot=2 n_commit=4 p_solve=null",
    "hora G=4 G0=2",
    "vip n=4",
    "knapsack n=4",
    "recall n=4",
    "prefix_sampling n=4",
]
UNREACHABLE = generated([START] * 5)
CLOCKS = ("timing_s/", "allocation/seconds")


def records(log):
    """The log without the metrics that clocks decide."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        (line["step"], {name: value for name, value in line["data"].items() if not name.startswith(CLOCKS)})
        for line in lines
    ]


# Each method with one of the tasks; GRPO and the method with prefixes with both.
@pytest.mark.parametrize(
    ("text", "task"),
    [*zip(METHODS, cycle(["words", "tool"]), strict=False), ("grpo n=4", "tool"), ("prefix_sampling n=4", "tool")],
)
def test_every_recipe_trains_and_its_books_balance(tmp_path, text, task):
    run = prepare(text, task, Length(rollouts=250, test_every=100))
    learn(run, files(tmp_path))
    log = records(files(tmp_path).log)
    last = log[-1][1]
    gone = last["rollouts/trained_total"] + last["rollouts/discarded_total"] + last["rollouts/failed_total"]
    assert last["rollouts/sampled_total"] == gone + last["rollouts/buffered"] >= 250
    assert [step for step, _ in log] == list(range(len(log)))
    accuracy = f"val-core/{task}/acc/mean@1"
    assert accuracy in log[0][1] and accuracy in last and 2 < sum(accuracy in data for _, data in log)
    assert last["generation/waves_total"] == sum(data["generation/waves"] for _, data in log[1:]) >= len(log) - 1
    assert {path.name for path in tmp_path.iterdir()} == {"run_0.jsonl", "run_0.json", ".run_0.lock"}


@pytest.mark.parametrize(
    "text",
    [
        "pilot_commit n_pilot=2 n_commit=4 p_solve=null",
        "prefix_sampling n=4",
        "knapsack n=4",
        "speed_rl n_init=2 n_cont=2",
        "reinforce_ada n=2 M=3 actor_rollout_ref.actor.optim.lr_warmup_steps=15",
    ],
)
def test_an_interrupted_run_goes_on_bit_by_bit(tmp_path, text):
    length = Length(rollouts=350, test_every=75)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = prepare(text, length=length)
    learn(uninterrupted, files(whole))

    class Killed(Exception):
        pass

    heard = []

    def kill_at(rollouts):
        def on_step(sampled, metrics):
            heard.append(sampled)
            if sampled >= rollouts:
                raise Killed

        return on_step

    for rollouts, saved in ((60, 0), (150, 0), (280, 75)):
        heard.clear()
        with pytest.raises(Killed):
            learn(prepare(text, length=length), files(parts), kill_at(rollouts))
        assert heard[0] > saved
    resumed, state = prepare(text, length=length), files(parts).load()
    resumed.load_state_dict(state)
    assert (resumed.sampled, resumed.duration) == (state["sampled"], state["duration"]) and resumed.duration > 0
    last = prepare(text, length=length)
    learn(last, files(parts))
    assert records(files(whole).log) == records(files(parts).log)
    for one, other in zip(uninterrupted.model.parameters(), last.model.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("belief", [np.zeros(3), {1, 2}, float("nan")])
def test_a_state_that_training_could_not_save_is_refused_at_the_first_measurement(tmp_path, belief):
    run = prepare("grpo n=4", length=Length(rollouts=200, test_every=64))
    run.controller.policy.state_dict = lambda: {"version": 1, "belief": belief}
    with pytest.raises(RuntimeError, match=r"^The state of Uniform is not JSON .*; see Uniform\.state_dict\.$"):
        learn(run, files(tmp_path))
    assert [step for step, _ in records(files(tmp_path).log)] == [0, 1, 2]


@pytest.mark.parametrize("damage", [Path.unlink, lambda log: os.truncate(log, 100)])
def test_a_state_with_numbers_of_numpy_is_read_and_one_without_its_log_is_not(tmp_path, damage):
    run = prepare("grpo n=4", length=Length(rollouts=64, test_every=32))
    run.controller.policy.state_dict = lambda: {"version": 1, "belief": np.float64(0.5)}
    saved = files(tmp_path)
    saved.log.write_text("x" * 200)
    saved.save(run)
    assert saved.load()["controller"]["policy"]["state"]["belief"] == 0.5
    damage(saved.log)
    assert saved.load() is None


def test_a_finished_run_says_which_lines_of_its_log_were_skipped(tmp_path):
    saved = files(tmp_path)
    write_log(saved.log, {0: {"loss": 1.0}, 1: {"loss": float("nan")}}, tail="{\n")
    saved.result.write_text(json.dumps({"settings": {}, "duration": 2.0, "ended": None}))
    run = saved.read()
    assert (run.name, run.steps, run.skipped_lines, run.skipped_values, run.duration) == ("run_0", (0, 1), 1, 1, 2.0)


def test_the_time_of_a_step_is_without_its_validation(monkeypatch):
    run = prepare("grpo n=4", length=Length(rollouts=100, test_every=1))
    now, validation = 0.0, run.validation

    def slow():
        nonlocal now
        now += 100
        return validation()

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(run, "validation", slow)
    metrics = run.step()
    assert metrics["timing_s/testing"] == run.duration == 100
    assert metrics["timing_s/step"] == metrics["timing_s/gen"] == metrics["timing_s/update_actor"] == 0


def test_a_run_is_measured_where_it_passes_a_multiple_and_at_its_end(tmp_path):
    """Steps of 32 rollouts, measured every 64."""
    learn(prepare("grpo n=4", length=Length(rollouts=160, test_every=64)), files(tmp_path))
    log = records(files(tmp_path).log)
    assert [step for step, _ in log] == [0, 1, 2, 3, 4, 5]
    assert [step for step, data in log if "val-core/words/acc/mean@1" in data] == [0, 2, 4, 5]


def test_the_accuracy_is_the_mean_exact_success_rate_in_all_and_of_each_level():
    run = prepare("grpo n=4 actor_rollout_ref.rollout.temperature=0.7")
    problems = run.world.held_out
    rates = success_rates(run.model, run.world.task, problems, 0.7)
    expected = {"val-core/words/acc/mean@1": rates.mean()}
    for level in LEVELS["words"]:
        of_level = [rate for problem, rate in zip(problems, rates, strict=True) if problem.level == level]
        expected[f"val-aux/words/acc/level_{level}"] = sum(of_level) / len(of_level)
    assert run.validation() == pytest.approx(expected)


def test_the_update_takes_the_policys_baseline():
    """Both runs sample the same rollouts in their first step."""
    one, other = (prepare(f"pods n=6 m=3 baseline={baseline}").step() for baseline in ("trained", "all"))
    assert one["rollouts/reward_mean"] == other["rollouts/reward_mean"]
    assert one["actor/grad_norm"] != pytest.approx(other["actor/grad_norm"], rel=0.01)


def test_predictions_from_texts_are_as_good_as_the_embeddings():
    def error(of_embeddings: float) -> float:
        run = prepare("vip n=4", length=Length(embedding_correlation=of_embeddings), batch=16)
        return [run.step()["vip/prediction_mae"] for _ in range(3)][-1]

    assert error(1.0) < 0.9 * error(0.0)


def test_a_run_is_its_seed(tmp_path):
    length = Length(rollouts=100)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        learn(prepare("grpo n=4", length=length, seed=seed), files(tmp_path, name))
    one, same, other = (records(files(tmp_path, name).log) for name in "abc")
    assert one == same and one[0] == other[0] and one[-1] != other[-1]


def test_a_good_setting_learns_and_the_report_reads_the_log(tmp_path):
    learn(prepare("grpo n=8", length=Length(rollouts=1500)), files(tmp_path, "grpo_0"))
    run = read_run(*find_runs([str(tmp_path)]))
    row = summarize([run])["runs"][0]
    assert row["final_accuracy"] > row["first_accuracy"] + 0.1
    assert row["rollouts"] >= 1500 and row["tokens"] > 1500


def test_a_finished_run_is_left_alone_and_another_is_refused(tmp_path):
    learn(prepare("grpo n=4", length=Length(rollouts=50)), files(tmp_path))
    before = files(tmp_path).log.read_bytes()
    learn(prepare("grpo n=4", length=Length(rollouts=50)), files(tmp_path))
    assert files(tmp_path).log.read_bytes() == before
    other = files(tmp_path).__class__(tmp_path, "run_0", {"name": "other"})
    with pytest.raises(ValueError, match="run_0.json is of a run with another name; choose another --out"):
        other.check()


def test_a_log_of_another_command_is_not_overwritten(tmp_path):
    log = write_log(tmp_path / "run_0.jsonl", {1: {"actor/loss": 0.5}})
    before = log.read_bytes()
    with pytest.raises(ValueError, match="run_0.jsonl is no log of verl-ext learn; choose another --out"):
        learn(prepare("grpo n=4", length=Length(rollouts=50)), files(tmp_path))
    assert log.read_bytes() == before


def test_a_run_killed_before_it_saved_its_state_begins_again(tmp_path):
    learn(prepare("grpo n=4", length=Length(rollouts=50)), files(tmp_path))
    before = records(files(tmp_path).log)
    files(tmp_path).result.unlink()
    learn(prepare("grpo n=4", length=Length(rollouts=50)), files(tmp_path))
    assert records(files(tmp_path).log) == before


def test_a_run_that_cannot_go_on_says_why(tmp_path):
    run = prepare("dynamic_sampling n=4 max_rounds=1", length=Length(rollouts=10**6))
    run.engine.problems = [replace(problem, reference=UNREACHABLE) for problem in run.engine.problems]
    learn(run, files(tmp_path))
    found = files(tmp_path).read()
    assert "rollouts with different outcomes" in found.ended
    last = found.records[run.controller.step]
    assert last["val-core/words/acc/mean@1"] >= 0 and last["generation/waves_total"] == run.engine.waves > 0


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match="prompts=48: a training step of grpo-n=4 needs 64 different prompts"):
        prepare("grpo n=4", batch=64)


def test_the_learner_does_not_import_verl():
    code = "import sys, verl_ext.lab.learn.command, verl_ext.lab.learn.hugging_face; print('verl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
