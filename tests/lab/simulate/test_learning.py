from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from verl_ext.lab.report.runs import Run
from verl_ext.lab.simulate import Method, World, simulate
from verl_ext.lab.simulate.learning import SIGNAL_METRICS, Ability, LearningModel, fit_shared
from verl_ext.lab.simulate.population import draw_logits, sigmoid
from verl_ext.lab.simulate.run import DATA_SEED
from verl_ext.policy import Group, Prompt, Rollout
from verl_ext.trajectory import Trajectory

PREFIX = Trajectory([1], [True])


def group(row: int, successes: int, trials: int, version: int = 0, prefix: Trajectory | None = None) -> Group:
    rewards = [1.0] * successes + [0.0] * (trials - successes)
    rollouts = [Rollout(reward, reward == 1, 10, version) for reward in rewards]
    return Group(f"g{row}", Prompt(f"p{row}", row), rollouts, prefix=prefix)


def test_a_step_by_hand():
    """Groups 1 of 4 and 4 of 4, equal weights: G = sqrt(3/16)/2, V = (1/2)^2 · 1/4."""
    model = LearningModel(shared=0.1, own=0.5, noise=2.0)
    update = model.update_of([group(0, 1, 4), group(1, 4, 4)], 1, "equal")
    signal, noise = np.sqrt(3 / 16) / 2, 1 / 16
    assert (update.signal, update.noise) == pytest.approx((signal, noise))
    assert update.shared == pytest.approx(0.1 * signal * signal**2 / (signal**2 + 2 * noise))
    assert update.own == pytest.approx([0.5 * np.sqrt(3 / 16), 0])


def test_an_update_of_fixed_length_is_not_shortened_by_groups_without_a_gradient():
    model = LearningModel(shared=0.1, noise=0, optimizer="adam")
    for groups in ([group(0, 1, 4)], [group(0, 1, 4), group(1, 4, 4)]):
        assert model.update_of(groups, 1, "equal").shared == pytest.approx(0.1)
    signal, noise = 0.5, 1 / 4
    noisy = LearningModel(shared=0.1, noise=3.0, optimizer="adam").update_of([group(0, 2, 4)], 1, "equal")
    assert noisy.shared == pytest.approx(0.1 * signal / np.sqrt(signal**2 + 3 * noise))


def test_some_trained_rollouts_by_hand():
    """1 of 4 correct, of which the correct and one wrong rollout are trained on: deviations from 1/4 or from 1/2."""
    one = group(0, 1, 4)
    one.trained = [0, 2]
    model = LearningModel()
    alone, whole = (model.update_of([one], 1, "equal", baseline) for baseline in ("trained", "all"))
    assert (alone.signal, alone.noise) == pytest.approx((0.5, 1 / 2))
    square, deviation = ((3 / 4) ** 2 + (1 / 4) ** 2) / 2, np.sqrt(3 / 16)
    assert (whole.signal, whole.noise) == pytest.approx((square / deviation, square / deviation**2 / 2))
    one.trained = [1, 2]
    alone, whole = (model.update_of([one], 1, "equal", baseline).signal for baseline in ("trained", "all"))
    assert alone == 0 and whole == pytest.approx((1 / 16) / deviation)


def test_the_weight_of_a_group_scales_its_part():
    model, halved = LearningModel(own=1.0, noise=0.0, shared=1.0), group(0, 1, 2)
    halved.weight = 0.5
    update = model.update_of([halved, group(1, 2, 4)], 1, "equal")
    assert update.signal == pytest.approx((0.5 + 1) / 2 * 0.5) and update.own == pytest.approx([0.25, 0.5])
    assert update.noise == pytest.approx((1 / 4) ** 2 / 2 + (1 / 2) ** 2 / 4)


def test_weights_in_proportion_to_rollouts():
    model = LearningModel(own=1.0, noise=0.0, shared=1.0)
    update = model.update_of([group(0, 1, 2), group(1, 3, 6)], 1, "rollouts")
    assert update.signal == pytest.approx(0.5)
    assert update.noise == pytest.approx((1 / 4) ** 2 / 2 + (3 / 4) ** 2 / 6)
    assert update.own == pytest.approx([2 * 0.25 * 0.5, 2 * 0.75 * 0.5])


def test_without_normalisation_the_signal_is_the_variance():
    update = LearningModel(advantage="rloo").update_of([group(0, 1, 4)], 1, "equal")
    assert (update.signal, update.noise) == pytest.approx((3 / 16, 3 / 16 / 4))


def test_stale_rollouts_and_re_rollouts_count_less():
    model = LearningModel(staleness=0.5, prefix_transfer=0.25)
    at = [group(0, 1, 2, version=2), group(0, 1, 2, version=0), group(0, 1, 2, version=2, prefix=PREFIX)]
    assert [model.update_of([one], 3, "equal").signal for one in at] == pytest.approx([0.5, 0.125, 0.125])


def test_the_mean_delay_of_a_group_counts():
    mixed = group(0, 1, 2, version=2)
    mixed.rollouts += group(0, 1, 2, version=0).rollouts
    assert LearningModel(staleness=0.5).update_of([mixed], 3, "equal").signal == pytest.approx(0.5 * 0.5)


def test_failed_rollouts_teach_nothing():
    one = group(0, 1, 2)
    one.rollouts.append(Rollout(float("nan"), None, 0, 0, failed=True))
    assert LearningModel().update_of([one], 1, "equal").signal == pytest.approx(0.5)


def test_a_batch_without_spread_moves_nothing():
    update = LearningModel().update_of([group(0, 0, 8), group(1, 8, 8)], 1, "equal")
    assert update.shared == update.signal == update.noise == 0 and not update.own.any()


def test_more_rollouts_are_worth_more_and_less_each_time():
    gains = [LearningModel().update_of([group(0, n // 2, n)], 1, "equal").shared for n in (8, 16, 32, 64)]
    assert np.all(np.diff(gains) > 0)
    without_noise = [LearningModel(noise=0).update_of([group(0, n // 2, n)], 1, "equal").shared for n in (8, 64)]
    assert without_noise[0] == pytest.approx(without_noise[1])


def test_every_prompt_gains_the_shared_component_and_the_trained_ones_their_own():
    ability = Ability(np.zeros(3))
    groups = [group(1, 2, 4)]
    ability.learn(groups, LearningModel(shared=1.0, own=2.0, noise=0).update_of(groups, 1, "equal"))
    assert ability.logits(np.arange(3)) == pytest.approx([0.5, 1.5, 0.5])
    assert ability.held_out_rates() == pytest.approx(np.full(3, 1 / (1 + np.exp(-0.5))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shared": -1}, "shared"),
        ({"noise": np.nan}, "noise"),
        ({"staleness": 1.5}, "staleness"),
        ({"advantage": "gae"}, "grpo, rloo"),
        ({"optimizer": "lion"}, "sgd, adam"),
        ({"prefix_transfer": -0.1}, "prefix_transfer"),
    ],
)
def test_bad_parameters_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearningModel(**arguments)


def test_the_component_that_a_run_was_simulated_with_is_found_again():
    learning = LearningModel(shared=0.07, noise=5.0, own=0.3)
    world = World("1:2:3", 400, steps=40, learning=learning)
    run = simulate(Method.parse("grpo n=8", 16), world, 0)
    logits = draw_logits("1:2:3", 400, np.random.default_rng(DATA_SEED))
    fit = fit_shared(run, logits, LearningModel(shared=9.0, noise=5.0, own=0.3))
    assert fit.learning.shared == pytest.approx(0.07, rel=1e-3)
    assert replace(fit.learning, shared=0.07) == learning
    assert fit.offset == pytest.approx(0, abs=1e-3) and fit.error < 1e-6 and fit.validations == 9


def test_a_harder_validation_set_is_an_offset():
    logits = draw_logits("1:2:3", 500, np.random.default_rng(0))
    gain = LearningModel(shared=0.05, noise=0).shared_gain(0.4, 0.01)
    logged = dict(zip(SIGNAL_METRICS, (0.4, 1.0, 4.0, 8.0), strict=True))
    accuracies = [sigmoid(logits - 0.5 + gain * step).mean() for step in range(20)]
    records = [
        {"val-core/x/acc/mean@4": accuracy} | (logged if step else {}) for step, accuracy in enumerate(accuracies)
    ]
    fit = fit_shared(Run("x", dict(enumerate(records))), logits, LearningModel(noise=0))
    assert (fit.learning.shared, fit.offset) == pytest.approx((0.05, -0.5), rel=1e-3)


def test_a_log_without_what_is_needed_is_refused():
    run = Run("verl", {0: {"val-core/x/acc/mean@1": 0.1}, 1: {}})
    with pytest.raises(ValueError, match="fit=verl: .*1 validations and lacks groups/reward_std_mean"):
        fit_shared(run, np.zeros(4), LearningModel())
