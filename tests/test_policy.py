"""The protocol's own rules."""

import json
import math

import numpy as np
import pytest

from verl_ext.errors import BadReward
from verl_ext.policy import (
    BASELINE,
    PROMPT_WEIGHT,
    Group,
    Panel,
    Prompt,
    Request,
    Rollout,
    RolloutPolicy,
    StepCost,
    has_spread,
    oversampled,
)
from verl_ext.trajectory import Trajectory


def rollouts(*rewards, correct=None, version=0):
    return [Rollout(reward, correct, 3, version) for reward in rewards]


def test_prompts_are_compared_by_id_and_row():
    one, other = Prompt("p", 0, {"data_source": "a"}), Prompt("p", 0, {"data_source": "b"})
    assert one == other and hash(one) == hash(other) and one != Prompt("p", 1) and one != Prompt("q", 0)
    assert PROMPT_WEIGHT.valid == "use one of equal, rollouts" and BASELINE.valid == "use one of trained, all"


def test_a_rollout_is_shown_without_its_tokens():
    trajectory = Trajectory(np.arange(2), np.array([True, True]))
    assert "trajectory" not in repr(Rollout(1.0, True, 2, 0, trajectory=trajectory))


def test_curves_of_a_plot_are_no_parts_of_a_whole_unless_it_says_so():
    assert not Panel(name="a", pattern="(b)", title="c", caption="d", unit="e").stacked


def test_rounds_multiply_the_largest_cost_only():
    assert StepCost.of_rounds(5, 3) == StepCost(prompts=5, n=3, usual=15, most=15)
    assert StepCost.of_rounds(5, 3, 4) == StepCost(prompts=5, n=3, usual=15, most=60)


def test_oversampling_ignores_float_noise():
    cases = {(1.1, 100): 110, (2.2, 100): 220, (3, 8): 24, (1.01, 10): 11}
    assert {case: oversampled(*case) for case in cases} == cases


def test_spread_ignores_float_noise():
    assert not has_spread([0.1 + 0.2, 0.3])
    assert not has_spread([1e6 + 1e-4, 1e6])
    assert has_spread([0.0, 1e-3]) and has_spread([0.0, 1.01e-6]) and not has_spread([0.0, 1e-6])
    assert not has_spread([1.0]) and not has_spread([])


def test_verdicts_come_from_the_verifier_first():
    group = Group("g", Prompt("p", 0), [Rollout(-1.0, False, 3, 0), Rollout(1.0, True, 3, 0)])
    assert group.verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(0.0, 1.0)).verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(0.0, 0.5)).verdicts is None
    assert Group("g", Prompt("p", 0), rollouts(-1.0, 1.0)).verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(-1.0, -1.0)).verdicts == [False, False]
    assert Group("g", Prompt("p", 0), rollouts(-1.0, 0.0)).verdicts is None
    timed_out = Rollout(0.0, False, 3, 0)  # the driver's verdict, beside a reward function that reports none
    assert Group("g", Prompt("p", 0), [*rollouts(-1.0, 1.0), timed_out]).verdicts == [False, True, False]
    assert Group("g", Prompt("p", 0), [*rollouts(-1.0, 0.5), timed_out]).verdicts is None


@pytest.mark.parametrize(
    ("made", "mixed"),
    [
        ([Rollout(-0.5, False, 3, 0), Rollout(0.0, False, 3, 0)], False),  # an overlong penalty of one rollout
        ([Rollout(0.0, True, 3, 0), Rollout(0.0, False, 3, 0)], True),
        ([*rollouts(1.0, 1.0), Rollout(math.nan, None, 0, 0, failed=True)], False),
        (rollouts(0.0, 1.0), True),
        (rollouts(0.2, 0.7), True),
        (rollouts(0.2, 0.2), False),
        (rollouts(1.0), False),
        ([], False),
    ],
)
def test_a_group_is_mixed_by_its_verdicts_or_without_them_by_its_rewards(made, mixed):
    assert Group("g", Prompt("p", 0), made).is_mixed is mixed


@pytest.mark.parametrize(("noisy", "verdict"), [(0.7 + 0.2 + 0.1, True), (1 + 2**-52, True), (0.1 + 0.2 - 0.3, False)])
def test_rewards_with_float_noise_are_verdicts(noisy, verdict):
    group = Group("g", Prompt("p", 0), rollouts(*[noisy] * 3, 0.0))
    assert group.verdicts == [verdict] * 3 + [False] and group.success_rate == 0.75 * verdict
    assert Group("g", Prompt("p", 0), rollouts(noisy, 0.5)).success_rate == (verdict + 0.5) / 2
    assert Group("g", Prompt("p", 0), rollouts(-1.0, 1.0 - 1e-9)).verdicts == [False, True]
    assert Group("g", Prompt("p", 0), rollouts(0.0, 0.99999)).verdicts is None


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


def test_the_weight_of_a_group_survives_json():
    group = Group("g", Prompt("p", 4), rollouts(0.25), weight=0.5)
    assert Group.from_state_dict(json.loads(json.dumps(group.state_dict()))).weight == 0.5
    group.weight = 1.0
    assert "weight" not in group.state_dict() and Group.from_state_dict(group.state_dict()).weight == 1


def test_state_of_another_version_is_refused():
    from recipe.grpo.policy import Uniform

    with pytest.raises(ValueError, match="version 7, this code reads version 1"):
        Uniform(train_batch_size=1, n=2).load_state_dict({"version": 7})


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([Rollout(-1.0, False, 3, 0), Rollout(1.0, True, 3, 0), Rollout(1.0, True, 3, 0)], 2 / 3),  # verdicts decide
        (rollouts(0.25, 0.75, 0.5), 0.5),
        (rollouts(0.0, 0.5), 0.25),
        (rollouts(1.0, 0.5), 0.75),
    ],
)
def test_a_success_rate_is_the_share_of_verdicts_or_the_mean_of_rewards_within_0_and_1(made, expected):
    assert Group("g", Prompt("p", 0), made).success_rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rewards", [[-0.1, 0.5], [0.5, 1.1]])
def test_rewards_outside_0_and_1_are_no_success_rate(rewards):
    with pytest.raises(BadReward, match="^prompt p has rewards from .* and no verdicts"):
        _ = Group("g", Prompt("p", 0), rollouts(*rewards)).success_rate


def test_a_prefix_opens_a_group_and_is_refused_for_one_that_exists():
    prompt, prefix = Prompt("p", 0), Trajectory(np.arange(2), np.array([True, True]))
    assert Request(prompt, 2, prefix).prefix is prefix
    assert Request(Group("g", prompt), 2).prefix is None
    with pytest.raises(ValueError, match="prefix opens a group"):
        Request(Group("g", prompt), 2, prefix)


def test_a_policy_knows_the_end_of_the_run_and_gets_no_tokens_unless_it_asks():
    policy = RolloutPolicy()
    assert policy.total_steps is None and not policy.reads_trajectories and policy.prompt_weight == "equal"
    policy.start_run(17, [])
    assert policy.total_steps == 17
    for method, *arguments in (("start_step", 1, None), ("on_group", None), ("take_batch",)):
        with pytest.raises(NotImplementedError, match=f"^RolloutPolicy has no {method}: write one that returns a list"):
            getattr(policy, method)(*arguments)
