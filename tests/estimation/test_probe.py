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


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("options", [{}, {"cycles": 2, "steps": 3, "decay": 0.5, "average": 0.8}])
def test_each_cycle_takes_adam_steps_on_the_likelihood_of_the_latest_cycles(task, dual, options):
    """The formulas of the class, written out: twelve cycles, so that the oldest of ten have left the window."""
    settings = {"cycles": 10, "steps": 5, "decay": 0.97, "average": 0.99} | options
    features = torch.tensor(task[0], dtype=torch.float32)
    probe = LinearProbe(task[0], dual=dual, **options)
    scale, shift = torch.ones(8), torch.zeros(8)
    head, bias = torch.zeros(1 + dual, 8), torch.tensor([0.0, np.log(np.expm1(2.0))][: 1 + dual])
    weights = [each.requires_grad_() for each in (scale, shift, head, bias)]
    adam, averaged, seen = torch.optim.Adam(weights, lr=1e-3, weight_decay=1e-2), None, []

    def outputs(x):
        normed = (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, unbiased=False, keepdim=True) + 1e-5)
        out = (normed * weights[0] + weights[1]) @ weights[2].T + weights[3]
        strength = torch.log1p(torch.exp(out[:, 1])) if dual else torch.full((len(x),), 2.0)
        return torch.sigmoid(out[:, 0]), strength

    def loss(x, hits, trials):
        p, s = outputs(x)
        if not dual:
            return -hits * torch.log(p) - (trials - hits) * torch.log(1 - p)
        a, b = s * p, s * (1 - p)
        grown, plain = (
            (torch.lgamma(u) + torch.lgamma(v) - torch.lgamma(u + v))
            for u, v in ((a + hits, b + trials - hits), (a, b))
        )
        return plain - grown

    rng = np.random.default_rng(1)
    for _ in range(12):
        rows = rng.choice(400, 20, replace=False)
        trials = rng.integers(1, 9, 20)
        hits = rng.binomial(trials, task[1][rows])
        probe.observe(rows, hits / trials, trials)
        seen = [
            *seen,
            (features[rows], torch.tensor(hits / trials).float() * torch.tensor(trials), torch.tensor(trials)),
        ]
        for _ in range(settings["steps"]):
            window = list(enumerate(reversed(seen[-settings["cycles"] :])))
            total = sum(settings["decay"] ** age * loss(*cycle).sum() for age, cycle in window)
            (total / sum(20 * settings["decay"] ** age for age, _ in window)).backward()
            adam.step()
            adam.zero_grad()
        live = [each.detach().clone() for each in weights]
        share = settings["average"]
        averaged = (
            live
            if averaged is None
            else [share * old + (1 - share) * new for old, new in zip(averaged, live, strict=True)]
        )
    torch.testing.assert_close(tensors_of(probe)["model"]["1.weight"], head.detach(), atol=2e-6, rtol=1e-4)
    with torch.no_grad():
        for each, value in zip(weights, averaged, strict=True):
            each.copy_(value)
        rates, strengths = outputs(features)
    ours = probe.predict_prior(np.arange(400))
    assert ours[0] == pytest.approx(rates.numpy(), abs=2e-5) and ours[1] == pytest.approx(strengths.numpy(), abs=2e-4)
    assert np.abs(ours[0] - 0.5).max() > 0.003


@pytest.mark.parametrize(
    ("biases", "rate", "strength"),
    [([0.0, 50.0], 0.5, 16.0), ([0.0, -50.0], 0.5, 0.25), ([50.0, 4.0], 1 - 1e-6, 4.018), ([-50.0, 0.3], 1e-6, 0.854)],
)
def test_rate_and_strength_are_clamped(task, biases, rate, strength):
    probe = LinearProbe(task[0], dual=True)
    tensors = tensors_of(probe)
    tensors["averaged"]["module.1.bias"] = torch.tensor(biases)
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    probe.load_state_dict({**probe.state_dict(), "tensors": base64.b64encode(buffer.getvalue()).decode()})
    rates, strengths = probe.predict_prior([3])
    assert rates[0] == pytest.approx(rate, abs=1e-7) and strengths[0] == pytest.approx(strength, abs=1e-3)


def test_beta_binomial_loss_is_the_likelihood():
    """One gradient step on scipy's Beta-binomial log-probability, without its binomial coefficient."""
    import torch
    from scipy.special import betaln

    from verl_ext.estimation.probe import _log_beta

    a, b = torch.tensor([0.7, 3.0]), torch.tensor([2.2, 0.4])
    assert _log_beta(a, b).numpy() == pytest.approx(betaln(a.numpy(), b.numpy()), rel=1e-5)


def test_state_survives_json(task):
    features, _, outcomes = task
    one, other = LinearProbe(features, dual=True, cycles=2), LinearProbe(features, dual=True, cycles=2)
    for start in (0, 50):
        one.observe(np.arange(start, start + 50), outcomes[start : start + 50], np.full(50, 8))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for probe in (one, other):
        probe.observe(np.arange(50, 90), outcomes[50:90], np.full(40, 8))
    assert (one.predict(np.arange(400)) == other.predict(np.arange(400))).all()
    with pytest.raises(ValueError, match="dual"):
        LinearProbe(features).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="width=8, and this estimator has 5"):
        LinearProbe(features[:, :5], dual=True).load_state_dict(one.state_dict())


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


class Payload:
    """Pickled, this is a call of ``open`` that creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_state_that_is_code_is_refused_and_does_not_run(task, tmp_path):
    buffer, probe = io.BytesIO(), LinearProbe(task[0])
    torch.save({"model": Payload(tmp_path / "mark")}, buffer)
    with pytest.raises(ValueError, match="the state's tensors are not those of a probe"):
        probe.load_state_dict({**probe.state_dict(), "tensors": base64.b64encode(buffer.getvalue()).decode()})
    assert not (tmp_path / "mark").exists()


def test_a_state_of_a_probe_that_diverged_is_refused(task):
    probe = LinearProbe(1e30 * task[0])
    probe.fit(np.arange(50), task[2][:50], steps=1)
    with pytest.raises(ValueError, match="the state's weights are not finite"):
        LinearProbe(task[0]).load_state_dict(probe.state_dict())


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
