"""Recall: prior, choice of remembered prompts, the two waves, and state."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.engine import controller, prompts, run_step

from recipe.recall.policy import Memory, Recall
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import Group, Rollout

RATES = [0.0] * 60 + [1.0] * 60 + [0.5] * 40


def group(prompt, successes, rollouts):
    made = [Rollout(float(index < successes), index < successes, 5, 0) for index in range(rollouts)]
    return Group(f"{prompt.id}-1", prompt, made)


def test_the_prior_is_uniform_until_there_are_pilots_to_fit():
    policy = Recall(train_batch_size=4)
    policy.pilots = [0.0, 1.0] * 7 + [0.5]
    assert policy.prior == (1.0, 1.0)
    policy.pilots += [0.5]
    assert policy.prior != (1.0, 1.0)


@given(st.floats(0.3, 4), st.floats(0.3, 4), st.integers(2, 6), st.integers(0, 2**31))
@settings(max_examples=25)
def test_the_prior_has_the_moments_of_the_pilots(a, b, n_pilot, seed):
    """Pilots are drawn from a beta-binomial distribution; SciPy's with the fitted prior has their mean and variance."""
    policy = Recall(train_batch_size=4, n=n_pilot + 1, n_pilot=n_pilot)
    counts = stats.betabinom(n_pilot, a, b).rvs(256, random_state=seed)
    policy.pilots = (counts / n_pilot).tolist()
    fitted = stats.betabinom(n_pilot, *policy.prior)
    assert fitted.mean() == pytest.approx(counts.mean())
    rate = counts.mean() / n_pilot
    correlation = (counts.var() / (n_pilot * rate * (1 - rate)) - 1) / (n_pilot - 1)
    if 0.02 < correlation < 0.95:
        assert fitted.var() == pytest.approx(counts.var(), rel=1e-6)
    else:
        assert 1 / (sum(policy.prior) + 1) == pytest.approx(0.02 if correlation < 0.5 else 0.95)


@pytest.mark.parametrize(
    ("pilots", "mean", "correlation"),
    [([0.0], 0.02, 0.02), ([1.0], 0.98, 0.02), ([0.5], 0.5, 0.02), ([0.0, 1.0], 0.5, 0.95)],
)
def test_the_fitted_prior_has_bounds(pilots, mean, correlation):
    policy = Recall(train_batch_size=4)
    policy.pilots = pilots * 20
    assert policy.prior == pytest.approx(np.array([mean, 1 - mean]) * (1 / correlation - 1))


def test_pilots_with_a_failed_rollout_are_no_part_of_the_fit():
    """The variance of rates of fewer rollouts is larger."""
    policy = Recall(train_batch_size=4)
    policy._step = 1
    (prompt,) = prompts(1)
    whole, half = group(prompt, 1, 2), group(prompt, 1, 1)
    half.rollouts.append(Rollout(float("nan"), None, 0, 0, failed=True))
    policy._judge(half)
    assert policy.pilots == []
    policy._judge(whole)
    assert policy.pilots == [0.5]


def test_the_prior_is_fitted_to_the_last_pilots():
    policy = Recall(train_batch_size=4)
    policy._step, policy.pilots = 1, [0.0] * 256
    policy._judge(group(prompts(1)[0], 1, 2))
    assert policy.pilots == [0.0] * 255 + [0.5]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 9)), max_size=12), st.integers(1, 6))
@settings(max_examples=60)
def test_the_recalled_prompts_are_worth_more_than_a_new_prompt_and_than_the_others(counts, size):
    """E[p (1 - p)] by SciPy's Beta distribution; counts are halved every ``half_life`` steps."""
    policy = Recall(train_batch_size=2 * size, half_life=3)
    policy._step = 10
    rows = prompts(len(counts))
    policy.memory = {
        row.id: Memory(row, *map(float, each[:2]), each[2]) for row, each in zip(rows, counts, strict=True)
    }

    def worth(successes, failures, step):
        weight = 0.5 ** ((10 - step) / 3)
        belief = stats.beta(1 + weight * successes, 1 + weight * failures)
        return belief.mean() - belief.moment(2)

    chosen = [row.row for row in policy._recalled()]
    values = [worth(*each) for each in counts]
    new = worth(0, 0, 10)
    assert len(chosen) == len(set(chosen)) == min(size, sum(value > new + 1e-12 for value in values))
    others = [value for row, value in enumerate(values) if row not in chosen]
    assert all(values[row] > new for row in chosen)
    if len(chosen) == size and others:
        assert min(values[row] for row in chosen) >= max(others) - 1e-12


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6))
def test_counts_are_discounted_by_visits_and_by_steps(visits):
    policy = Recall(train_batch_size=2, decay=0.5, half_life=4)
    (row,) = prompts(1)
    policy._step = 1
    wins = losses = 0.0
    for successes, wait in visits:
        policy._step += wait
        wins, losses = (0.5 * 0.5 ** (wait / 4) * count for count in (wins, losses))
        policy._count(group(row, successes, 4))
        wins, losses = wins + successes, losses + 4 - successes
    known = policy.memory[row.id]
    assert (known.successes, known.failures) == pytest.approx((wins, losses)) and known.step == policy._step


def test_remembered_prompts_get_n_rollouts_at_once_and_new_prompts_a_pilot_first():
    run = controller(Recall(train_batch_size=8, n=6, n_pilot=2), RATES)
    for step in range(1, 21):
        run.policy._step = step
        remembered = {row.id for row in run.policy._recalled()}
        run.engine.submitted.clear()
        batch = run_step(run, step)
        first, *later = run.engine.submitted
        assert {prompt for prompt, count in first if count == 6} == remembered
        assert {count for prompt, count in first if prompt not in remembered} == {2}
        assert all(count == 4 for wave in later for _, count in wave)
        assert 0 < len(batch) <= 8 and all(len(trained.rollouts) == 6 for trained in batch)
        assert all(0 < trained.success_rate < 1 for trained in batch) and not run.live
        metrics = run.metrics()
        assert metrics["recall/trained_recalled"] + metrics["recall/trained_new"] == len(batch)
        assert metrics["recall/recalled"] == len(remembered) <= 4
    assert len(remembered) == 4


def test_the_number_of_new_prompts_is_the_one_expected_to_spend_the_budget():
    policy = Recall(train_batch_size=8, n=6, n_pilot=2)
    policy.survival = 0.5
    run = controller(policy, RATES)
    run.begin_step(1)
    (wave,) = run.engine.submitted
    assert [count for _, count in wave] == [2] * 12  # 8 · 6 rollouts at 2 + 0.5 · 4 a prompt


def test_the_share_of_survivors_is_a_moving_average():
    run = controller(Recall(train_batch_size=8, n=6), [0.5] * 400)
    expected = 0.25
    for step in range(1, 11):
        run_step(run, step)
        metrics = run.metrics()
        expected += 0.3 * (metrics["recall/survived"] / metrics["recall/new"] - expected)
        assert run.policy.survival == metrics["recall/survival"] == pytest.approx(expected)


def test_surplus_survivors_are_discarded_and_remembered():
    policy = Recall(train_batch_size=4, n=6, explore=1.0)
    policy.survival = 0.0
    run = controller(policy, [0.5] * 40)
    batch = run_step(run, 1)
    metrics = run.metrics()
    assert len(batch) == 4 and metrics["recall/survived"] == 4 + metrics["groups/discarded_surplus"] > 4
    assert metrics["rollouts/sampled"] <= 2 * 4 * 6
    assert len(policy.memory) == metrics["recall/new"] == 12


def test_prompts_that_became_easy_are_recalled_no_more():
    """Memory looks back: a prompt that is solved now leaves the recalled prompts within a few visits."""
    run = controller(Recall(train_batch_size=4, n=4), RATES)
    for step in range(1, 31):
        run_step(run, step)
    run.engine.success_rates = {name: float(rate > 0) for name, rate in run.engine.success_rates.items()}
    policy = run.policy
    policy._step = 31
    for row in policy._recalled():
        for _ in range(3):
            policy._count(group(row, 4, 4))
        assert row not in policy._recalled()


@pytest.mark.parametrize("saved", [1, 3, 7])
def test_the_state_continues_the_run(saved):
    run = controller(Recall(train_batch_size=4, n=4), RATES)
    for step in range(1, saved + 1):
        run_step(run, step)
    policy = Recall(train_batch_size=4, n=4)
    policy.load_state_dict(json.loads(json.dumps(run.policy.state_dict(), allow_nan=False)))
    assert policy.memory == run.policy.memory and policy.prior == run.policy.prior
    assert policy.survival == run.policy.survival != 0.25
    policy._step = run.policy._step = saved + 1
    assert policy._recalled() == run.policy._recalled()


def test_pilots_of_another_number_of_rollouts_are_no_part_of_the_fit():
    saved = Recall(train_batch_size=4, n=8, n_pilot=2)
    saved.pilots = [0.0, 0.5, 1.0, 1.0] * 16
    state = json.loads(json.dumps(saved.state_dict()))
    other, old = Recall(train_batch_size=4, n=8, n_pilot=4), Recall(train_batch_size=4, n=8, n_pilot=4)
    other.load_state_dict(state)
    assert other.pilots == [] and other.prior == (1.0, 1.0)
    del state["n_pilot"]  # as in a checkpoint of an earlier version
    old.load_state_dict(state)
    assert old.pilots == saved.pilots


def test_settings_for_give_an_eighth_of_large_groups_to_the_pilot():
    assert [Recall.settings_for(8, n, 0) for n in (3, 8, 32)] == [
        {"n": 3, "n_pilot": 2},
        {"n": 8, "n_pilot": 2},
        {"n": 32, "n_pilot": 4},
    ]


def test_a_step_without_a_signal_has_max_rounds_rounds_and_then_says_so():
    run = controller(Recall(train_batch_size=4, n=4, max_rounds=3), [0.0] * 400)
    with pytest.raises(CannotFillBatch, match="in 3 rounds"):
        run_step(run, 1)
    assert len(run.engine.submitted) == 3


def test_rounds_are_counted():
    run = controller(Recall(train_batch_size=4, n=4), RATES)
    run_step(run, 1)
    assert run.metrics()["recall/rounds"] == 1
