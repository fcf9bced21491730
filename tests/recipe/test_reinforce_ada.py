"""Reinforce-Ada: exit conditions, the trained rollouts, and its rounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, prompts, run_step

from recipe.reinforce_ada.policy import ReinforceAda
from verl_ext.policy import Group, Rollout

FAILED = Rollout(float("nan"), None, 0, 0, failed=True)
OUTCOMES = st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=24)


def group(outcomes):
    made = [FAILED if correct is None else Rollout(float(correct), correct, 5, 0) for correct in outcomes]
    return Group("g", prompts(1)[0], made)


@given(OUTCOMES, st.integers(2, 8))
def test_exit_conditions_count_correct_and_wrong_rollouts(outcomes, n):
    made = group(outcomes)
    right, wrong = outcomes.count(True), outcomes.count(False)
    assert ReinforceAda(train_batch_size=2, n=n).is_resolved(made) == (2 * right >= n - n % 2 and 2 * wrong >= n)
    assert ReinforceAda(train_batch_size=2, n=n, exit="positive").is_resolved(made) == (right > 0)


@given(OUTCOMES, st.integers(2, 8))
def test_half_of_the_trained_rollouts_are_correct_where_there_are_as_many(outcomes, n):
    usable = [index for index, correct in enumerate(outcomes) if correct is not None]
    if len(usable) <= n:
        return
    trained = ReinforceAda(train_batch_size=2, n=n).balanced(group(outcomes))
    assert len(set(trained)) == n and set(trained) <= set(usable)
    right, wrong = outcomes.count(True), outcomes.count(False)
    taken = sum(outcomes[index] is True for index in trained)
    feasible = range(max(0, n - wrong), min(n, right) + 1)
    assert taken == min(feasible, key=lambda count: abs(count - n // 2))
    for kind in (True, False):  # the first of each kind
        of_kind = [index for index, correct in enumerate(outcomes) if correct is kind]
        assert [index for index in trained if outcomes[index] is kind] == of_kind[: taken if kind else n - taken]


def test_grades_are_compared_with_the_threshold_even_if_all_are_0_or_1():
    policy = ReinforceAda(train_batch_size=2, n=4, exit="positive", positive_threshold=2.5)
    grades = [Rollout(grade, None, 5, 0) for grade in (0.0, 1.0, 1.0, 1.0)]
    assert not policy.is_resolved(Group("g", prompts(1)[0], grades))
    with_acc = [Rollout(1.0, True, 5, 0), FAILED, *grades]
    assert policy._correct(Group("g", prompts(1)[0], with_acc)) == [True, False, False, False, False]


def test_without_verdicts_rewards_above_the_threshold_are_correct():
    made = Group("g", prompts(1)[0], [Rollout(reward, None, 5, 0) for reward in (0.2, 0.75, 0.7, 0.9)])
    assert ReinforceAda(train_batch_size=2, n=4)._correct(made) == [False, True, False, True]


@given(st.sampled_from(["balance", "positive"]), st.integers(1, 5), st.integers(2, 6), st.integers(0, 99))
@settings(max_examples=30)
def test_each_prompt_is_sampled_until_its_exit_and_no_longer(exit, rounds, size, seed):
    policy = ReinforceAda(train_batch_size=6, n=2, N=rounds, M=size, exit=exit)
    run = controller(policy, [0.0, 0.1, 0.5, 0.9, 1.0] * 8, seed=seed)
    for step in range(1, 4):
        batch = run_step(run, step)
        assert len(batch) == 6
        for each in batch:
            generated = len(each.rollouts)
            assert generated % size == 0 and generated <= rounds * size
            if generated < rounds * size:
                assert policy.is_resolved(each)
            if generated > size:
                before = Group("before", each.prompt, each.rollouts[:-size])
                assert not policy.is_resolved(before)
        metrics = run.metrics()
        assert metrics["rollouts/trained"] == 12 and metrics["reinforce_ada/rounds_mean"] <= rounds
        assert metrics["reinforce_ada/resolved"] == sum(map(policy.is_resolved, batch)) / 6
        assert metrics["rollouts/sampled"] == sum(len(each.rollouts) for each in batch)


def test_rare_outcomes_are_found_and_groups_have_both():
    """At a success rate of 0.1, 8 rollouts have no success with probability 0.43, and 32 with 0.03."""
    run = controller(ReinforceAda(train_batch_size=50, n=4, exit="positive"), [0.1] * 200)
    outcomes = Counter()
    for step in range(1, 5):
        for each in run_step(run, step):
            outcomes[len({rollout.reward for rollout in each.trained_rollouts})] += 1
    assert outcomes[2] / 200 > 0.9
    assert run.metrics()["groups/effective_ratio"] > 0.85


def test_a_prompt_whose_rollouts_all_fail_is_given_up_after_its_rounds():
    policy = ReinforceAda(train_batch_size=12, n=2, N=3, M=2)
    run = controller(policy, [0.5] * 40, failure_rate=0.7, seed=4)
    for step in range(1, 9):
        assert all(each.usable for each in run_step(run, step))
        run.metrics()
    assert run.ledger.total["rollouts/failed"] > 0 and run.ledger.total["groups/discarded_empty"] > 0


def test_settings_for_divide_n():
    for n in range(2, 130):
        ReinforceAda(train_batch_size=8, **ReinforceAda.settings_for(8, n, 0))
    settings = [ReinforceAda.settings_for(8, n, 0) for n in (2, 5, 6, 8, 64)]
    assert [(each["n"], each["M"]) for each in settings] == [(2, 2), (2, 2), (3, 3), (4, 4), (4, 32)]


def test_before_the_first_step_no_prompt_has_met_its_exit_condition():
    metrics = ReinforceAda(train_batch_size=8).metrics()
    assert metrics == {"reinforce_ada/rounds_mean": 0.0, "reinforce_ada/resolved": 0.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [("n", 1), ("n", 9), ("N", 0), ("M", 1), ("exit", "never"), ("positive_threshold", None)],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        ReinforceAda(**{"train_batch_size": 4, key: value})
