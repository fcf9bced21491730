"""GRESO: streaks, skipping, the size of rounds, and the adaptation of the exploration probabilities."""

from __future__ import annotations

import json
import math
from itertools import islice, takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, prompts, run_step

from recipe.dynamic_sampling.policy import DynamicSampling
from recipe.greso.policy import Greso
from verl_ext.policy import Group, Rollout, has_spread

PROMPT = prompts(1)[0]
REWARDS = {"easy": (1, 1, 1), "hard": (0, 0, 0), "spread": (1, 0, 1)}


def group(kind, number=0):
    rollouts = [Rollout(float(reward), bool(reward), 5, 0) for reward in REWARDS[kind]]
    return Group(f"g{number}", PROMPT, rollouts)


@given(st.lists(st.sampled_from(sorted(REWARDS)), max_size=12), st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_exploration_falls_with_the_last_visits_of_one_kind(kinds, p_easy, p_hard):
    policy = Greso(train_batch_size=4, n=3, p_easy=p_easy, p_hard=p_hard)
    for number, kind in enumerate(kinds):
        assert policy._learn(group(kind, number)) == kind
    last = kinds[-1] if kinds else "spread"
    visits = len(list(takewhile(lambda kind: kind == last, reversed(kinds))))
    p = {"easy": p_easy, "hard": p_hard, "spread": 1.0}[last]
    assert policy.exploration_probability(PROMPT) == pytest.approx(max(p**visits, 0.01))


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [((0.3, 0.3), "easy"), ((0.0, 0.0), "hard"), ((-0.5, -0.5), "hard"), ((7.0, 7.0), "easy"), ((0.2, 0.9), "spread")],
)
def test_without_verdicts_equal_rewards_above_0_are_easy(rewards, kind):
    policy = Greso(train_batch_size=4, n=2)
    assert policy._learn(Group("g", PROMPT, [Rollout(reward, None, 5, 0) for reward in rewards])) == kind


def test_a_group_of_one_usable_rollout_says_nothing():
    policy = Greso(train_batch_size=4, n=2)
    one = Group("g", PROMPT, [Rollout(1.0, True, 5, 0), Rollout(math.nan, None, 0, 0, failed=True)])
    assert policy._learn(one) == "failed" and not policy.streaks


@pytest.mark.parametrize("streak", [0, 1, 2, 5])
@given(seed=st.integers(0, 2**31), p=st.floats(0.05, 0.95))
@settings(max_examples=15)
def test_prompts_are_generated_with_their_probability(streak, seed, p):
    """The number of drawn prompts until 20 are chosen has a negative binomial distribution."""
    policy = Greso(train_batch_size=20, n=2, s=1, p_hard=p, seed=seed)
    rows = prompts(8000)
    policy.streaks = {row.id: -streak for row in rows}
    unseen = iter(rows)
    policy._unfiltered = lambda count, but=(): list(islice(unseen, count))
    assert len(policy._draw_selected(20)) == 20
    explored = max(p**streak, 0.01)
    assert abs(policy._skipped + 20 - 20 / explored) <= 8 * math.sqrt(20 * (1 - explored)) / explored


def test_prompts_that_a_round_may_not_draw_are_not_skipped_ones():
    policy = Greso(train_batch_size=4, n=2, s=1, seed=0)
    policy.streaks = {"p2": 100, "p4": 100}
    rows = prompts(9)
    policy._unfiltered = lambda count, but=(): [row for row in rows if row.id not in but][:count]
    assert [prompt.id for prompt in policy._draw_selected(4, {"p0", "p1"})] == ["p3", "p5", "p6", "p7"]
    assert policy._skipped == 2


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_a_further_round_has_the_prompts_that_the_step_is_expected_to_need(size, spread, easy, ready):
    policy = Greso(train_batch_size=size, n=2)
    policy._groups.update({"spread": spread, "easy": easy})
    policy._ready = [None] * min(ready, size - 1)
    if not spread + easy:
        assert policy._expected_need() == math.ceil(1.5 * size)
        return
    needed = 1.25 * (size - len(policy._ready)) * (spread + easy) / max(spread, 1)
    assert policy._expected_need() == math.ceil(max(needed, size / 4))


@pytest.mark.parametrize(("easy", "hard"), [(0, 0), (2, 0), (0, 4), (2, 4), (1, 3)])
def test_probabilities_move_against_the_share_of_their_kind(easy, hard):
    """Of 20 groups with a target of 0.25, more than 1.67 easy and 3.33 hard groups are too many."""
    policy = Greso(train_batch_size=4, n=2)
    policy._groups.update({"easy": easy, "hard": hard, "spread": 20 - easy - hard})
    policy._adapt()
    assert policy.p == pytest.approx({"easy": 0.49 if easy >= 2 else 0.51, "hard": 0.49 if hard >= 4 else 0.51})
    for _ in range(100):
        policy._adapt()
    assert set(policy.p.values()) <= {0.05, 0.95}


def test_nothing_is_skipped_or_adapted_in_the_first_epoch():
    run = controller(Greso(train_batch_size=4, n=4), [0.0, 1.0, 0.5, 0.5] * 40)
    for step in range(1, 5):
        run_step(run, step)
        metrics = run.metrics()
        assert metrics["greso/skipped"] == 0 and metrics["greso/p_easy"] == metrics["greso/p_hard"] == 0.5
        assert metrics["data/epoch"] < 1
    while metrics["data/epoch"] < 3:
        step += 1
        run_step(run, step)
        metrics = run.metrics()
    assert run.policy.p != {"easy": 0.5, "hard": 0.5}


def test_skipped_prompts_are_neither_lost_nor_blocked():
    """Prompts without spread become rare, and every one of them is generated again in later epochs."""
    run = controller(Greso(train_batch_size=4, n=8, seed=3), [0.0] * 20 + [1.0] * 20 + [0.5] * 40)
    skipped = 0.0
    for step in range(1, 200):
        batch = run_step(run, step)
        assert len(batch) == 4 and all(has_spread(group.rewards) for group in batch)
        metrics = run.metrics()
        skipped += metrics["greso/skipped"]
        assert not run.live
    visits = {prompt: 0 for prompt in run.engine.success_rates}
    for wave in run.engine.submitted:
        for prompt, _ in wave:
            visits[prompt] += 1
    without, useful = [visits[f"p{row}"] for row in range(40)], [visits[f"p{row}"] for row in range(40, 80)]
    assert min(without) > 1 and np.mean(without) < np.mean(useful) / 3
    drawn = sum(visits.values()) + skipped
    assert drawn == metrics["data/drawn_total"]


def test_it_costs_fewer_rollouts_than_dynamic_sampling():
    rates = [0.0] * 20 + [1.0] * 20 + [0.5] * 20

    def cost(policy):
        run = controller(policy, rates)
        for step in range(1, 60):
            run_step(run, step)
        return run.metrics()["rollouts/sampled_total"]

    sizes = {"train_batch_size": 4, "n": 8, "s": 1.5}
    assert cost(Greso(**sizes)) < 0.75 * cost(DynamicSampling(**sizes))


def test_a_round_that_would_skip_every_prompt_generates_the_first():
    policy = Greso(train_batch_size=2, n=4, s=1, seed=1)
    run = controller(policy, [0.5] * 8)
    policy.streaks = {f"p{row}": 100 for row in range(8)}
    assert len(run_step(run, 1)) == 2
    assert run.metrics()["greso/skipped"] > 0


def test_the_state_continues_streaks_probabilities_and_random_numbers():
    run = controller(Greso(train_batch_size=4, n=4), [0.0, 1.0, 0.5] * 8)
    for step in range(1, 9):
        run_step(run, step)
    state = json.loads(json.dumps(run.policy.state_dict()))
    other = Greso(train_batch_size=4, n=4)
    other.load_state_dict(state)
    assert other.state_dict() == run.policy.state_dict() and other.rng.random() == run.policy.rng.random()


@pytest.mark.parametrize(
    ("key", "value"),
    [("p_easy", 0), ("p_hard", 1.0), ("target_zero_variance", 2), ("seed", -1), ("s", 0.5), ("n", 1)],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        Greso(**{"train_batch_size": 4, "n": 4, key: value})
