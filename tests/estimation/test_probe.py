from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch

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


def tensors_of(probe):
    return torch.load(io.BytesIO(base64.b64decode(probe.state_dict()["tensors"])), weights_only=True)


@pytest.mark.parametrize("through_a_file", [False, True])
def test_the_moving_average_starts_from_the_fitted_weights(task, through_a_file):
    """After a cycle: 0.99 of the fitted weights, and 0.01 of the weights after five Adam steps (HORA Appendix F)."""
    features, _, outcomes = task
    probe = LinearProbe(features, learning_rate=1e-2)
    probe.fit(np.arange(200), outcomes[:200], np.full(200, 8), steps=50)
    fitted = {name: value.clone() for name, value in tensors_of(probe)["model"].items()}
    if through_a_file:
        state = json.loads(json.dumps(probe.state_dict()))
        probe = LinearProbe(features, learning_rate=1e-2)
        probe.load_state_dict(state)
    probe.observe(np.arange(50), 1 - outcomes[:50], np.full(50, 8))
    after = tensors_of(probe)
    for name, value in fitted.items():
        live = after["model"][name]
        expected = 0.99 * value + 0.01 * live
        torch.testing.assert_close(after["averaged"][f"module.{name}"], expected)
        assert (live - value).abs().max() > 5e-3 and (expected - live).abs().max() > 1e-3


def test_without_a_fit_the_moving_average_starts_after_the_first_cycle(task):
    probe = LinearProbe(task[0])
    probe.observe(np.arange(50), task[2][:50], np.full(50, 8))
    tensors = tensors_of(probe)
    for name, value in tensors["model"].items():
        torch.testing.assert_close(tensors["averaged"][f"module.{name}"], value)


def test_a_run_keeps_its_learning_rate_and_starts_adam_afresh(task):
    """Five steps of a fresh Adam at 1e-3 move a weight by at most about 5e-3, whatever the fit was."""
    features, _, outcomes = task
    fitted = LinearProbe(features, online=False, learning_rate=0.1, weight_decay=0.5)
    fitted.fit(np.arange(200), outcomes[:200], np.full(200, 8))
    assert not tensors_of(fitted)["optimizer"]["state"]
    probe = LinearProbe(features, weight_decay=0.25)
    probe.load_state_dict(fitted.state_dict())
    before = tensors_of(probe)["model"]
    probe.observe(np.arange(50), 1 - outcomes[:50], np.full(50, 8))
    after = tensors_of(probe)
    (group,) = after["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.25)
    moved = max(float((after["model"][name] - before[name]).abs().max()) for name in before)
    assert 1e-3 < moved < 6e-3


@pytest.mark.parametrize("tensors", ["", "bm90IGEgcHJvYmU=", 3, None])
def test_a_state_without_a_probes_tensors_is_refused(task, tensors):
    probe = LinearProbe(task[0])
    with pytest.raises(ValueError, match="the state's tensors are not those of a probe"):
        probe.load_state_dict({**probe.state_dict(), "tensors": tensors})


@pytest.mark.parametrize(
    ("options", "named"),
    [({"cycles": 0}, "cycles"), ({"steps": 0}, "steps"), ({"decay": 1.1}, "decay"), ({"average": 1.0}, "average")],
)
def test_impossible_configurations_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        LinearProbe(np.eye(3), **options)
