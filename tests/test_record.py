"""What a record of a run holds; verl_ext.lab.simulate.verify_record reads it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.engine import BernoulliEngine

from recipe.grpo.policy import Uniform
from verl_ext.policy import Group, Prompt
from verl_ext.record import RecordingController, batch_state, first_difference


@pytest.mark.parametrize(
    ("weight", "trained", "state"),
    [
        (1.0, None, "a"),
        (1.0, (0, 2), ["a", [0, 2]]),
        (1.0, np.array([0, 2]), ["a", [0, 2]]),
        (0.5, None, ["a", None, 0.5]),
        (0.0, (0, 2), ["a", [0, 2], 0.0]),
        (2.0, None, ["a", None, 2.0]),
    ],
)
def test_trained_rollouts_and_weights_of_a_batch_are_recorded(weight, trained, state):
    assert json.dumps(batch_state([Group("a", Prompt("p", 0), trained=trained, weight=weight)])) == json.dumps([state])


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ([1, 2], [1, 3], (1, "2", "3")),
        ([1, 2], [1, 2, 3], (2, "none", "3")),
        ([1], [], (0, "1", "none")),
        (["a" * 200], ["b"], (0, "a" * 120, "b")),
    ],
)
def test_the_first_difference_of_two_lists_may_be_the_end_of_one(one, other, difference):
    assert first_difference(one, other) == difference


def test_a_number_of_rollouts_that_numpy_has_computed_is_recorded(tmp_path):
    class Computed(Uniform):
        def start_step(self, step, draw):
            return [replace(request, rollouts=np.int64(2)) for request in super().start_step(step, draw)]

    policy, engine = Computed(train_batch_size=1, n=2), BernoulliEngine({"a": 0.5})
    run = RecordingController(policy, iter([Prompt("a", 0)]), 1, engine, path=tmp_path / "r.jsonl")
    run.begin_step(1)
    (group,) = run.live.values()
    step = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[-1])
    assert step["submitted"] == [[group.id, 2, None]]
    json.dumps(run.state_dict())


def test_a_record_in_a_new_folder_has_rows_with_their_metadata_and_no_line_without_waves(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def start() -> RecordingController:
        rows = [Prompt(name, row, {"data_source": f"of {name}"}) for row, name in enumerate("ab")]
        policy = Uniform(train_batch_size=2, n=2)
        policy.start_run(3, ["", ""])
        return RecordingController(policy, iter(rows), 2, BernoulliEngine({"a": 0.5, "b": 0.5}), path="~/x/y/r.jsonl")

    run = start()
    run.begin_step(1)
    run.finish_waves([])
    events = [json.loads(line) for line in (tmp_path / "x/y/r.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["run", "step"]
    assert events[1]["rows"] == [["a", 0, {"data_source": "of a"}], ["b", 1, {"data_source": "of b"}]]
    # `loaded` is what the run has after a load, not a copy of the checkpoint.
    state = run.state_dict()
    start().load_state_dict(state | {"unknown": 1})
    last = json.loads((tmp_path / "x/y/r.jsonl").read_text().splitlines()[-1])
    assert last["state"] == last["loaded"] | {"unknown": 1} and "unknown" not in last["loaded"]
