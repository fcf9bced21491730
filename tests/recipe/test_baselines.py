"""Uniform allocation and dynamic sampling."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
from support.engine import BernoulliEngine, controller, run_step

from recipe.dynamic_sampling.policy import DynamicSampling
from recipe.greso.policy import Greso
from recipe.grpo.policy import Uniform
from recipe.knapsack.policy import Knapsack
from recipe.recall.policy import Recall
from verl_ext.errors import CannotFillBatch
from verl_ext.policy import has_spread
from verl_ext.testing.run import Conditions, Run


def test_uniform_gives_every_prompt_the_same():
    run = controller(Uniform(train_batch_size=5, n=7), [0.5] * 40)
    for step in range(1, 5):
        assert [len(group.rollouts) for group in run_step(run, step)] == [7] * 5
        assert run.metrics()["rollouts/sampled"] == 35


def test_uniform_trains_on_the_rest_when_some_rollouts_fail():
    run = controller(Uniform(train_batch_size=6, n=2), [0.5] * 40, failure_rate=0.5, seed=1)
    batch = run_step(run, 1)
    metrics = run.metrics()
    assert 0 < metrics["rollouts/failed"] < 12
    assert metrics["rollouts/trained"] == 12 - metrics["rollouts/failed"] == sum(len(g.usable) for g in batch)


def test_dynamic_sampling_trains_only_on_groups_with_spread():
    run = controller(DynamicSampling(train_batch_size=4, n=4), [0.0, 1.0, 0.5, 0.5] * 20)
    for step in range(1, 6):
        batch = run_step(run, step)
        assert len(batch) == 4 and all(has_spread(group.rewards) for group in batch)
        metrics = run.metrics()
        assert metrics["groups/effective_ratio"] == 1.0 and metrics["rollouts/buffered"] == 0
        assert metrics["rollouts/sampled"] == 12 * 4 * metrics["dynamic_sampling/rounds"]


class Overlong(BernoulliEngine):
    """Long responses lose a part of their reward; verdicts stay."""

    def rollout(self, group, version):
        made = super().rollout(group, version)
        return replace(made, reward=made.reward - made.tokens / 100)


@pytest.mark.parametrize(
    ("policy", "mixed"),
    [
        (DynamicSampling(train_batch_size=4, n=8), True),
        (Knapsack(train_batch_size=4, n=8, dynamic_sampling=True), True),
        (Recall(train_batch_size=4, n=8), True),
        (Greso(train_batch_size=4, n=8), False),
    ],
)
def test_an_overlong_penalty_makes_no_group_mixed(policy, mixed):
    """DAPO, Knapsack-RL and Recall judge groups by correctness, and GRESO's release by rewards."""
    run = controller(policy, [0.0, 1.0, 0.5, 0.5] * 20)
    run.engine = Overlong(run.engine.success_rates)
    batches = [group for step in range(1, 6) for group in run_step(run, step)]
    assert all(has_spread(group.rewards) for group in batches)
    assert all(0 < sum(group.verdicts) < 8 for group in batches) is mixed


class Failing(BernoulliEngine):
    """Every rollout of the prompts in ``broken`` fails."""

    broken = ("p1", "p2")

    def rollout(self, group, version):
        made = super().rollout(group, version)
        return replace(made, reward=math.nan, correct=None, failed=True) if group.prompt.id in self.broken else made


def test_dynamic_sampling_counts_each_group_under_its_reason():
    """Of 12 prompts in the one round, 2 fail, 3 have no spread, and 7 have: 3 more than the batch needs."""
    run = controller(DynamicSampling(train_batch_size=4, n=64, s=3), [1.0, 0.5, 0.5, 0.0, 1.0, *[0.5] * 7])
    run.engine = Failing(run.engine.success_rates)
    batch = run_step(run, 1)
    assert len(batch) == 4 and not {group.prompt.id for group in batch} & {"p0", "p1", "p2", "p3", "p4"}
    metrics = run.metrics()
    assert (metrics["groups/discarded_empty"], metrics["rollouts/discarded_empty"]) == (2, 0)
    assert (metrics["groups/discarded_no_spread"], metrics["rollouts/discarded_no_spread"]) == (3, 3 * 64)
    assert (metrics["groups/discarded_surplus"], metrics["rollouts/discarded_surplus"]) == (3, 3 * 64)
    assert (metrics["rollouts/failed"], metrics["rollouts/trained"]) == (2 * 64, 4 * 64)
    assert (metrics["dynamic_sampling/rounds"], metrics["dynamic_sampling/no_spread"]) == (1, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicSampling(train_batch_size=4, n=4, s=3),
        lambda: Greso(train_batch_size=4, n=4, s=1.5),
        lambda: Knapsack(train_batch_size=4, n=4, dynamic_sampling=True),
    ],
)
def test_the_groups_drawn_first_are_trained_whichever_finish_first(make):
    """Short responses finish first; a batch of the first groups to finish would prefer prompts with short responses."""

    def trained(order: int | None) -> list[list[str]]:
        return [[group.id for group in step.batch] for step in Run(make, Conditions(order=order)).steps()]

    expected = trained(None)
    assert all(ids == sorted(ids, key=lambda name: int(name.rsplit("-", 1)[1])) for ids in expected)
    assert [trained(order) for order in range(3)] == [expected] * 3


def test_dynamic_sampling_refills_and_is_bounded(caplog):
    rates = [0.0] * 30 + [0.5] * 3
    run = controller(DynamicSampling(train_batch_size=4, n=8, s=1, max_rounds=6), rates)
    with caplog.at_level(logging.WARNING):
        batch = run_step(run, 1)
    metrics = run.metrics()
    assert metrics["dynamic_sampling/rounds"] == 6 and len(batch) < 4
    assert "trains on" in caplog.text


def test_dynamic_sampling_without_any_signal_says_what_to_change(caplog):
    run = controller(DynamicSampling(train_batch_size=2, n=4, max_rounds=2), [0.0, 1.0] * 20)
    with pytest.raises(CannotFillBatch, match="max_rounds"):
        run_step(run, 1)
    assert "trains on" not in caplog.text


@pytest.mark.parametrize("make", [Uniform, DynamicSampling])
@pytest.mark.parametrize(("key", "value"), [("n", 1), ("n", 2.0), ("train_batch_size", 0)])
def test_bad_parameters_are_named(make, key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        make(**{"train_batch_size": 2, "n": 2, key: value})


@pytest.mark.parametrize(("key", "value"), [("s", 0.9), ("s", "three"), ("max_rounds", 0)])
def test_bad_dynamic_sampling_parameters_are_named(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        DynamicSampling(**{"train_batch_size": 2, "n": 2, key: value})


def test_what_a_step_costs():
    assert Uniform(train_batch_size=4, n=8).step_cost() == (4, 8, 32, 32)
    assert DynamicSampling(train_batch_size=4, n=8, s=2.5, max_rounds=5).step_cost() == (4, 8, 80, 400)


@pytest.mark.parametrize("policy", [Uniform, DynamicSampling])
def test_before_the_first_step_there_is_no_batch(policy):
    assert policy(train_batch_size=4, n=8).take_batch() == []
