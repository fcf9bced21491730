"""Sampling of a request's own: accepted values, and its way through controller, checkpoint and record."""

from __future__ import annotations

import json

import pytest
from support.engine import controller

from recipe.grpo.policy import Uniform
from verl_ext.checks import InvalidValue
from verl_ext.lab.simulate.verify_record import RecordDiffers, verify
from verl_ext.policy import Group, Prompt, Request, Sampling
from verl_ext.record import RecordingController
from verl_ext.testing.engine import KeyedEngine, epochs, prompts
from verl_ext.trajectory import Trajectory

HOT = Sampling(temperature=1.3, top_p=0.9, response_length=64)
PREFIX = Trajectory([1, 2, 3], [True] * 3)


class TwoWaves(Uniform):
    """Two rollouts as configured, then two with a sampling of their own."""

    def __init__(self, sampling=HOT):
        super().__init__(train_batch_size=2, n=2)
        self.sampling = sampling

    def on_group(self, group):
        if len(group.rollouts) > 2:
            return super().on_group(group)
        return [Request(group, 2, sampling=self.sampling)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 0), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("response_length", 0)],
)
def test_bad_values_are_refused(key, value):
    with pytest.raises(InvalidValue, match=f"^{key}={value} is not valid"):
        Sampling(**{key: value})


def test_a_response_must_be_longer_than_its_prefix():
    prompt, short = Prompt("p", 0), Sampling(response_length=3)
    for target, prefix in ((prompt, PREFIX), (Group("g", prompt, prefix=PREFIX), None)):
        with pytest.raises(InvalidValue, match="^response_length=3 is not valid: the prefix has 3 tokens, use more"):
            Request(target, 2, prefix, short)
        assert Request(target, 2, prefix, Sampling(response_length=4)).sampling.response_length == 4


def test_only_what_differs_is_saved():
    assert Sampling(temperature=0.5).state_dict() == {"temperature": 0.5} and Sampling.from_state_dict({}) is None
    assert Sampling.from_state_dict(json.loads(json.dumps(HOT.state_dict()))) == HOT
    assert "sampling" not in Group("g", Prompt("p", 0)).state_dict()


def test_sampling_is_of_one_wave_and_unfinished_waves_keep_it_over_a_restart():
    run = controller(TwoWaves(), [0.5] * 6)
    run.begin_step(1)
    assert {group.sampling for group in run.live.values()} == {None}
    run.finish_waves(run.engine.finish())
    assert {group.sampling for group in run.live.values()} == {HOT}
    state = json.loads(json.dumps(run.state_dict()))
    again = controller(TwoWaves(), [0.5] * 6)
    again.load_state_dict(state)
    assert again.resubmit_unfinished() == 4
    assert {group.sampling for group, _, _ in again.engine.waiting} == {HOT}
    group = run.live[next(iter(run.live))]
    run.finish_waves(run.engine.finish())
    run._execute([Request(group, 1)])
    assert group.sampling is None


def test_a_record_holds_it_and_another_sampling_differs(tmp_path):
    path, policy, rows = tmp_path / "record.jsonl", TwoWaves(), prompts(8)
    policy.start_run(2, [""] * 8)
    engine = KeyedEngine({row.id: 0.5 for row in rows})
    run = RecordingController(policy, epochs(rows), 8, engine, path=path)
    for step in (1, 2):
        run.begin_step(step)
        assert run.fill_batch(engine.finish)
    submitted = [request for line in path.read_text().splitlines() for request in json.loads(line).get("submitted", [])]
    assert {len(request) for request in submitted} == {3, 4}
    assert all(request[3] == HOT.state_dict() for request in submitted if len(request) == 4)
    assert verify(path, TwoWaves, [""] * 8).rollouts == 16
    with pytest.raises(RecordDiffers, match=r"temperature.*in the record"):
        verify(path, lambda: TwoWaves(Sampling(temperature=1.2)), [""] * 8)
