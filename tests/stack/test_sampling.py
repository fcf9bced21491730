"""Requests with a sampling of their own, and cancelled rollouts, end to end on verl, Ray, vLLM and FSDP."""

from __future__ import annotations

import json

import pytest
from support.training import ROOT, TrainingRun, assert_books_balance

pytestmark = pytest.mark.ray
POLICY = """
from recipe.grpo.policy import Uniform
from verl_ext.policy import Cancel, Discard, Request, Sampling

SLOW = Sampling(temperature=1.9)
OWN = [None, Sampling(response_length=1), Sampling(temperature=0.01), Sampling(top_p=0.01)]


class Mixed(Uniform):
    def start_step(self, step, draw):
        requests = super().start_step(step, draw)
        mixed = [Request(each.target, 6, sampling=own) for each, own in zip(requests, OWN, strict=True)]
        self.slow = draw(2)
        return [*mixed, *(Request(prompt, 6, sampling=SLOW) for prompt in self.slow)]

    def on_group(self, group):
        if group.prompt in self.slow:
            self.slow.remove(group.prompt)
            return [Discard(group, "slow")]
        super().on_group(group)
        return [] if self._awaited else [Cancel(prompt) for prompt in self.slow]
"""
LOOP = """
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SlowLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        is_slow = sampling_params["temperature"] == 1.9
        for _ in range(4 if is_slow else 1):
            output = await super().run({**sampling_params, "ignore_eos": is_slow}, **kwargs)
        return output
"""
LONGEST, TURNS = 384, 4  # of a slow rollout: tokens of each turn, and turns


def test_each_request_is_sampled_as_it_says_until_it_is_cancelled(task, tmp_path, monkeypatch):
    (tmp_path / "mixed_policy.py").write_text(POLICY)
    (tmp_path / "slow_loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("- {name: slow, _target_: slow_loop.SlowLoop}\n")
    run = TrainingRun(
        task,
        "grpo",
        tmp_path,
        "rollout_policy._target_=mixed_policy.Mixed",
        "actor_rollout_ref.rollout.n=6",
        "trainer.total_training_steps=3",
        f"data.max_response_length={LONGEST}",
        "actor_rollout_ref.rollout.max_model_len=512",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=slow",
        python_path=str(ROOT),  # the policy is in the folder of the run, which Ray searches too
        forked=True,
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
    plain, short, cold, likely, slow = responses.values()  # in the order of the first requests
    assert [len(each) for each in responses.values()] == [3, 3, 3, 3, 6]
    assert any(len(set(group)) > 1 for group in plain) and any(tokens > 1 for group in plain for _, tokens, _ in group)
    assert all(tokens == 1 for group in short for _, tokens, _ in group)
    assert any(cut for group in short for _, _, cut in group)
    # Two tokens of nearly the same probability may change places with the size of vLLM's batch.
    assert sum(len(set(group)) == 1 for group in cold + likely) >= 5
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in steps.values()) > 0.01  # another temperature
    # vLLM answers an aborted request with the tokens so far, so few cancelled rollouts end with a whole turn.
    rollouts = [rollout for rollouts in waves.values() for rollout in rollouts]
    cancelled = [tokens for _, _, tokens, *_, is_cancelled in (row for row in rollouts if len(row) > 9) if is_cancelled]
    assert 6 < len(cancelled) <= 3 * 2 * 6 and 0 < sum(cancelled) < len(cancelled) * TURNS * LONGEST
    assert sum(tokens % LONGEST > 0 for tokens in cancelled) > len(cancelled) / 2
    assert all(tokens == LONGEST or tokens in cancelled for group in slow for _, tokens, _ in group)
    last = steps[3]
    assert last["rollouts/discarded_cancelled_total"] == len(cancelled) and last["rollouts/failed_total"] == 0
    assert last["tokens/cancelled_total"] == sum(cancelled) and last["rollouts/trained_total"] == 3 * 4 * 6
    monkeypatch.syspath_prepend(tmp_path)
    run.assert_requests_replay()
