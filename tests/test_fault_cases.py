"""The fault harness's cases, as far as they go without a run."""

from __future__ import annotations

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import hydra
import pytest
from faults import rewards, running
from faults.harness import do, give_up, table
from faults.runs import AGENT_LOOPS, NotTried, last_error, started, stop
from faults.verdict import LOST, RECOVERED, REFUSED
from omegaconf import OmegaConf
from rich.console import Console
from support.configs import RECIPES, compose
from support.engine import controller, run_step
from support.training import Task, TrainingRun, write_task
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from recipe.grpo.policy import Uniform
from verl_ext.driver.preflight.validate import BadConfig, validate
from verl_ext.errors import BadReward, EveryRolloutFailed
from verl_ext.first_run.trainings import few_rollouts
from verl_ext.policy import Group, Prompt, Rollout

STALL = "step 3: no rollout has finished for 1800 s while 4 are outstanding; see the logs"
LOST_WORKER = "the run has lost 1 of its 6 workers: {}; a worker that dies without an error of its own"
BOOKS = {f"rollouts/{name}_total": 0.0 for name in ("sampled", "trained", "discarded", "failed")}
METRICS = BOOKS | {"rollouts/buffered": 0.0, "training/off_policy/trajectory_spans/max": 1.0}
GOOD = {step: METRICS for step in range(1, running.STEPS + 1)}


def judged(name: str, sentence: str) -> str:
    return running.judge(running.FAULTS[name], 1, GOOD, f"step 1\nerror: {sentence}\n")[0]


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("a vLLM server dies", "vllm_server_0_0"),
        ("a vLLM engine dies in generation", "vllm_server_0_0 (its engine)"),
        ("a vLLM engine dies in the update", "vllm_server_0_0 (its engine)"),
        ("an agent-loop worker dies", "agent_loop_worker_0_1a2b"),
        ("a reward worker dies", "reward_loop_worker_0_1a2b"),
        ("a training worker dies", "aB3WorkerDict_0:0"),
        ("a part of TransferQueue dies", "TransferQueueStorageUnit#0"),
    ],
)
def test_the_worker_that_died_is_to_be_named(name, worker):
    assert judged(name, LOST_WORKER.format(worker)) == REFUSED
    assert judged(name, LOST_WORKER.format("another_worker_0")) == LOST
    assert judged(name, STALL) == judged(name, "") == LOST


def test_what_is_not_the_faults_own_sentence_is_lost():
    for name, fault in running.FAULTS.items():
        if fault.sentence is not None:
            assert judged(name, STALL) == LOST, name
            assert not re.match(f"error: ({fault.sentence})", ""), name
        assert running.judge(fault, 0, {1: METRICS}, "")[0] == LOST, name  # one step of four


def test_a_run_that_recovers_has_to_show_the_fault():
    for name, fault in running.FAULTS.items():
        if fault.least:
            assert running.judge(fault, 0, GOOD, "")[0] == LOST, name
            totals = {"rollouts/sampled_total": fault.least, "rollouts/failed_total": fault.least}
            met = GOOD | {running.STEPS: METRICS | totals | {fault.metric: fault.least}}
            assert running.judge(fault, 0, met, "")[0] == RECOVERED, name
            torn = GOOD | {2: METRICS | {"rollouts/sampled_total": 1.0}}
            assert running.judge(fault, 0, torn, "") == (LOST, "the books of steps [2] do not balance")


def test_the_sentences_are_the_packages_own():
    run = controller(Uniform(train_batch_size=4, n=4), [0.5] * 8, failure_rate=1.0)
    with pytest.raises(EveryRolloutFailed) as failed:
        run_step(run, 1, at_once=None)
    assert judged("every rollout times out", str(failed.value)) == REFUSED
    assert judged("a vLLM engine dies in generation", str(failed.value)) == REFUSED
    group = Group("3f-1", Prompt("3f", 0), [Rollout(reward, None, 3, 0) for reward in (-1.0, 2.0)])
    with pytest.raises(BadReward) as bad:
        _ = group.success_rate
    assert judged("rewards that are no verdicts", str(bad.value)) == REFUSED


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("name", running.FAULTS)
def test_a_case_gets_past_validation_or_is_refused_by_it_with_its_sentence(task, name, monkeypatch):
    monkeypatch.syspath_prepend(AGENT_LOOPS)  # the harness puts this folder on its runs' path
    fault = running.FAULTS[name]
    try:
        validate(compose(fault.recipe, *task.overrides(), *running.BASE, *fault.overrides))
    except BadConfig as refusal:
        assert judged(name, str(refusal)) == REFUSED
    else:
        assert "is too small" not in name


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_killed_gets_past_validation(task, recipe):
    validate(compose(recipe, *task.overrides(), few_rollouts(recipe), "data.train_max_samples=8"))


def test_rewards_have_the_fault_that_they_are_named_for():
    row = {"data_source": "reasoning_gym/spell_backward", "solution_str": "gnad", "ground_truth": "gnad"}
    entry = '{"question": "dang", "answer": "gnad", "metadata": {"word": "dang"}}'
    row["extra_info"] = {"entry": entry, "parameters": "{}", "split": "train"}
    assert rewards.without_accuracy(**row) == {"score": 1.0}
    assert rewards.without_a_verdict(**row) == {"score": 2.0}
    assert rewards.blocks_in_validation(**row).items() >= {"score": 1.0, "acc": 1.0}.items()


# ---- the harness ----


def test_a_job_that_fails_is_lost_and_takes_nothing_with_it():
    results = []

    def broken():
        yield "SIGKILL, grpo", RECOVERED
        raise StopIteration  # which a generator turns into a RuntimeError

    def impossible():
        raise NotTried("as this machine is too small")
        yield

    do("SIGKILL, grpo", broken, results)
    do("the disk is full", impossible, results)
    do("a reward raises", lambda: iter([("a reward raises", REFUSED)]), results)
    assert results == [("SIGKILL, grpo", RECOVERED), ("SIGKILL, grpo", LOST), ("a reward raises", REFUSED)]
    console = Console(width=100, record=True)
    console.print(table(results))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in console.export_text().split("\n") if line.strip()
    ]
    assert rows[0] == ["fault", "tries", RECOVERED, REFUSED, LOST] and all(set(cell) <= set("-:") for cell in rows[1])
    assert rows[2:] == [["SIGKILL, grpo", "2", "1", "0", "1"], ["a reward raises", "1", "0", "1", "0"]]


def process(code: str) -> TrainingRun:
    """A real process where a training would be."""
    run = TrainingRun.__new__(TrainingRun)
    run.process = subprocess.Popen(["bash", "-c", code])
    return run


def test_giving_up_ends_what_runs_and_begins_no_more():
    run, begun = process("sleep 60 & wait"), []
    started.append(run)
    with ThreadPoolExecutor(1) as pool:
        todo = [pool.submit(run.process.wait), pool.submit(begun.append, 1)]
        give_up(todo)
    started.remove(run)
    assert todo[0].result() == -9 and todo[1].cancelled() and not begun
    stop(run)  # has no work left


def test_a_worker_is_killed_by_its_name_and_one_that_is_not_there_is_said():
    run = process('exec -a "ray::Reward.run" sleep 60 & wait $!; exit $?')
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                run.kill_worker("ray::Reward")
                break
            except AssertionError:  # not yet begun
                time.sleep(0.05)
        assert run.process.wait(10) == 128 + 9
    finally:
        stop(run)
    run = process('exec -a "ray::Reward.run" sleep 60 & wait')
    try:
        with pytest.raises(AssertionError, match="no process of the run is named ray::Another, only"):
            run.kill_worker("ray::Another")
    finally:
        stop(run)


def test_a_disk_that_may_not_be_mounted_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # without mount, as without the right to
    with pytest.raises(NotTried, match="cannot be mounted here"), running.small_disk(tmp_path / "disk"):
        raise AssertionError("it was mounted")


def test_the_last_error_is_the_runs_own():
    assert last_error("error: one\nwarning\n(Worker) error: no\nerror: two\n") == "error: two"
    assert last_error("all is well\n") == ""


def test_the_agent_loops_are_found_where_their_file_says(monkeypatch):
    monkeypatch.syspath_prepend(AGENT_LOOPS)  # as in start()
    entries = OmegaConf.load(AGENT_LOOPS / "agent_loops.yaml")
    assert [entry.name for entry in entries] == ["raises_at_times", "never_asks"]
    assert all(issubclass(hydra.utils.get_class(entry._target_), AgentLoopBase) for entry in entries)
