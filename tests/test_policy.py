"""The protocol's own rules."""

import json
import math

import pytest

from verl_ext.policy import Group, Prompt, Rollout, has_spread


def rollouts(*rewards, correct=None, version=0):
    return [Rollout(reward, correct, 3, version) for reward in rewards]


def test_spread_ignores_float_noise():
    assert not has_spread([0.1 + 0.2, 0.3])
    assert not has_spread([1e6 + 1e-4, 1e6])
    assert has_spread([0.0, 1e-3])
    assert not has_spread([1.0]) and not has_spread([])


def test_verdicts_come_from_the_verifier_first():
    group = Group("g", Prompt("p", 0), [Rollout(-1.0, False, 3, 0), Rollout(1.0, True, 3, 0)])
    assert group.verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(0.0, 1.0)).verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(0.0, 0.5)).verdicts is None
    assert Group("g", Prompt("p", 0), rollouts(-1.0, 1.0)).verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(-1.0, -1.0)).verdicts == [False, False]
    assert Group("g", Prompt("p", 0), rollouts(-1.0, 0.0)).verdicts is None


def test_delay_is_of_the_oldest_rollout_and_failed_ones_do_not_count():
    group = Group("g", Prompt("p", 0), rollouts(1.0, version=2) + rollouts(0.0, version=5))
    assert group.delay(6) == 3
    group.rollouts.append(Rollout(math.nan, None, 0, 0, failed=True))
    assert group.delay(6) == 3 and len(group.usable) == 2 and group.rewards.tolist() == [1.0, 0.0]


def test_group_state_survives_json():
    group = Group("g", Prompt("p", 4, {"data_source": "x"}), rollouts(0.25), outstanding=2)
    group.rollouts.append(Rollout(math.nan, None, 0, 1, prefix_tokens=7, failed=True))
    restored = Group.from_state_dict(json.loads(json.dumps(group.state_dict(), allow_nan=False)))
    assert restored.state_dict() == group.state_dict()
    assert restored.prompt.metadata == {"data_source": "x"} and math.isnan(restored.rollouts[1].reward)


def test_state_of_another_version_is_refused():
    from recipe.grpo.policy import Uniform

    with pytest.raises(ValueError, match="version 7, this code reads version 1"):
        Uniform(train_batch_size=1, n=2).load_state_dict({"version": 7})
