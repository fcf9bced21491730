from __future__ import annotations

import json

import numpy as np
import pytest

from verl_ext.allocation import hit_utility
from verl_ext.estimation.probe import LinearProbe


@pytest.fixture
def task():
    """Features that separate easy from hard prompts, and outcomes of eight rollouts each."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 8))
    rates = 1 / (1 + np.exp(-2 * features[:, 0]))
    return features, rates, rng.binomial(8, rates) / 8


def error(probe, rates):
    return np.abs(probe.predict(np.arange(len(rates))) - rates).mean()


def test_starts_as_the_uniform_prior(task):
    for dual in (False, True):
        rate, strength = LinearProbe(task[0], dual=dual).predict_prior([0, 1])
        alpha, beta = hit_utility.prior_from_prediction(rate, strength)
        assert alpha == pytest.approx([1, 1], rel=1e-6) and beta == pytest.approx([1, 1], rel=1e-6)


@pytest.mark.parametrize("dual", [False, True])
def test_fit_learns_the_rates_and_then_stays(task, dual):
    features, rates, outcomes = task
    probe = LinearProbe(features, online=False, dual=dual, learning_rate=1e-2)
    before = error(probe, rates)
    probe.fit(np.arange(200), outcomes[:200], np.full(200, 8))
    after = error(probe, rates)
    assert after < before / 2
    kept = probe.predict(np.arange(400))
    probe.observe(np.arange(50), np.zeros(50), np.full(50, 8))
    assert (probe.predict(np.arange(400)) == kept).all()


def test_online_follows_what_is_observed(task):
    features, rates, outcomes = task
    probe = LinearProbe(features, average=0.9, learning_rate=1e-2)
    before = error(probe, rates)
    for cycle in range(40):
        batch = np.arange(cycle * 50, cycle * 50 + 50) % 400
        probe.observe(batch, outcomes[batch], np.full(50, 8))
    assert error(probe, rates) < 0.6 * before


def test_dual_learns_how_sure_to_be(task):
    """Similar prompts with outcomes 0 or 1 get a weak prior, with outcomes near a half a strong prior."""
    features = np.eye(2)[np.repeat([0, 1], 100)]
    outcomes = np.concatenate([np.tile([0.0, 1.0], 50), np.full(100, 0.5)])
    probe = LinearProbe(features, online=False, dual=True, learning_rate=0.05)
    probe.fit(np.arange(200), outcomes, np.full(200, 8))
    _, strength = probe.predict_prior([0, 100])
    assert 0.25 <= strength[0] < 1.5 and 8 < strength[1] <= 16


def test_beta_binomial_loss_is_the_likelihood():
    """One gradient step on scipy's Beta-binomial log-probability, without its binomial coefficient."""
    import torch
    from scipy.special import betaln

    from verl_ext.estimation.probe import _log_beta

    a, b = torch.tensor([0.7, 3.0]), torch.tensor([2.2, 0.4])
    assert _log_beta(a, b).numpy() == pytest.approx(betaln(a.numpy(), b.numpy()), rel=1e-5)


def test_state_survives_json(task):
    features, _, outcomes = task
    one, other = LinearProbe(features, dual=True), LinearProbe(features, dual=True)
    one.observe(np.arange(50), outcomes[:50], np.full(50, 8))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for probe in (one, other):
        probe.observe(np.arange(50, 90), outcomes[50:90], np.full(40, 8))
    assert (one.predict(np.arange(400)) == other.predict(np.arange(400))).all()
    with pytest.raises(ValueError, match="dual"):
        LinearProbe(features).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("options", "named"),
    [({"cycles": 0}, "cycles"), ({"steps": 0}, "steps"), ({"decay": 1.1}, "decay"), ({"average": 1.0}, "average")],
)
def test_impossible_configurations_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        LinearProbe(np.eye(3), **options)
