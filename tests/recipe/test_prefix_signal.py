"""Comparison with an enumeration of all reward vectors, without closed forms."""

from __future__ import annotations

import itertools
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import prefix_signal as signal

rates = st.floats(0, 1)
group_sizes = st.integers(2, 8)


def every_group(n: int, p: float) -> list[tuple[tuple[int, ...], float]]:
    """Reward vectors and their probabilities."""
    vectors = itertools.product((0, 1), repeat=n)
    return [(rewards, p ** sum(rewards) * (1 - p) ** (n - sum(rewards))) for rewards in vectors]


def unequal_pairs(rewards) -> int:
    return sum(a != b for a, b in itertools.combinations(rewards, 2))


def rloo_advantages(rewards) -> list[float]:
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]


@given(rates, group_sizes)
@settings(max_examples=100)
def test_survival_is_the_probability_of_groups_with_unequal_rewards(p, n):
    expected = sum(chance for rewards, chance in every_group(n, p) if len(set(rewards)) > 1)
    assert signal.survival(p, n) == pytest.approx(expected, abs=1e-12)


@given(rates, group_sizes)
@settings(max_examples=100)
def test_expected_pairs_average_over_groups(p, n):
    expected = sum(chance * unequal_pairs(rewards) for rewards, chance in every_group(n, p))
    assert signal.expected_pairs(p, n) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=8))
def test_energy_and_pairs_are_those_of_the_rewards(rewards):
    k, n = sum(rewards), len(rewards)
    assert signal.contrastive_pairs(k, n) == unequal_pairs(rewards)
    assert signal.advantage_energy(k, n) == pytest.approx(np.mean(np.square(rloo_advantages(rewards))))
    assert sum(rloo_advantages(rewards)) == pytest.approx(0)


@given(rates)
def test_entropy_is_the_mean_surprise(p):
    expected = sum(-chance * np.log2(chance) for chance in (p, 1 - p) if chance > 0)
    assert signal.reward_entropy(p) == pytest.approx(expected)


def test_entropy_is_nothing_at_both_ends_and_one_bit_in_the_middle():
    assert signal.reward_entropy([0, 0.5, 1, 5e-324]).tolist() == pytest.approx([0, 1, 0, 0])
    assert not np.signbit(signal.reward_entropy([0, 1])).any()


@pytest.mark.parametrize("n", range(2, 17))
@pytest.mark.parametrize("criterion", [lambda p, n: signal.reward_entropy(p), signal.survival, signal.expected_pairs])
def test_a_pass_rate_of_one_half_is_best(criterion, n):
    grid = np.linspace(0, 1, 101)
    values = criterion(grid, n)
    assert values == pytest.approx(values[::-1])
    assert np.argmax(values) == 50 and (np.diff(values[:51]) > 0).all()


@pytest.mark.parametrize("n", range(2, 17))
def test_half_of_the_group_is_the_best_count(n):
    k = np.arange(n + 1)
    for values in (signal.advantage_energy(k, n), signal.contrastive_pairs(k, n)):
        assert np.flatnonzero(values == values.max()).tolist() == sorted({n // 2, (n + 1) // 2})


@given(st.integers(2, 8), rates)
@settings(max_examples=50)
def test_expected_pairs_are_pairs_weighed_by_their_counts(n, p):
    k = np.arange(n + 1)
    binomial = np.array([comb(n, i) * p**i * (1 - p) ** (n - i) for i in k])
    assert binomial @ signal.contrastive_pairs(k, n) == pytest.approx(signal.expected_pairs(p, n), abs=1e-12)


def test_table_12():
    table = signal.pair_table(8)
    assert [row.successes for row in table] == list(range(9))
    assert [row.pass_rate for row in table] == [k / 8 for k in range(9)]
    assert [row.pairs for row in table] == [0, 7, 12, 15, 16, 15, 12, 7, 0]
    assert [row.relative for row in table] == [0, 0.4375, 0.75, 0.9375, 1, 0.9375, 0.75, 0.4375, 0]
    assert [row.relative for row in signal.pair_table(3)] == [0, 1, 1, 0]


def test_arguments_broadcast():
    assert signal.survival([[0.1], [0.5]], [2, 4, 8]).shape == (2, 3)
    assert signal.survival([[0.1], [0.5]], [2, 4, 8])[1, 2] == signal.survival(0.5, 8) == 1 - 2 / 2**8
    assert signal.advantage_energy([[1], [4]], [8, 16])[1, 0] == signal.advantage_energy(4, 8) == 16 / 49
    assert signal.expected_pairs([0.25, 0.5], 8).tolist() == [10.5, 14]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: signal.reward_entropy(1.1), r"p\[0\]=1.1"),
        (lambda: signal.reward_entropy([0.5, -0.1]), r"p\[1\]=-0.1"),
        (lambda: signal.reward_entropy(float("nan")), r"p\[0\]=nan"),
        (lambda: signal.survival(2, 8), r"p\[0\]"),
        (lambda: signal.survival(0.5, 1), r"n\[0\]=1"),
        (lambda: signal.survival("half", 8), "p="),
        (lambda: signal.expected_pairs(0.5, 2.5), r"n\[0\]=2.5"),
        (lambda: signal.expected_pairs(-1, 8), r"p\[0\]"),
        (lambda: signal.advantage_energy(9, 8), "k=9 must not be above n=8"),
        (lambda: signal.advantage_energy(0, 1), r"n\[0\]=1"),
        (lambda: signal.contrastive_pairs(-1, 8), r"k\[0\]=-1"),
        (lambda: signal.contrastive_pairs([1.5], 8), r"k\[0\]=1.5"),
        (lambda: signal.contrastive_pairs([1, 5], [4, 4]), "k="),
        (lambda: signal.pair_table(1), "n=1"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
