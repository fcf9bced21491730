from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from verl_ext.lab.report.runs import Run
from verl_ext.lab.simulate import LearningModel, Method, World, simulate
from verl_ext.lab.simulate.fitting import LOGGED, fit_shared
from verl_ext.lab.simulate.outcomes import as_run
from verl_ext.lab.simulate.population import draw_logits, sigmoid
from verl_ext.lab.simulate.run import DATA_SEED


def test_the_component_that_a_run_was_simulated_with_is_found_again():
    learning = LearningModel(shared=0.07, noise=5.0, own=0.3)
    world = World("1:2:3", 400, steps=40, learning=learning)
    run = as_run("grpo", 0, simulate(Method.parse("grpo n=8", 16), world, 0))
    logits = draw_logits("1:2:3", 400, np.random.default_rng(DATA_SEED))
    fit = fit_shared(run, logits, LearningModel(shared=9.0, noise=5.0, own=0.3))
    assert fit.learning.shared == pytest.approx(0.07, rel=1e-3)
    assert replace(fit.learning, shared=0.07) == learning
    assert fit.offset == pytest.approx(0, abs=1e-3) and fit.error < 1e-6 and fit.validations == 9


def test_a_harder_validation_set_is_an_offset():
    logits = draw_logits("1:2:3", 500, np.random.default_rng(0))
    gain = LearningModel(shared=0.05, noise=0).shared_gain(0.4, 0.01)
    logged = dict(zip(LOGGED, (0.4, 1.0, 4.0, 8.0), strict=True))
    accuracies = [sigmoid(logits - 0.5 + gain * step).mean() for step in range(20)]
    records = [
        {"val-core/x/acc/mean@4": accuracy} | (logged if step else {}) for step, accuracy in enumerate(accuracies)
    ]
    fit = fit_shared(Run("x", tuple(range(20)), tuple(records)), logits, LearningModel(noise=0))
    assert (fit.learning.shared, fit.offset) == pytest.approx((0.05, -0.5), rel=1e-3)


def test_a_log_without_what_is_needed_is_refused():
    run = Run("verl", (0, 1), ({"val-core/x/acc/mean@1": 0.1}, {}))
    with pytest.raises(ValueError, match="fit=verl: .*1 validations and lacks groups/reward_std_mean"):
        fit_shared(run, np.zeros(4), LearningModel())
