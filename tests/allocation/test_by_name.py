"""Allocators by name: each rule gives what its own function gives for the same beliefs, plus the finished rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext.allocation import gradient_variance, heuristics, hit_utility, knapsack
from verl_ext.allocation.by_name import RULES, Beliefs, allocate
from verl_ext.checks import InvalidValue

RATES = np.array([0.1, 0.5, 0.9, 0.3])
VARIANCES = np.array([4.0, 1.0, 0.25, 0.01])


def test_uniform_spreads_evenly_within_the_bounds():
    assert allocate("uniform", Beliefs(RATES), 22, lower=1, upper=8).tolist() == [6, 6, 5, 5]
    assert allocate("uniform", Beliefs(RATES), 22, lower=1, upper=8, done=4).tolist() == [6, 6, 5, 5]
    with pytest.raises(InvalidValue, match="budget=33 is not valid"):
        allocate("uniform", Beliefs(RATES), 33, lower=1, upper=8)
    with pytest.raises(InvalidValue, match="budget=15 is not valid"):  # 4 finished rollouts of each
        allocate("uniform", Beliefs(RATES), 15, lower=1, upper=8, done=4)


@pytest.mark.parametrize("rule", ["hit_utility", "knapsack", "gradient_variance"])
def test_costs_are_refused_since_the_budget_counts_rollouts(rule):
    with pytest.raises(InvalidValue, match="rollout_policy.allocator_options.costs=2 is not valid: leave it out"):
        allocate(rule, Beliefs(RATES), 40, lower=3, upper=20, options={"costs": 2})


def test_hit_utility_adds_to_the_finished_rollouts():
    rates, strength = np.array([0.1, 0.5, 0.999, 0.3]), np.array([2.0, 4.0, 1.0, 3.0])
    found = allocate("hit_utility", Beliefs(rates, strength), 40, lower=5, upper=12, done=4)
    prior = hit_utility.prior_from_prediction(rates, strength)
    wanted = hit_utility.allocate(np.zeros(4), 0, 24, prior=prior, lower=1, upper=8)
    assert found.tolist() == (4 + wanted).tolist() and found.sum() == 40 and {5, 12} < set(found.tolist())
    by_strength = [
        allocate("hit_utility", Beliefs(np.full(3, 0.3), strength), 30, lower=1, upper=30).tolist()
        for strength in (2.0, np.array([0.5, 2.0, 16.0]))
    ]
    assert by_strength[0] == [10, 10, 10] and by_strength[1] != [10, 10, 10]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_gradient_variance_spreads_evenly_over_prompts_believed_certain(rate):
    assert allocate("gradient_variance", Beliefs(np.full(8, rate)), 64, lower=3, upper=32).tolist() == [8] * 8
    mixed = allocate("gradient_variance", Beliefs(np.array([rate, 0.5, rate])), 24, lower=3, upper=16)
    assert mixed.tolist() == [4, 16, 4]


def test_hit_utility_takes_certain_rates():
    """A Beta prior has no rate of 0 or 1, so 1e-6 and 1 - 1e-6 take their places."""
    certain, nearly = np.array([0.0, 0.5, 1.0]), np.array([1e-6, 0.5, 1 - 1e-6])
    for budget in (6, 30, 60):
        found = allocate("hit_utility", Beliefs(certain), budget, lower=1, upper=60)
        assert found.tolist() == allocate("hit_utility", Beliefs(nearly), budget, lower=1, upper=60).tolist()
    assert found.tolist() == [1, 58, 1]


def test_knapsack_and_gradient_variance_get_rates_bounds_and_options():
    wanted = knapsack.allocate(RATES, 40, lower=3, upper=20, gradient="rloo")
    assert allocate("knapsack", Beliefs(RATES), 40, lower=3, upper=20, options={"gradient": "rloo"}).tolist() == (
        wanted.tolist()
    )
    options = {"estimator": "dr_grpo"}
    wanted = gradient_variance.allocate(RATES, 40, lower=4, upper=12, estimator="dr_grpo")
    assert allocate("gradient_variance", Beliefs(RATES), 40, lower=4, upper=12, options=options).tolist() == (
        wanted.tolist()
    )
    wanted = gradient_variance.allocate(None, 40, lower=4, upper=20, reward_variance=VARIANCES)
    found = allocate("gradient_variance", Beliefs(RATES, reward_variance=VARIANCES), 40, lower=4, upper=20)
    assert found.tolist() == wanted.tolist() and found.argmax() == 0


def test_hard_first_gives_the_rest_to_prompts_without_a_success():
    beliefs = Beliefs(RATES, successes=np.array([0.0, 2.0, 4.0, 0.0]))
    assert allocate("hard_first", beliefs, 26, lower=4, upper=20, done=4).tolist() == [9, 4, 4, 9]
    assert allocate("hard_first", beliefs, 26, lower=4, upper=8, done=4).tolist() == [8, 5, 5, 8]  # no room for more
    believed = Beliefs(np.array([0.0, 0.5, 0.9, 0.0]))  # nothing has finished
    assert allocate("hard_first", believed, 12, lower=1, upper=20).tolist() == [5, 1, 1, 5]


def test_inverse_rules_follow_accuracy_and_variance():
    options = {"epsilon": 0.5}
    wanted = heuristics.inverse_accuracy(RATES, 41, lower=3, upper=30, epsilon=0.5)
    assert allocate("inverse_accuracy", Beliefs(RATES), 41, lower=3, upper=30, options=options).tolist() == (
        wanted.tolist()
    )
    wanted = heuristics.inverse_variance(None, 41, lower=3, upper=30, epsilon=0.5, reward_variance=VARIANCES)
    beliefs = Beliefs(RATES, reward_variance=VARIANCES)
    assert allocate("inverse_variance", beliefs, 41, lower=3, upper=30, options=options).tolist() == wanted.tolist()
    of_rates = allocate("inverse_variance", Beliefs(RATES), 41, lower=3, upper=30)
    assert of_rates.tolist() == heuristics.inverse_variance(RATES, 41, lower=3, upper=30).tolist()
    assert of_rates.argmin() == 1 and wanted.argmax() == 3


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_spends_the_budget_and_keeps_the_finished_rollouts(rule):
    beliefs = Beliefs(RATES, successes=np.array([0.0, 2.0, 4.0, 1.0]))
    for done, lower in ((0, 4), (4, 1), (5, 4)):
        total = allocate(rule, beliefs, 44, lower=lower, upper=30, done=done)
        assert total.sum() == 44 and total.min() >= max(lower, done) and total.dtype == np.int64


@pytest.mark.parametrize(
    ("rule", "options", "sentence"),
    [
        ("greedy", {}, "allocator=greedy is not valid: use one of uniform, hit_utility, "),
        ("uniform", {"size": 3}, r"allocator_options=\{'size': 3\} does not suit allocator='uniform'"),
        ("knapsack", {"gradient": "ppo"}, "^rollout_policy.allocator_options.gradient=ppo is not valid"),
        ("knapsack", None, "^budget=1 is not valid"),  # no option: the key of the allocator stays
        ("inverse_accuracy", {"epsilon": -1.0}, "^rollout_policy.allocator_options.epsilon=-1.0 is not valid"),
    ],
)
def test_refusals_name_the_key_of_the_config(rule, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        allocate(rule, Beliefs(RATES), 1 if options is None else 40, lower=4, upper=20, options=options)
