"""Unusable rollouts from the engine: each recipe trains on the rest, or ends with one sentence."""

from __future__ import annotations

import pytest
from model_free import policies
from support.configs import RECIPES
from support.engine import BernoulliEngine, epochs, prompts, run_step

from verl_ext.controller import RolloutController
from verl_ext.errors import BadReward, CannotFillBatch, EveryRolloutFailed
from verl_ext.policy import Rollout

ROWS = 64


class ScriptedEngine(BernoulliEngine):
    """The test determines every rollout."""

    def __init__(self, make):
        super().__init__({})
        self.make = make

    def rollout(self, group, version):
        return self.make(self.rng, version)


def train(recipe, folder, make, steps=3):
    rows = prompts(ROWS)
    policy = policies(folder, prompts=ROWS)[recipe]()
    policy.start_run(steps, [str(row.row) for row in rows])
    run = RolloutController(policy, epochs(rows), ROWS, ScriptedEngine(make))
    return run, [run_step(run, step) for step in range(1, steps + 1)]


def verdict(correct, version):
    return Rollout(float(correct), correct, 5, version)


@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_failing_ends_the_run_at_once(recipe, tmp_path):
    failed = lambda rng, version: Rollout(float("nan"), None, 0, version, failed=True)  # noqa: E731
    with pytest.raises(EveryRolloutFailed, match=r"step 1: all \d+ rollouts failed; the log of the agent-loop workers"):
        train(recipe, tmp_path, failed)


@pytest.mark.parametrize(
    "recipe", ["pilot_commit", "dynamic_sampling", "greso", "prefix_sampling", "recall", "speed_rl"]
)
@pytest.mark.parametrize("correct", [True, False])
def test_nothing_to_learn_ends_the_run_with_what_to_change(recipe, correct, tmp_path):
    with pytest.raises(CannotFillBatch, match=r"^step 1: .*(rollout_policy\.|use data)"):
        train(recipe, tmp_path, lambda rng, version: verdict(correct, version))


@pytest.mark.parametrize("recipe", ["grpo", "hora", "mopps", "vip", "knapsack", "pods", "reinforce_ada"])
@pytest.mark.parametrize("correct", [True, False])
def test_the_others_train_on_without_a_signal_and_say_so(recipe, correct, tmp_path):
    run, _ = train(recipe, tmp_path, lambda rng, version: verdict(correct, version))
    assert run.metrics()["groups/effective_ratio"] == 0.0


def test_all_prompts_evicted_ends_the_run_with_what_to_change(tmp_path):
    rows = prompts(ROWS)
    policy = policies(tmp_path, prompts=ROWS)["pilot_commit"]()
    policy.start_run(9, [])
    run = RolloutController(
        policy, epochs(rows), ROWS, ScriptedEngine(lambda rng, version: verdict(rng.random() < 0.5, version))
    )
    run_step(run, 1)
    run.engine.make = lambda rng, version: verdict(True, version)
    with pytest.raises(CannotFillBatch, match=r"p_solve=null, or use data"):
        for step in range(2, 9):
            run_step(run, step)
    assert len(run.prompts.evicted) == ROWS - len({group.prompt.id for group in run.live.values()})


@pytest.mark.parametrize("recipe", ["hora", "mopps", "vip", "knapsack"])
def test_rewards_that_are_no_success_rates_are_refused_with_the_range(recipe, tmp_path):
    with pytest.raises(BadReward, match=r"prompt p\d+ has rewards from -?\d.* and no verdicts: a success rate needs"):
        train(recipe, tmp_path, lambda rng, version: Rollout(rng.normal() * 10, None, 5, version))


def test_prefix_sampling_needs_verdicts(tmp_path):
    with pytest.raises(BadReward, match="prefix sampling needs rewards of 0 and 1"):
        train("prefix_sampling", tmp_path, lambda rng, version: Rollout(rng.random(), None, 5, version))
