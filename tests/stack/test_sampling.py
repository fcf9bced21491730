"""Requests with a sampling of their own, end to end on verl, Ray, vLLM and FSDP."""

from __future__ import annotations

import json

import pytest
from support.training import ROOT, TrainingRun, assert_books_balance

pytestmark = pytest.mark.stack
POLICY = """
from recipe.grpo.policy import Uniform
from verl_ext.policy import Request, Sampling

OWN = [None, Sampling(response_length=1), Sampling(temperature=0.01), Sampling(top_p=0.01)]


class Mixed(Uniform):
    def start_step(self, step, draw):
        requests = super().start_step(step, draw)
        return [Request(each.target, 6, sampling=own) for each, own in zip(requests, OWN, strict=True)]
"""


def test_each_request_is_sampled_as_it_says(task, tmp_path, monkeypatch):
    (tmp_path / "mixed_policy.py").write_text(POLICY)
    run = TrainingRun(
        task,
        "grpo",
        tmp_path,
        "rollout_policy._target_=mixed_policy.Mixed",
        "actor_rollout_ref.rollout.n=6",
        "trainer.total_training_steps=3",
        python_path=str(ROOT),  # the policy is in the folder of the run, which Ray searches too
    )
    steps = run.finish()
    assert list(steps) == [1, 2, 3]
    assert_books_balance(steps)
    events = [json.loads(line) for line in run.record.read_text().splitlines()]
    asked = {group: own[0] if own else {} for e in events for group, _, _, *own in e.get("submitted", [])}
    waves = {group: rollouts for e in events for group, rollouts, _ in e.get("waves", [])}
    responses = {}  # by what was asked: for each group its distinct (reward, tokens, truncated)
    for group, own in asked.items():
        rollouts = [(reward, tokens, cut) for reward, _, tokens, _, _, _, cut, *_ in waves[group]]
        responses.setdefault(json.dumps(own), []).append(rollouts)
    plain, short, cold, likely = responses.values()  # in the order of the first requests
    assert len(responses) == 4 and {len(each) for each in responses.values()} == {3}
    assert any(len(set(group)) > 1 for group in plain) and any(tokens > 1 for group in plain for _, tokens, _ in group)
    assert all(tokens == 1 for group in short for _, tokens, _ in group)
    assert any(cut for group in short for _, _, cut in group)
    assert all(len(set(group)) == 1 for group in cold + likely)
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in steps.values()) > 0.01  # another temperature
    monkeypatch.syspath_prepend(tmp_path)
    run.assert_requests_replay()
