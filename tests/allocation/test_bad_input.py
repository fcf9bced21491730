"""Every refusal is a ValueError whose sentence names the argument."""

from __future__ import annotations

import math

import pytest

from verl_ext.allocation import balance, gradient_variance, heuristics, hit_utility, knapsack

nan, inf = math.nan, math.inf
VIP = {"lower": 3, "upper": 16}

REFUSED = [
    # hit_utility
    (hit_utility.allocate, ([1, nan], 8, 4), {}, "successes[1]"),
    (hit_utility.allocate, ([1, inf], 8, 4), {}, "successes[1]"),
    (hit_utility.allocate, ([-1, 2], 8, 4), {}, "successes[0]"),
    (hit_utility.allocate, ([9, 2], 8, 4), {}, "successes[0]=9 is more than trials"),
    (hit_utility.allocate, ([8, 9], 8, 4), {}, "successes[1]=9 is more than trials[1]=8"),
    (hit_utility.allocate, ([1, 2], [8, 8, 8], 4), {}, "trials"),
    (hit_utility.allocate, ([1, 2], [8, nan], 4), {}, "trials[1]"),
    (hit_utility.allocate, ([1, 2], -8, 4), {}, "trials[0]"),
    (hit_utility.allocate, ([[1, 2]], 8, 4), {}, "successes"),
    (hit_utility.allocate, ([], 8, 4), {}, "successes"),
    (hit_utility.allocate, ("many", 8, 4), {}, "successes"),
    (hit_utility.allocate, ([1, 2], 8, -1), {}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, 2.5), {}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, nan), {}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, inf), {}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, None), {}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, True), {}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": (0.0, 1.0)}, "prior[0]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": (1.0, -1.0)}, "prior[1]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": (1.0, nan)}, "prior[1]"),
    (
        hit_utility.allocate,
        ([1, 2], 8, 4),
        {"prior": (3e305, 1.0)},
        "prior[0][0]=3e+305 is not valid: use a number above 0 and at most 1e+12",
    ),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": (1.0, [1.0, 1e13])}, "prior[1][1]"),
    (hit_utility.allocate, ([1, 2], [8, 1e13], 4), {}, "trials[1]"),
    (hit_utility.allocate, ([1, 2], 8, 2**40 + 1), {}, "budget=1099511627777 is not valid: use at most"),
    (hit_utility.allocate, ([1, 2], 8, 1.0), {"costs": [1e-20, 1.0]}, "budget"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": ([1.0, 1.0, 1.0], 1.0)}, "prior[0]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": 1.0}, "prior"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"prior": (1.0, 1.0, 1.0)}, "prior=(1.0, 1.0, 1.0) must be a pair"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"lower": 3}, "budget=4 is not valid: lower needs"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"upper": 1}, "budget=4 is not valid: lower needs"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"lower": 2, "upper": 1}, "upper[0]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"lower": -1}, "lower[0]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"lower": 0.5}, "lower[0]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"costs": [1.0, 0.0]}, "costs[1]"),
    (hit_utility.allocate, ([1, 2], 8, 4), {"costs": [1.0, nan]}, "costs[1]"),
    (hit_utility.allocate, ([1, 2], 8, -4.0), {"costs": [1.0, 2.0]}, "budget"),
    (hit_utility.utility, ([1, 2], 8, [-1, 2]), {}, "additional[0]"),
    (hit_utility.prior_from_prediction, ([0.5, 1.0],), {}, "success_rates[1]"),
    (hit_utility.prior_from_prediction, ([0.5, 0.0],), {}, "success_rates[1]"),
    (hit_utility.prior_from_prediction, ([0.5, 0.2], -2), {}, "strength[0]"),
    # knapsack
    (knapsack.allocate, ([0.5, 1.5], 16), {}, "success_rates[1]"),
    (knapsack.allocate, ([0.5, -0.1], 16), {}, "success_rates[1]"),
    (knapsack.allocate, ([0.5, nan], 16), {}, "success_rates[1]"),
    (knapsack.allocate, ([0.5, 0.5], 3), {}, "budget=3 is not valid: lower needs"),
    (knapsack.allocate, ([0.5, 0.5], 257), {}, "budget=257 is not valid: lower needs"),
    (knapsack.allocate, ([0.0, 0.5], 257), {}, "budget=257 is not valid: lower needs"),
    (knapsack.allocate, ([0.0, 0.5], 3), {}, "budget=3 is not valid: lower needs"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"lower": 9, "upper": 8}, "upper[0]"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"upper": [8, 8, 8]}, "upper"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"upper": inf}, "upper[0]"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"gradient": "ppo"}, "gradient"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"gradient": "remax"}, "gradient"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"lower": [2, 0]}, "lower[1]"),
    (knapsack.allocate, ([0.5, 0.5], 16), {"costs": [1.0]}, "costs"),
    (knapsack.value, ([1.5], [0.5]), {}, "counts[0]"),
    (knapsack.rollouts_needed, ([0.5],), {"confidence": 1.0}, "confidence=1.0 must lie between 0 and 1"),
    (knapsack.rollouts_needed, ([0.5],), {"confidence": 0.0}, "confidence=0.0 must lie between 0 and 1"),
    # gradient_variance
    (gradient_variance.allocate, ([0.5, 2.0], 8), VIP, "success_rates[1]"),
    (gradient_variance.allocate, (None, 8), VIP, "reward_variance"),
    (gradient_variance.allocate, (None, 8), {**VIP, "reward_variance": [1, -1]}, "reward_variance[1]"),
    (gradient_variance.allocate, ([0.5, 0.5], 8), {**VIP, "reward_variance": [1.0]}, "reward_variance"),
    (gradient_variance.allocate, ([0.5, 0.5], 8), {"lower": 1, "upper": 8}, "lower[0]"),
    (gradient_variance.allocate, ([0.5, 0.5], 8), {"lower": 2, "upper": 8, "estimator": "dr_grpo"}, "lower[0]"),
    (gradient_variance.allocate, ([0.5, 0.5], 5), VIP, "budget"),
    (gradient_variance.allocate, ([0.5, 0.5], 33), VIP, "budget"),
    (gradient_variance.allocate, ([0.5, 0.5], 8), {**VIP, "estimator": "grpo"}, "estimator"),
    (
        gradient_variance.allocate,
        ([0.5, 0.5], 100),
        {**VIP, "costs": [50.0, 50.0]},
        "budget=100 is not valid: lower needs at least 300 and upper allows at most 1600",
    ),
    (gradient_variance.allocate, ([0.5, nan], 8), VIP, "success_rates[1]"),
    (gradient_variance.variance, ([1, 3], [0.5, 0.5]), {}, "counts"),
    # heuristics
    (heuristics.hard_first, ([-1], 4), {}, "successes[0]"),
    (heuristics.hard_first, ([1], 4), {"upper": 3}, "budget"),
    (
        heuristics.hard_first,
        ([0, 1], 9),
        {"upper": 4},
        "budget=9 is not valid: lower needs at least 0 and upper allows",
    ),
    (heuristics.inverse_accuracy, ([0, 1], 4), {"lower": [0, 2], "upper": [4, 1]}, "upper[1]=1 is not valid: use at"),
    (heuristics.inverse_accuracy, ([1.1], 4), {"lower": 0, "upper": 8}, "success_rates[0]"),
    (heuristics.inverse_accuracy, ([0.1], 4), {"lower": 0, "upper": 8, "epsilon": 0}, "epsilon"),
    (heuristics.inverse_accuracy, ([0.1], 4), {"lower": 0, "upper": 8, "epsilon": 1e300}, "epsilon"),
    (heuristics.inverse_variance, ([0.1], 4), {"lower": 0, "upper": 8, "reward_variance": [1e301]}, "reward_variance"),
    (heuristics.inverse_variance, (None, 4), {"lower": 0, "upper": 8}, "reward_variance"),
    (heuristics.inverse_variance, ([0.1], 9), {"lower": 0, "upper": 8}, "budget"),
    # balance
    (balance.partition, ([1, -1], 2), {}, "costs[1]"),
    (balance.partition, ([1, nan], 2), {}, "costs[1]"),
    (balance.partition, ([], 2), {}, "costs"),
    (balance.partition, ([1, 1], 0), {}, "workers"),
    (balance.partition, ([1, 1], 1.5), {}, "workers"),
    (balance.random_dispatch, (0, 2), {"seed": 0}, "items"),
]


@pytest.mark.parametrize(("call", "arguments", "options", "named"), REFUSED)
def test_refused(call, arguments, options, named):
    with pytest.raises(ValueError) as refusal:
        call(*arguments, **options)
    sentence = str(refusal.value)
    assert named in sentence and "\n" not in sentence


def test_there_are_at_least_forty():
    assert len(REFUSED) >= 40
