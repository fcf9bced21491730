"""The prior has the largest likelihood; a prompt's rate is the rate of its nearest group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta as beta_distribution
from scipy.stats import betabinom
from support.rollout_logs import log_of

from verl_ext.lab.waste.rates import LIMITS, RecordedRates, band, fit_prior


@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 0.5), (2.0, 3.0)])
def test_the_prior_is_found_again(alpha, beta):
    rng = np.random.default_rng(0)
    n = rng.choice([4, 8, 16], 40_000)
    assert fit_prior(rng.binomial(n, rng.beta(alpha, beta, n.size)), n) == pytest.approx((alpha, beta), rel=0.05)


def test_no_prior_is_more_likely():
    rng = np.random.default_rng(1)
    n = rng.integers(2, 12, 300)
    k = rng.binomial(n, rng.beta(0.4, 0.8, n.size))
    found = fit_prior(k, n)
    best = betabinom.logpmf(k, n, *found).sum()
    for factor in (0.9, 1.1):
        assert betabinom.logpmf(k, n, found[0] * factor, found[1]).sum() < best
        assert betabinom.logpmf(k, n, found[0], found[1] * factor).sum() < best


@pytest.mark.parametrize("correct", [0, 4, 8])
def test_counts_without_a_most_likely_prior(correct):
    alpha, beta = fit_prior(np.full(50, correct), np.full(50, 8))
    slack = 1 + 1e-9
    assert all(LIMITS[0] / slack <= each <= LIMITS[1] * slack for each in (alpha, beta))
    assert (alpha + correct) / (alpha + beta + 8) == pytest.approx(correct / 8, abs=0.01)


def test_bands():
    assert band(np.array([0.0, 0.19, 0.2, 0.5, 0.79, 0.8, 1.0])).tolist() == [0, 0, 1, 2, 3, 4, 4]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=20), st.integers(0, 9))
def test_nearest(visits, batch):
    log = log_of([(step, prompt, 1, 2) for step, prompt in sorted(visits)])
    recorded = RecordedRates(log, (1.0, 1.0))
    for prompt in set(log.prompt.tolist()):
        rows = [row for row in range(len(log.prompt)) if log.prompt[row] == prompt]
        distance = min(abs(int(log.batch[row]) - batch) for row in rows)
        (found,) = recorded.nearest(np.array([prompt]), batch).tolist()
        assert found in rows and abs(int(log.batch[found]) - batch) == distance
        assert log.batch[found] == min(log.batch[row] for row in rows if abs(int(log.batch[row]) - batch) == distance)


def test_posteriors():
    recorded = RecordedRates(log_of([(1, 0, 2, 8), (2, 0, 8, 8)]), (0.5, 1.5))
    assert recorded.mean == pytest.approx([0.25, 0.85]) and recorded.band.tolist() == [1, 4]
    draws = np.array([recorded.draw(np.random.default_rng(seed)) for seed in range(4000)])
    assert draws.mean(axis=0) == pytest.approx(recorded.mean, abs=0.01)
    assert draws.std(axis=0) == pytest.approx(
        [beta_distribution(*each).std() for each in ((2.5, 7.5), (8.5, 1.5))], rel=0.05
    )


def test_a_prompt_without_news_stays_where_it_is():
    """Equal counts at every visit: one rate per prompt, and another prompt has another."""
    rates = RecordedRates(log_of([(1, 0, 2, 8), (1, 1, 2, 8), (2, 0, 2, 8)]), (1.0, 1.0)).draw(np.random.default_rng(0))
    assert rates[0] == rates[2] != rates[1]
