"""Policies fed group by group: what a step does with rewards, failures and bounds that are set by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.engine import controller, prompts, run_step

from recipe.greso.policy import Greso
from recipe.hora.policy import Hora
from recipe.knapsack.policy import Knapsack
from recipe.pilot_commit.policy import PilotCommit
from recipe.pods.policy import Pods
from recipe.prefix_sampling.policy import PrefixSampling
from recipe.recall.policy import RATE, RECENT, START, Recall
from recipe.reinforce_ada.policy import ReinforceAda
from recipe.speed_rl.policy import SpeedRL
from recipe.vip.policy import Vip
from verl_ext.policy import Discard, Evict, Group, Request, Rollout
from verl_ext.trajectory import Trajectory

FAILED = Rollout(math.nan, None, 0, 0, failed=True)


def rollouts(*rewards: float | None) -> list[Rollout]:
    """None stands for a failed rollout."""
    return [FAILED if reward is None else Rollout(float(reward), None, 5, 0) for reward in rewards]


def started(policy, total_steps=None):
    """The requests of the first step, with data of forty prompts."""
    rows = prompts(40)
    policy.start_run(total_steps, [""] * len(rows))
    left = list(rows)

    def draw(count, but=()):
        chosen = [row for row in left if row.id not in but][:count]
        for row in chosen:
            left.remove(row)
        return chosen

    return policy.start_step(1, draw)


def fed(policy, request, *rewards):
    """The actions after a request's rollouts got these rewards."""
    return policy.on_group(Group(request.target.id, request.target, rollouts(*rewards)))


def requests(actions):
    return [action for action in actions if isinstance(action, Request)]


# ---- policies of one wave ----


def test_the_moving_average_predicts_before_it_learns():
    policy = Knapsack(train_batch_size=2, n=2)
    for request in started(policy):
        fed(policy, request, 1, 1)
    policy.take_batch()
    assert policy.metrics()["knapsack/prediction_mae_moving_average"] == 0.5


def test_continuous_rewards_teach_the_sample_variance_of_groups_with_two_rewards(tmp_path):
    np.save(tmp_path / "features.npy", np.eye(40) * 9)
    options = {"features": str(tmp_path / "features.npy"), "link": "softplus"}
    policy = Vip(train_batch_size=2, n=4, rewards="continuous", estimator_options=options)
    one, other = started(policy)
    fed(policy, one, 0, 4, None, None)
    fed(policy, other, 1, None, None, None)
    assert len(policy.take_batch()) == 2
    assert policy.estimator.predict([one.target])[0] == pytest.approx(8, rel=1e-3)


def test_failed_rollouts_are_no_outcomes():
    policy = Knapsack(train_batch_size=1, n=10)
    (request,) = started(policy)
    fed(policy, request, 1, 0, *[None] * 8)
    policy.take_batch()
    assert not policy.estimator.known([request.target])[0]


def test_discarded_groups_teach_the_estimator():
    policy = Knapsack(train_batch_size=1, n=8, dynamic_sampling=True)
    (first,) = started(policy)
    _, second = fed(policy, first, *[1] * 8)
    fed(policy, second, 1, *[0] * 7)
    policy.take_batch()
    assert policy.estimator.predict([first.target])[0] == 1


def test_the_effective_ratio_of_a_baseline_over_all_rollouts():
    """The two trained rewards are equal, and have advantages against the other two."""
    policy = Pods(train_batch_size=1, n=4, m=2, rule="max_reward", baseline="all")
    run = controller(policy, [0.5] * 4)
    rewards = iter([1.0, 1.0, 1.0, 0.0])
    run.engine.rollout = lambda group, version: Rollout(next(rewards), None, 5, version)
    run_step(run, 1)
    assert run.metrics()["rollouts/effective_ratio"] == 1


def test_a_weight_of_0_is_accepted():
    class WithoutWeight(Pods):
        def take_batch(self):
            batch = super().take_batch()
            for group in batch:
                group.weight = 0.0
            return batch

    assert len(run_step(controller(WithoutWeight(train_batch_size=1, n=4, m=2), [0.5] * 4), 1)) == 1


# ---- policies of several waves ----


def test_pilot_commit_evicts_no_prompt_whose_pilots_failed():
    """An evicted prompt never returns, and a failed pilot may have been wrong."""
    policy = PilotCommit(train_batch_size=1, n_pilot=4, n_commit=2, s=1, bind=False)
    (request,) = started(policy)
    assert not any(isinstance(action, Evict) for action in fed(policy, request, 1, 1, 1, None))
    assert policy.metrics()["pilot_commit/too_easy"] == 1
    policy = PilotCommit(train_batch_size=1, n_pilot=4, n_commit=2, s=1, bind=False)
    (request,) = started(policy)
    assert any(isinstance(action, Evict) for action in fed(policy, request, 1, 1, 1, 1))


def test_pilot_commit_trains_a_survivor_at_p_solve_once_more():
    policy = PilotCommit(train_batch_size=1, n_pilot=4, n_commit=2, s=1, p_solve=0.75, bind=False)
    (request,) = started(policy)
    actions = fed(policy, request, 1, 1, 1, 0)
    assert isinstance(actions[0], Evict) and requests(actions)


def test_pilot_commit_counts_failed_pilots_as_rollouts():
    policy = PilotCommit(train_batch_size=1, n_pilot=4, n_commit=2, s=1, bind=False)
    (request,) = started(policy)
    fed(policy, request, 1, 0, None, None)
    assert policy.metrics()["pilot_commit/rollouts_pilot"] == 4


def test_pilot_commit_without_binding_generates_no_pilots_for_the_last_step_from_a_full_buffer():
    policy = PilotCommit(train_batch_size=1, n_pilot=8, n_commit=2, s=3, bind=False)
    pilots = started(policy, total_steps=2)
    actions = [action for request in pilots for action in fed(policy, request, *[1, 0] * 4)]
    (commit,) = requests(actions)
    commit.target.rollouts += rollouts(1, 0)
    policy.on_group(commit.target)
    policy.take_batch()
    (only,) = policy.start_step(2, lambda count, but=(): prompts(40)[10 : 10 + count])
    assert isinstance(only.target, Group)


def test_pilot_commit_commits_as_soon_as_the_batch_has_its_survivors():
    """An asynchronous engine still generates the other pilots, which were bound to the step before."""
    policy = PilotCommit(train_batch_size=2, n_pilot=4, n_commit=2, s=2)
    for request, reward in zip(started(policy, total_steps=2), (1, 1, 0, 0), strict=True):
        actions = fed(policy, request, reward, reward, 0, 0)
    *commits, one, two, _, _ = requests(actions)
    for request in commits:
        policy.on_group(request.target)
    policy.take_batch()
    assert policy.start_step(2, lambda count, but=(): []) == []
    assert fed(policy, one, 1, 1, 0, 0) == []
    assert [request.rollouts for request in fed(policy, two, 1, 1, 0, 0)] == [2, 2]


def test_horas_upper_yields_if_a_prompt_of_the_shard_fails():
    """Three prompts are left for the budget of 16, so the limit of 4 becomes 16 / 3, rounded up."""
    policy = Hora(train_batch_size=4, G=6, G0=2, shards=1, upper=4)
    failed, *others, last = started(policy)
    fed(policy, failed, None, None)
    for request in others:
        fed(policy, request, 1, 1)
    assert [request.rollouts for request in requests(fed(policy, last, 0, 0))] == [5, 5, 6]


def test_a_round_of_greso_is_at_most_s_times_the_batch():
    policy = Greso(train_batch_size=4, n=2, s=1.5)
    first = started(policy)
    assert len([more for request in first for more in requests(fed(policy, request, 0, 0))]) == 6


def test_rounds_and_cost_of_speed_rl_are_bounded():
    policy = SpeedRL(train_batch_size=2, n_init=2, n_cont=2, s=1, max_rounds=2)
    asked = started(policy)
    rounds = 0
    while asked:
        rounds += 1
        asked = [more for request in asked for more in requests(fed(policy, request, 0, 0))]
    assert rounds == 2 and policy.step_cost().most == 2 * 2 * 4
    assert SpeedRL(train_batch_size=2, n_init=2, n_cont=2, s=3, max_rounds=5).step_cost().most == 5 * 6 * 4


def test_reinforce_ada_trains_n_rollouts_after_a_failure():
    policy = ReinforceAda(train_batch_size=1, n=2, M=4, N=1)
    (request,) = started(policy)
    fed(policy, request, 1, 0, 0, None)
    (group,) = policy.take_batch()
    assert len(group.trained_rollouts) == 2


def test_the_prefix_controller_gets_the_rate_of_the_usable_rollouts():
    policy = PrefixSampling(train_batch_size=1, n=8, ema_alpha=1.0)
    seen = []
    policy.control.observe = lambda bucket, rate: seen.append(rate)
    (request,) = started(policy)
    policy._parent_bucket = {request.target.id: 1}
    made = rollouts(1, 0, 0, None, None, None, None, None)
    policy.on_group(Group("g", request.target, made, prefix=Trajectory([1] * 10, [True] * 10)))
    policy.take_batch()
    assert seen == [pytest.approx(1 / 3)]


# ---- recall ----


@pytest.mark.parametrize(("size", "explore", "most"), [(3, 0.5, 1), (4, 0.1, 3), (8, 0.05, 7), (10, 0.9, 1), (4, 1, 0)])
def test_recall_keeps_room_for_new_prompts(size, explore, most):
    run = controller(Recall(train_batch_size=size, n=8, explore=explore), [0.5] * 400)
    recalled = trained_new = 0
    for step in range(1, 16):
        run_step(run, step)
        metrics = run.metrics()
        recalled = max(recalled, metrics["recall/recalled"])
        trained_new += metrics["recall/trained_new"]
    assert recalled == most and trained_new > 15 * (size - most) / 2


def test_recall_remembers_its_last_pilots():
    policy = Recall(train_batch_size=1, n=4)
    request, *_ = started(policy)
    policy.pilots = [0.0] * RECENT
    fed(policy, request, 1, 0)
    assert policy.pilots == [0.0] * (RECENT - 1) + [0.5]


def test_recalls_survival_falls_if_no_pilot_differs():
    policy = Recall(train_batch_size=1, n=4)
    new = started(policy)
    policy._ready = [Group("x", prompts(40)[-1], rollouts(1, 0, 1, 0))]  # of a remembered prompt
    for request in new:
        fed(policy, request, 0, 0)
    policy.take_batch()
    assert policy.survival == pytest.approx(START * (1 - RATE))


def test_recalls_second_wave_is_as_large_as_the_room():
    policy = Recall(train_batch_size=2, n=4)
    new = started(policy)
    assert len(new) > 2
    actions = [fed(policy, request, 1, 0)[0] for request in new]
    assert [type(action) for action in actions] == [Request] * 2 + [Discard] * (len(new) - 2)
