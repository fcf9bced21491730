"""Estimators on prompt ids without features: Beta posterior, history, moving average."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.estimation import BetaPosterior, History, MovingAverage, RidgeRegression

FEATURES = np.random.default_rng(0).normal(size=(3, 4))
IDS = ["a", "b", "c"]


def test_beta_posterior_is_the_conjugate_update():
    posterior = BetaPosterior(prior=(2.0, 3.0))
    posterior.observe(["a", "b"], [0.25, 1.0], [8, 4])
    posterior.observe(["a"], [1.0], [2])
    alpha, beta = posterior.parameters(["a", "b", "new"])
    assert alpha.tolist() == [2 + 2 + 2, 2 + 4, 2] and beta.tolist() == [3 + 6, 3, 3]
    assert posterior.predict(["a", "new"]) == pytest.approx([6 / 15, 0.4])
    assert posterior.predict([]).shape == (0,)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60), st.integers(1, 20))
def test_history_is_the_mean_of_the_last_outcomes(outcomes, size):
    history = History(size)
    for outcome in outcomes:
        history.observe(["p"], [outcome])
    assert history.predict(["p"])[0] == pytest.approx(np.mean(outcomes[-size:]))


def test_history_keeps_part_of_a_group_at_its_rate():
    history = History(16)
    history.observe(["p"], [1.0], [12])
    history.observe(["p"], [0.25], [8])
    assert history.predict(["p"])[0] == pytest.approx((8 * 0.25 + 8 * 1.0) / 16)
    history.observe(["p"], [0.5], [32])
    assert history.predict(["p"])[0] == 0.5
    assert history.known(["p", "q"]).tolist() == [True, False]
    assert history.predict(["q"])[0] == 0.5


def test_moving_average_is_one_number_for_all_prompts():
    average = MovingAverage(window=3, initial=0.3)
    assert average.predict(["a", "b"]).tolist() == [0.3, 0.3]
    average.observe(["a", "b"], [0.0, 1.0], [8, 8])
    average.observe(["a", "c"], [0.5, 0.75])
    assert average.predict(["z"])[0] == pytest.approx((1.0 + 0.5 + 0.75) / 3)


@pytest.mark.parametrize(
    ("make", "prompts"),
    [(BetaPosterior, IDS), (History, IDS), (MovingAverage, IDS), (lambda: RidgeRegression(FEATURES), [0, 1, 2])],
)
def test_state_survives_json(make, prompts):
    one, other = make(), make()
    one.observe(prompts[:2], [0.25, 1.0], [4, 8])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for estimator in (one, other):
        estimator.observe(prompts[1:], [0.5, 0.0], [2, 2])
    assert one.predict(prompts).tolist() == other.predict(prompts).tolist()
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("saved", "loaded", "named"),
    [
        (BetaPosterior(), BetaPosterior((2.0, 1.0)), "prior"),
        (History(16), History(8), "size"),
        (MovingAverage(16), MovingAverage(8), "window"),
    ],
)
def test_a_state_of_another_configuration_is_refused(saved, loaded, named):
    with pytest.raises(ValueError, match=named):
        loaded.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("estimator", [BetaPosterior(), History(), MovingAverage()])
@pytest.mark.parametrize(
    ("rates", "trials", "named"),
    [([1.5], None, "success_rates"), ([np.nan], None, "success_rates"), ([0.5], [0], "trials"), ([0, 1], None, "succ")],
)
def test_impossible_observations_are_refused(estimator, rates, trials, named):
    with pytest.raises(ValueError, match=named):
        estimator.observe(["p"], rates, trials)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: BetaPosterior((0, 1)), "prior"),
        (lambda: BetaPosterior((1, 1, 1)), "prior"),
        (lambda: History(0), "size"),
        (lambda: History(initial=2), "initial"),
        (lambda: MovingAverage(1.5), "window"),
        (lambda: RidgeRegression([[np.nan]]), "features"),
        (lambda: RidgeRegression([1.0, 2.0]), "features"),
        (lambda: RidgeRegression(FEATURES, penalty=0), "penalty"),
    ],
)
def test_impossible_configurations_are_refused(make, named):
    with pytest.raises(ValueError, match=named):
        make()
