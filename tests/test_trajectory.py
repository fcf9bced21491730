from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.policy import Group, Prompt, Request, Rollout
from verl_ext.trajectory import Trajectory

trajectories = st.lists(st.integers(1, 6), min_size=1, max_size=9).map(
    lambda lengths: Trajectory(
        np.arange(sum(lengths)) % 997,
        np.repeat(np.arange(len(lengths)) % 2 == 0, lengths),
    )
)


def moved(moves: int) -> tuple[float, Fraction]:
    """A ratio of 0.3 after steps of 0.02 up or down, as the controller adds them, and the exact ratio."""
    ratio = 0.3
    for _ in range(abs(moves)):
        ratio += 0.02 if moves > 0 else -0.02
    return ratio, Fraction(30 + 2 * moves, 100)


ratios = st.integers(-12, 32).map(moved)


@given(trajectories)
def test_spans_alternate_and_cover_everything(trajectory):
    spans = trajectory.spans
    assert [span.generated for span in spans] == [place % 2 == 0 for place in range(len(spans))]
    assert spans[0].start == 0 and spans[-1].stop == len(trajectory)
    assert all(before.stop == after.start for before, after in zip(spans, spans[1:], strict=False))


@given(trajectories, ratios)
def test_a_prefix_is_the_first_part_and_ends_where_the_paper_says(trajectory, ratio):
    ratio, exact = ratio
    prefix = trajectory.prefix(ratio)
    interactions = sum(not span.generated for span in trajectory.spans)
    if prefix is None:
        assert interactions == 1 and not trajectory.generated[-1] or len(trajectory) == 1 or interactions == 0
        return
    stop = len(prefix)
    assert stop < len(trajectory)
    assert prefix.tokens.tolist() == trajectory.tokens[:stop].tolist()
    assert prefix.generated.tolist() == trajectory.generated[:stop].tolist()
    if interactions:
        kept = sum(not span.generated for span in prefix.spans)
        assert kept == max(1, exact * interactions // 1) and not prefix.generated[-1]
        assert trajectory.generated[stop]  # the policy's turn follows
    else:
        assert stop == max(1, exact * len(trajectory) // 1)


@given(trajectories)
def test_a_state_survives_json(trajectory):
    back = Trajectory.from_state_dict(json.loads(json.dumps(trajectory.state_dict())))
    assert back.tokens.tolist() == trajectory.tokens.tolist()
    assert back.generated.tolist() == trajectory.generated.tolist()
    assert back.bytes == 5 * len(trajectory)


def test_a_ratio_that_was_moved_down_cuts_where_the_exact_ratio_does():
    trajectory = Trajectory(np.arange(100), np.arange(100) % 2 == 0)  # 50 interactions of 2 tokens
    ratio, exact = moved(-1)
    assert ratio < exact == Fraction(28, 100) and len(trajectory.prefix(ratio)) == 2 * 14


def test_one_token_has_no_prefix():
    assert Trajectory([7], [True]).prefix(0.5) is None


@pytest.mark.parametrize(
    ("tokens", "generated", "message"),
    [([], [], "at least 1"), ([1, 2], [True], "one length"), ([1, 2], [False, True], "begins with a token")],
)
def test_what_is_no_response_is_refused(tokens, generated, message):
    with pytest.raises(ValueError, match=message):
        Trajectory(tokens, generated)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, float("nan")])
def test_a_ratio_is_between_0_and_1(ratio):
    with pytest.raises(ValueError, match="ratio"):
        Trajectory([1, 2, 3], [True] * 3).prefix(ratio)


def test_a_group_keeps_its_prefix_over_a_restart():
    prefix = Trajectory([5, 6, 7], [True, False, True])
    rollout = Rollout(1.0, True, 4, 2, prefix_tokens=2, truncated=True, trajectory=prefix, components={"acc": 1.0})
    failed = Rollout(float("nan"), None, 0, 2, failed=True, diverged=True)
    group = Group("p-1", Prompt("p", 0), [rollout, failed], 3, prefix)
    back = Group.from_state_dict(json.loads(json.dumps(group.state_dict())))
    assert back.rollouts[0] == rollout and back.rollouts[0].trajectory is None
    assert back.rollouts[1].diverged and back.rollouts[1].failed
    assert back.prefix.tokens.tolist() == [5, 6, 7] and back.prefix.generated.tolist() == [True, False, True]


def test_only_a_new_group_can_start_from_a_prefix():
    prefix = Trajectory([5], [True])
    assert Request(Prompt("p", 0), 2, prefix).prefix is prefix
    with pytest.raises(ValueError, match="prefix opens a group"):
        Request(Group("p-1", Prompt("p", 0)), 2, prefix)
