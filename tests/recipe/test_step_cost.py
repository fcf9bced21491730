"""``step_cost()`` of each policy with its defaults agrees with the rollouts that simulated steps sample."""

from __future__ import annotations

import numpy as np
import pytest
from support.configs import RECIPES

from verl_ext.lab.method import Method
from verl_ext.lab.simulate import World, simulate


def sampled(recipe: str) -> tuple[Method, np.ndarray]:
    method = Method.parse(recipe, 8)
    run = simulate(method, World("1:1:1", prompts=4000, steps=12), 0)
    return method, run.series("rollouts/sampled")[1]


VARYING = (
    "pilot_commit",
    "prefix_sampling",
    "recall",
    "reinforce_ada",
    "speed_rl",
)  # steps of one round differ in their rollouts


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {*VARYING}))
def test_a_step_without_further_rounds_costs_the_usual(recipe):
    method, rollouts = sampled(recipe)
    assert rollouts.min() == method.policy(0).step_cost().usual


def test_pilots_and_commits_of_a_full_step():
    method, rollouts = sampled("pilot_commit")
    cost = method.policy(0).step_cost()
    assert cost.usual == 3 * 8 * 16 + 8 * 48 and cost.n == 64 and cost.most == 11 * 3 * 8 * 16 + 8 * 48
    assert np.median(rollouts) == cost.usual


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"reinforce_ada"}))  # it trains on a part of its rollouts
def test_settings_for_an_average_of_n_cost_n_rollouts_per_trained_prompt(recipe, n):
    """Methods with two phases, and VIP, need three rollouts for each prompt."""
    method = Method.parse(recipe, 8)
    settings = method.policy_class.settings_for(8, n, 0)
    if settings is None:
        assert recipe == "prefix_sampling"
    elif n == 2 and recipe in ("pilot_commit", "recall", "speed_rl", "vip"):
        with pytest.raises(ValueError, match="is not valid"):
            method.with_settings(settings).policy(0)
    else:
        assert method.with_settings(settings).policy(0).step_cost().n == n
