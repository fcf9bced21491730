"""MoPPS: posterior, choice of prompts, and state."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import controller, prompts, run_step

from recipe.mopps.policy import Mopps
from verl_ext.policy import Group, Rollout


def group(successes, rollouts, prompt=None):
    made = [Rollout(float(index < successes), index < successes, 5, 0) for index in range(rollouts)]
    return Group("g", prompt or prompts(1)[0], made)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), max_size=8),
    st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(1)]),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_the_posterior_is_a_discounted_sum_of_successes_and_failures(outcomes, decay, alpha0, beta0):
    """In closed form: a0 + the sum of decay^age · k, since the discounted prior parts add up to a0."""
    policy = Mopps(train_batch_size=2, n=8, decay=float(decay), alpha0=alpha0, beta0=beta0)
    outcomes = [(min(k, n), n) for k, n in outcomes]
    for k, n in outcomes:
        policy._observe(group(k, n))
    weights = [decay**age for age in reversed(range(len(outcomes)))]
    alpha = alpha0 + sum(weight * k for weight, (k, _) in zip(weights, outcomes, strict=True))
    beta = beta0 + sum(weight * (n - k) for weight, (k, n) in zip(weights, outcomes, strict=True))
    assert policy.posterior.get("p0", policy.prior) == pytest.approx((float(alpha), float(beta)))


@given(st.integers(0, 2**31), st.integers(1, 30), st.sampled_from([(0.5, 0.5), (0.2, 0.2), (0.3, 0.7), (0.0, 1.0)]))
@settings(max_examples=40)
def test_the_chosen_prompts_have_the_samples_closest_to_the_band(seed, size, band):
    policy = Mopps(train_batch_size=size, n=2, s=4, band=band, seed=seed)
    rows, shapes = prompts(4 * size), np.random.default_rng(seed).uniform(0.5, 20, (4 * size, 2))
    policy.posterior = {row.id: tuple(shape) for row, shape in zip(rows, shapes.tolist(), strict=True)}
    sampled = np.random.default_rng(seed).beta(*shapes.T)
    policy._unfiltered = lambda count, but=(): rows[:count]
    chosen = policy._draw_chosen(size)
    assert chosen == sorted(chosen, key=lambda prompt: prompt.row) and len({prompt.id for prompt in chosen}) == size
    distance = [max(band[0] - rate, rate - band[1], 0) for rate in sampled]
    taken = {prompt.row for prompt in chosen}
    assert max(distance[row] for row in taken) <= min(distance[row] for row in range(4 * size) if row not in taken)


def test_as_many_candidates_as_prompts_need_no_choice():
    policy = Mopps(train_batch_size=4, n=2, s=1)
    policy._unfiltered = lambda count, but=(): prompts(count)
    before = policy.state_dict()["rng"]
    assert policy._draw_chosen(4) == prompts(4) and policy.state_dict()["rng"] == before


def test_within_the_band_the_choice_is_random():
    policy = Mopps(train_batch_size=10, n=2, s=10, band=(0, 1))
    policy._unfiltered = lambda count, but=(): prompts(count)
    times = np.zeros(100)
    for _ in range(400):
        times[[prompt.row for prompt in policy._draw_chosen(10)]] += 1
    assert times.sum() == 4000 and times.min() > 15 and times.max() < 75  # 40 each, deviation 6


def test_it_trains_on_prompts_near_a_half_and_loses_none():
    """The posteriors of a fixed model become sharp, and unchosen candidates return."""
    rates = [0.0] * 40 + [1.0] * 40 + [0.5] * 20
    run = controller(Mopps(train_batch_size=4, n=8, s=8, decay=1.0), rates)
    late = []
    for step in range(1, 101):
        batch = run_step(run, step)
        metrics = run.metrics()
        assert len(batch) == 4 and metrics["rollouts/sampled"] == 32 and not run.live
        late += [group.prompt.row >= 80 for group in batch if step > 60]
    assert np.mean(late) > 0.9
    assert metrics["data/drawn_total"] == 100 * 32 and metrics["mopps/prompts_known"] > 90
    assert metrics["mopps/mae"] < 0.3 and 0.3 < metrics["mopps/predicted"] < 0.7


def test_fewer_prompts_than_candidates_are_no_fault():
    run = controller(Mopps(train_batch_size=4, n=2, s=8), [0.5] * 6)
    assert len(run_step(run, 1)) == 4
    run = controller(Mopps(train_batch_size=4, n=2, s=8), [0.5] * 3)
    assert len(run_step(run, 1)) == 3


def test_failed_rollouts_are_no_trials():
    policy = Mopps(train_batch_size=2, n=3, decay=1.0)
    made = group(1, 2)
    made.rollouts.append(Rollout(float("nan"), None, 0, 0, failed=True))
    policy._observe(made)
    assert policy.posterior == {"p0": (2.0, 2.0)}


def test_the_state_continues_posteriors_and_random_numbers():
    run = controller(Mopps(train_batch_size=4, n=4), [0.0, 1.0, 0.5] * 8)
    for step in range(1, 6):
        run_step(run, step)
    other = Mopps(train_batch_size=4, n=4)
    other.load_state_dict(json.loads(json.dumps(run.policy.state_dict())))
    assert other.state_dict() == run.policy.state_dict() and other.rng.random() == run.policy.rng.random()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("s", 0.5),
        ("band", [0.7, 0.3]),
        ("band", [0.5]),
        ("decay", 1.5),
        ("alpha0", 0),
        ("beta0", -1),
        ("seed", -1),
        ("n", 1),
    ],
)
def test_bad_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        Mopps(**{"train_batch_size": 4, "n": 4, key: value})
