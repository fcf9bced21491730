"""The verdict of the fault harness: on fabricated metrics, and on records of real, resumed policies."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from faults.kills import aim, resume_point
from faults.record import Record, read_record, trained_prompts
from faults.verdict import compare, first_epoch_at_fault
from support.engine import BernoulliEngine, controller, epochs, prompts, run_step

from recipe.grpo.policy import Uniform
from recipe.pilot_commit.policy import PilotCommit
from verl_ext.driver.checkpoint import LAST_OF_VERL, TRACKER, WEIGHTS, BadCheckpoint, save_state
from verl_ext.lab.method import Method
from verl_ext.policy import RolloutPolicy
from verl_ext.record import RecordingController

SIZE, SAVED, KILLED, END = 24, 2, 3, 6  # rows of the data; steps


class Resumed:
    """A recorded run on the Bernoulli engine, killed after step KILLED and resumed from step SAVED.

    Args:
        skipped: rows of the data skipped by the second process.
    """

    def __init__(self, folder: Path, make, skipped: int = 0):
        self.folder, self.make = folder, make
        self.before = self.steps(self.process(0), 1, SAVED)
        self.state = json.loads(json.dumps(self.run.state_dict()))
        self.before |= self.steps(self.run, SAVED + 1, KILLED)
        second = self.process(self.state["prompts"]["seen_total"] + skipped)
        second.load_state_dict(self.state)
        second.resubmit_unfinished()
        self.after = self.steps(second, SAVED + 1, END)
        self.record = read_record(folder / "record.jsonl")

    def process(self, row: int) -> RecordingController:
        """Reads the data from ``row`` on."""
        policy, rows = self.make(), prompts(SIZE)
        policy.start_run(END, [""] * SIZE)
        rates = np.linspace(0.05, 0.95, SIZE)
        self.engine = BernoulliEngine({row.id: rate for row, rate in zip(rows, rates, strict=True)})
        stream, path = itertools.islice(epochs(rows), row, None), self.folder / "record.jsonl"
        self.run = RecordingController(policy, stream, SIZE, self.engine, path=path)
        return self.run

    def steps(self, run: RecordingController, first: int, last: int) -> dict[int, dict[str, float]]:
        metrics = {}
        for step in range(first, last + 1):
            run_step(run, step, engine=self.engine)
            metrics[step] = run.metrics()
        return metrics

    def trained(self) -> dict[int, set[tuple[str, str]]]:
        """The rows that verl would have trained on, without the step that was being written at the kill."""
        texts = {step: {(prompt, f"text of {prompt}") for prompt in ids} for step, ids in self.record.batches.items()}
        return {step: pairs for step, pairs in texts.items() if step != KILLED}

    def faults(self, **changes) -> list[str]:
        given = {"before": self.before, "after": self.after, "state": self.state, "last": END, "record": self.record}
        return compare(**(given | {"trained": self.trained()} | changes))


def uniform() -> RolloutPolicy:
    return Uniform(train_batch_size=6, n=4)


@pytest.fixture
def resumed(tmp_path) -> Resumed:
    return Resumed(tmp_path, uniform)


def policy(text: str, folder: Path):
    features = folder / "features.npy"
    np.save(features, np.random.default_rng(0).normal(size=(SIZE, 3)))
    return lambda: Method.parse(text, 6).policy(seed=0, features=features)


ESTIMATOR = ("policy", "state", "estimator", "estimator")
BELIEFS = {
    "hora G=6 G0=2 estimator=beta_posterior": (*ESTIMATOR, "counts", 0, 2),
    "vip n=6": (*ESTIMATOR, "mean", 0),
    "knapsack n=6": (*ESTIMATOR, "groups", 0, 1, 0, 0),
    "prefix_sampling": ("policy", "state", "control", "ratio", 0),
    "pilot_commit n_pilot=4 n_commit=4": ("policy", "state", "buffer", "rng", "state", "state"),
    "dynamic_sampling n=4": ("ledger", "total", "groups/trained"),
}


@pytest.mark.parametrize("text", BELIEFS)
def test_a_policy_that_is_restored_has_no_faults(tmp_path, text):
    run = Resumed(tmp_path, policy(text, tmp_path))
    assert run.faults() == []
    assert run.record.loaded == run.state and run.record.rows_per_epoch == SIZE
    assert sorted(run.record.batches) == list(range(1, END + 1))


@pytest.mark.parametrize("text", BELIEFS)
def test_a_policy_that_was_restored_otherwise_is_found_out(tmp_path, text):
    run = Resumed(tmp_path, policy(text, tmp_path))
    place, *path = run.record.loaded, *BELIEFS[text]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] += 1
    where = "".join(f"[{key}]" for key in path)
    assert [fault for fault in run.faults() if f"not the checkpoint's: the state{where} is" in fault]


class Forgetful(PilotCommit):
    """Comes back with a random generator of its own."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.buffer.rng = np.random.default_rng(99)


def test_a_policy_that_forgets_is_found_out(tmp_path):
    faults = Resumed(tmp_path, lambda: Forgetful(train_batch_size=6, n_pilot=4, n_commit=4, p_solve=None)).faults()
    assert len(faults) == 1 and "the state[policy][state][buffer][rng]" in faults[0]


def test_evicted_prompts_are_part_of_the_state(resumed):
    resumed.record.loaded["prompts"]["evicted"].append("p3")
    assert "[prompts][evicted] is ['p3'] instead of []" in "".join(resumed.faults())


def test_a_checkpoint_that_was_not_loaded_is_said(resumed):
    resumed.record.loaded = None
    assert any(
        fault.startswith("what was loaded is not the checkpoint's: the state is None") for fault in resumed.faults()
    )


@pytest.mark.parametrize("text", ["grpo n=4", "dynamic_sampling n=4"])
def test_a_row_that_was_skipped_at_the_restart_is_lost(tmp_path, text):
    faults = Resumed(tmp_path, policy(text, tmp_path), skipped=1).faults()
    assert any("read 1 rows of the data again, and so has lost others" in fault for fault in faults)


def test_rows_that_are_read_again_after_the_restart_are_found(tmp_path):
    faults = Resumed(tmp_path, uniform, skipped=-6).faults()
    assert any("epoch 1 read 6 rows of the data again" in fault for fault in faults)
    assert any("trained 6 prompts of step 2 again" in fault for fault in faults)


def test_the_first_epoch_trains_each_prompt_once(tmp_path):
    run = Resumed(tmp_path, uniform)
    assert Counter(itertools.chain(*run.record.batches.values())).total() == 36 > SIZE
    assert first_epoch_at_fault(run.record) == []
    lost = dict(run.record.batches) | {3: run.record.batches[3][1:]}
    assert first_epoch_at_fault(Record(SIZE, batches=lost)) == [
        "of the first epoch's 24 prompts 1 were not trained in it"
    ]
    short = {step: run.record.batches[step] for step in (1, 2)}
    assert first_epoch_at_fault(Record(SIZE, batches=short)) == [
        "of the first epoch's 24 prompts 12 were not trained in it"
    ]


def test_a_process_that_started_anew_counts_from_there(tmp_path):
    first = Resumed(tmp_path, uniform)
    anew = first.steps(first.process(0), 1, 2)
    record = read_record(tmp_path / "record.jsonl")
    assert record.loaded is None and sorted(record.batches) == [1, 2] and len(record.rows) == 12
    assert compare(first.after, anew, None, 2, record, {}) == []


def test_a_record_that_a_kill_has_cut_is_read(resumed, tmp_path):
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"event": "waves", "wav')
    assert read_record(tmp_path / "record.jsonl") == resumed.record


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (lambda run: {"after": {END: run.after[END]}}, "steps [6] instead of 3 to 6"),
        (lambda run: {"after": more(run.after, 4, "rollouts/failed_total")}, "the books of step 4 do not balance"),
        (lambda run: {"after": more(run.after, 3, "rollouts/sampled")}, "rollouts/sampled resumed at 47"),
        (
            lambda run: {"before": more(run.before, 2, "rollouts/buffered")},
            "checkpoint's buffer is not that",
        ),
        (lambda run: {"after": more(run.after, 5, "groups/in_batch")}, "step 5 has a batch of 6, not 7"),
        (lambda run: {"trained": {4: run.trained()[5]}}, "step 4 trained other prompts than those of its batch"),
        (lambda run: {"trained": {4: set(list(run.trained()[4])[1:])}}, "step 4 trained other prompts"),
        (lambda run: {"trained": swapped(run.trained(), 5)}, "step 5 trained a prompt with the text of another"),
    ],
)
def test_what_is_wrong_is_said(resumed, changes, said):
    assert any(said in fault for fault in resumed.faults(**changes(resumed)))


def more(steps, step, name):
    return steps | {step: steps[step] | {name: steps[step][name] + 1}}


def swapped(trained, step):
    """A prompt of ``step`` has the text of one of step 1."""
    (prompt, _), *rest = sorted(trained[step])
    return trained | {step: {(prompt, min(trained[1])[1]), *rest}}


def test_a_prompt_that_was_replayed_is_not_trained_again_by_fault(resumed):
    resumed.record.batches[4] = [*resumed.record.batches[1][:1], *resumed.record.batches[4][1:]]
    assert resumed.faults(trained={}) == ["step 4 trained 1 prompts of step 1 again"]
    replayed = resumed.after | {4: resumed.after[4] | {"prefix_sampling/rerollouts": 1.0}}
    assert resumed.faults(trained={}, after=replayed) == []


def test_padding_is_not_trained_on(tmp_path):
    rows = [("ab12-7_0_0", "what is it?"), ("ab12-7_1_0", "what is it?"), ("padd1_0_0", ""), ("padd1_1_0", "")]
    lines = [json.dumps({"uid": uid, "input": text, "score": 0.0}) for uid, text in rows]
    (tmp_path / "3.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "4.jsonl").write_text('{"uid": "cut o')
    assert trained_prompts(tmp_path, [2, 3]) == {3: {("ab12", "what is it?")}}


def checkpoint(run: Path, step: int) -> dict:
    state = controller(uniform(), [0.5] * SIZE).state_dict() | {"step": step}
    folder = save_state(run / f"global_step_{step}", state).parent
    (folder / LAST_OF_VERL).write_bytes(b"")
    (folder / WEIGHTS).mkdir()
    (folder / WEIGHTS / "model.pt").write_bytes(b"")
    return state


def test_a_kill_while_verl_notes_the_latest_checkpoint_is_to_be_refused_with_a_way_on(tmp_path):
    assert resume_point(tmp_path) == (None, [], "")
    states = {step: checkpoint(tmp_path, step) for step in (2, 4)}
    (tmp_path / TRACKER).write_text("2")
    assert resume_point(tmp_path) == (states[2], [], "")
    (tmp_path / TRACKER).write_text("")
    state, keys, refusal = resume_point(tmp_path)
    assert state == states[4] and "holds '' instead of a step" in refusal
    assert keys == ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_4"]
    for step in (2, 4):
        (tmp_path / f"global_step_{step}" / LAST_OF_VERL).unlink()
    with pytest.raises(BadCheckpoint, match="the run has no other whole checkpoint"):
        resume_point(tmp_path)


def test_a_kill_is_aimed_at_every_phase_that_a_step_has():
    step = {"timing_s/gen": 2.0, "timing_s/old_log_prob": 0.5, "timing_s/update_actor": 1.0, "timing_s/testing": 0.25}
    lasts = {"generation": (0, 2), "update": (2, 3.5), "validation": (3.5, 3.75)}
    aims = [aim(step, Random(seed)) for seed in range(200)]
    assert {phase for phase, _ in aims} == set(lasts)
    for phase, delay in aims:
        begin, end = lasts[phase]
        assert begin <= delay <= end
