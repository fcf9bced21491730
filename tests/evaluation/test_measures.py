from __future__ import annotations

import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.evaluation import majority_at_k, measures, pass_at_k


def exact_majority(answers, correct, k) -> Fraction:
    """Every subset of k samples, ties split evenly, an answer as correct as its samples on average."""
    given_by = {answer: [c for a, c in zip(answers, correct, strict=True) if a == answer] for answer in set(answers)}
    total, subsets = Fraction(0), list(combinations(answers, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer is not None)
        winners = [answer for answer in votes if votes[answer] == max(votes.values())]
        for answer in winners:
            total += Fraction(sum(given_by[answer]), len(given_by[answer]) * len(winners))
    return total / len(subsets)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
@settings(max_examples=60)
def test_pass_at_k_equals_trying_all_subsets(correct, data):
    n, k = len(correct), data.draw(st.integers(1, len(correct)))
    subsets = list(combinations(correct, k))
    exact = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    assert float(pass_at_k(n, sum(correct), k)) == pytest.approx(float(exact), abs=1e-14)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", 4, None]), st.booleans()), min_size=1, max_size=8), st.data())
@settings(max_examples=60)
def test_majority_at_k_equals_trying_all_subsets(samples, data):
    answers, correct = zip(*samples, strict=True)
    k = data.draw(st.integers(1, len(answers)))
    correct = [bool(c and a is not None) for a, c in samples]
    expected = float(exact_majority(answers, correct, k))
    assert majority_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_majority_drawn_at_random_lies_within_its_standard_error(k, monkeypatch):
    answers, correct = list("aaaabbbccd") + [None, None], [1] * 4 + [0] * 8
    exact = majority_at_k(answers, correct, k)
    monkeypatch.setattr(measures, "EXACT_OPERATIONS", 0)
    drawn = majority_at_k(answers, correct, k)
    assert 0 < abs(drawn - exact) < 4 * 0.5 / np.sqrt(measures.DRAWS)
    assert drawn == majority_at_k(answers, correct, k)


def test_problems_with_the_same_votes_are_computed_once():
    """The answers differ, and so does their order."""
    measures._exact.cache_clear()
    found = {
        majority_at_k([f"{problem}a", f"{problem}b", f"{problem}b", None, None], [0, 1, 1, 0, 0], 3)
        for problem in range(5)
    }
    found.add(majority_at_k(["x", "x", "y", None, None], [1, 1, 0, 0, 0], 3))
    assert len(found) == 1 and measures._exact.cache_info().misses == 1
    assert majority_at_k(["x", "x", "y", None, None], [0, 0, 1, 0, 0], 3) not in found


def test_draws_have_the_error_that_the_docstring_states():
    assert 0.5 / np.sqrt(measures.DRAWS) <= 0.016


def test_majority_of_many_samples():
    """A right answer of 45 % against a tail: rarely right alone, always in the majority of 1024."""
    rng = np.random.default_rng(0)
    answers = [0] * 460 + rng.integers(1, 40, 564).tolist()
    correct = [answer == 0 for answer in answers]
    values = [majority_at_k(answers, correct, k) for k in (1, 4, 16, 64, 1024)]
    assert values[0] == pytest.approx(460 / 1024)
    assert np.all(np.diff(values) > 0) and values[-1] == 1


def test_a_draw_without_any_answer_is_not_correct(monkeypatch):
    monkeypatch.setattr(measures, "EXACT_OPERATIONS", 0)
    assert majority_at_k(["7", *[None] * 7], [1] + [0] * 7, 1) == pytest.approx(1 / 8, abs=0.04)


def test_majority_without_any_answer_is_not_correct():
    assert majority_at_k([None, None], [0, 0], 1) == 0
    assert majority_at_k([None, "7"], [0, 1], 1) == pytest.approx(0.5)


@pytest.mark.parametrize("n", [1024, 4096])
def test_pass_at_k_of_many_samples_is_finite_and_grows(n):
    few = np.unique(np.r_[0, 2 ** np.arange(int(np.log2(n)) + 1), n - 1])
    values = pass_at_k(n, few[:, None], np.maximum(few, 1)[None, :])
    assert np.isfinite(values).all() and values.min() == 0 and values.max() == 1
    assert (np.diff(values, axis=0) >= -1e-12).all() and (np.diff(values, axis=1) >= -1e-12).all()
    assert (values[few[:, None] + few[None, :] > n] == 1).all()


def test_pass_at_k_against_exact_fractions_at_1024():
    from math import comb

    for c, k in [(1, 1), (1, 1023), (3, 64), (500, 2), (512, 512), (10, 1000)]:
        exact = 1 - Fraction(comb(1024 - c, k), comb(1024, k))
        assert float(pass_at_k(1024, c, k)) == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_broadcasts():
    values = pass_at_k([[4], [8]], [0, 2, 4], 1)
    assert values.dtype == np.float64
    assert values.tolist() == [[0, pytest.approx(0.5), 1], [0, pytest.approx(0.25), pytest.approx(0.5)]]
    assert pass_at_k(4, 2, 1).shape == ()


@pytest.mark.parametrize(
    ("n", "c", "k", "named"),
    [
        (4, 2, 0, "k"),
        (4, 2, 5, "k=5 must be at most n=4"),
        (4, 5, 2, "c=5 must be at most n=4"),
        (4, -1, 2, "c"),
        (0, 0, 1, "n"),
        (4.5, 2, 1, "n"),
        (4, 1.5, 1, "c"),
        (4, 1, 1.5, "k"),
        (np.inf, 1, 1, "n"),
        (4, np.nan, 1, "c"),
        (4, 1, "many", "k"),
        ([4, 4], [1, 1, 1], 1, "n, c and k have the shapes"),
    ],
)
def test_pass_at_k_refuses(n, c, k, named):
    with pytest.raises(ValueError, match=rf"^{named}(\b|=)"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"answers": ["a"]}, "answers"),
        ({"answers": "ab"}, "answers"),
        ({"correct": [0, 2]}, "correct"),
        ({"k": 0}, "k"),
        ({"k": 3}, "k"),
        ({"k": 1.5}, "k"),
    ],
)
def test_majority_refuses(arguments, named):
    with pytest.raises(ValueError, match=named):
        majority_at_k(**{"answers": ["a", "b"], "correct": [0, 1], "k": 1, **arguments})


def test_importing_the_estimators_loads_numpy_only():
    code = "import sys, verl_ext.evaluation; print(' '.join(sorted(name for name in sys.modules if '.' not in name)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"verl", "ray", "torch", "vllm", "scipy", "pandas", "pyarrow", "matplotlib", "httpx", "typer", "rich"}
    assert not set(result.stdout.split()) & heavy
