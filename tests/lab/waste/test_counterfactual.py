"""The recipes' own policies on recorded rates."""

from __future__ import annotations

import numpy as np
import pytest
from support.rollout_logs import log_of

from verl_ext.lab.method import Method
from verl_ext.lab.waste.counterfactual import RecordedEngine, Spending, recipe_method, spend, spending_of_log
from verl_ext.lab.waste.rates import RecordedRates, fit_prior
from verl_ext.policy import Group, Prompt
from verl_ext.recipes import recipes

BATCH, N = 8, 8


def recorded_log(epochs=3, seed=0, prompts=64):
    """Three kinds of prompts, hopeless, even and solved, visited once per epoch in a new order."""
    rng = np.random.default_rng(seed)
    rates = np.repeat([0.0, 0.5, 1.0], [prompts // 2, prompts // 4, prompts // 4])
    order = np.concatenate([rng.permutation(prompts) for _ in range(epochs)])
    counts = rng.binomial(N, rates[order])
    return log_of([(1 + i // BATCH, prompt, count, N) for i, (prompt, count) in enumerate(zip(order, counts))])  # noqa: B905


def run(name, log, budget=None, seed=0, **settings):
    method, _ = recipe_method(Method.parse(name, BATCH), N, seed, texts=False)
    policy = method.with_settings(settings).policy(seed)
    budget = budget or int(log.rollouts.sum())
    recorded = RecordedRates(log, fit_prior(log.correct, log.rollouts))
    return spend(policy, log, recorded, train_batch_size=BATCH, budget=budget, seed=seed)


def test_uniform_goes_through_the_log_as_it_was():
    """Each step draws the prompts of that step, so the rates are those of the logged groups."""
    log = recorded_log()
    drawn = []

    class Noting(RecordedRates):
        def nearest(self, prompts, batch):
            drawn.extend((prompt, batch) for prompt in prompts.tolist())
            return super().nearest(prompts, batch)

    recorded = Noting(log, (0.1, 0.1))
    policy = recipe_method(Method.parse("grpo", BATCH), N, 0, texts=False)[0].policy(0)
    sources, on_group = [], policy.on_group
    policy.on_group = lambda group: sources.append(group.prompt.metadata["data_source"]) or on_group(group)
    outcome = spend(policy, log, recorded, train_batch_size=BATCH, budget=10**9, seed=0)
    assert set(sources) == {"log"}
    assert drawn == list(zip(log.prompt.tolist(), log.batch.tolist(), strict=True))
    assert outcome.steps == len(log.batches) and outcome.sampled == log.rollouts.sum() == 1536
    assert outcome.short_steps == 0 and outcome.stopped is None and outcome.discarded == {}


def test_the_last_step_is_the_first_that_reaches_the_budget():
    assert [run("grpo", recorded_log(), budget).steps for budget in (127, 128, 129)] == [2, 2, 3]


def test_uniform_has_the_gradients_spending_of_log():
    """Over many groups, the share with a gradient equals the share in the log."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.4, 0.4, 2000)
    log = log_of([(1 + i // BATCH, i, count, N) for i, count in enumerate(rng.binomial(N, rates))])
    outcome = run("grpo", log)
    own = spending_of_log(log, RecordedRates(log, (1.0, 1.0)), [BATCH * N] * len(log.batches))
    share = outcome.gradient_groups / outcome.trained_groups
    assert share == pytest.approx(own.gradient_groups / own.trained_groups, abs=0.03)


def test_the_log_itself():
    log = log_of([(1, 0, 2, 4), (1, 1, 0, 4), (2, 0, 8, 8)])
    own = spending_of_log(log, RecordedRates(log, (0.01, 0.01)), [60, 40])
    assert (own.steps, own.sampled, own.trained_groups, own.trained_rollouts) == (2, 100, 3, 16)
    assert (own.gradient_groups, own.gradient_rollouts) == (1, 4)
    assert own.curve == [(60, 1), (100, 1)]  # against the sampled rollouts, of which 16 were trained on
    assert own.rollouts_in_band.tolist() == [4, 0, 4, 0, 8] and own.prompts_in_band.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(("name", "trained"), [("grpo", 1), ("hora", 1), ("vip", 1), ("knapsack", 1), ("pods", 1 / 4)])
def test_one_step_costs_what_a_step_of_the_log_cost(name, trained):
    """PODS trains on a quarter of the rollouts."""
    log = recorded_log()
    outcome = run(name, log)
    assert outcome.steps == 24 and outcome.sampled == 1536 and outcome.trained_rollouts == trained * 1536
    assert outcome.rollouts_in_band.sum() == outcome.sampled and outcome.prompts_in_band.sum() == 24 * BATCH
    assert len(outcome.curve) == 24 and outcome.curve[-1] == (1536, outcome.gradient_groups)


def test_a_history_knows_nothing_in_the_first_epoch():
    """Knapsack-RL: uniform until prompts are seen again; then rollouts move away from hopeless and solved prompts."""
    log = recorded_log(epochs=4)
    first = log_of(list(zip(log.step, log.prompt, log.correct, log.rollouts, strict=True))[:64])
    outcome = run("knapsack", first)
    drawn = outcome.prompts_in_band
    assert (outcome.rollouts_in_band[drawn > 0] / drawn[drawn > 0]).tolist() == [N] * int((drawn > 0).sum())
    later = run("knapsack", log, allocator_options={"fallback": False})
    per_prompt = later.rollouts_in_band / np.maximum(later.prompts_in_band, 1)
    assert per_prompt[1:4].max() > 2 * N > 2 * per_prompt[0] and per_prompt[4] < N


def test_pilots_and_commits():
    """Everything trained on has a gradient; three pilots are paid for each commit, so the steps are fewer."""
    log = recorded_log(epochs=8)
    outcome = run("pilot_commit", log, p_solve=None)
    assert outcome.trained_groups > 0 and outcome.gradient_groups == outcome.trained_groups
    discarded = sum(outcome.discarded.values())
    assert {"too_hard", "too_easy"} <= set(outcome.discarded)
    assert 0 <= outcome.sampled - outcome.trained_rollouts - discarded <= 4 * BATCH * 4  # the rest is buffered
    assert outcome.sampled >= 64 * 8 * N and outcome.steps < len(log.batches)


def test_refills_are_paid_for():
    outcome = run("dynamic_sampling", recorded_log(), budget=600)
    assert outcome.gradient_groups == outcome.trained_groups and outcome.sampled >= 600
    assert outcome.trained_rollouts + sum(outcome.discarded.values()) == outcome.sampled
    assert outcome.curve[-1][0] == outcome.sampled and all(spent < 600 for spent, _ in outcome.curve[:-1])


def test_nothing_to_train_on_ends_a_run_with_the_reason():
    log = log_of([(step, prompt, 0, 2000) for step in (1, 2) for prompt in range(BATCH)])
    outcome = run("dynamic_sampling", log)
    assert outcome.steps == 0 and "none of" in outcome.stopped and outcome.sampled > 0


def test_the_same_seed_does_the_same():
    log = recorded_log()
    one, same, other = (run("hora", log, seed=seed) for seed in (3, 3, 4))
    assert one.curve == same.curve and one.curve != other.curve


def test_verdicts_come_at_the_recorded_rate():
    log = log_of([(1, 0, 3, 10), (1, 1, 10, 10)])
    outcome = Spending()
    recorded = RecordedRates(log, (1.0, 1.0))
    engine = RecordedEngine(recorded, np.array([0.3, 1.0]), np.random.default_rng(0), outcome)
    groups = [Group("a", Prompt("p0", 0)), Group("b", Prompt("p1", 1))]
    engine.submit([(groups[0], 10_000), (groups[1], 5)])
    waves = dict(engine.finish())
    assert np.mean([rollout.correct for rollout in waves["a"]]) == pytest.approx(0.3, abs=0.02)
    assert [rollout.reward for rollout in waves["b"]] == [1.0] * 5
    groups[1].rollouts += waves["b"]  # as the controller does
    engine.submit([(groups[1], 3)])
    assert [rollout.correct for rollout in dict(engine.finish())["b"]] == [True] * 3
    assert outcome.rollouts_in_band.tolist() == [0, 10_000, 0, 0, 8] and outcome.prompts_in_band.sum() == 2


RECIPES = [name for name in recipes() if name != "prefix_sampling"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("n", [3, 4, 8, 64])
def test_recipes_take_their_settings(name, n):
    method, _ = recipe_method(Method.parse(name, 1), n, 0, texts=False)
    assert isinstance(method.policy(0), method.policy_class)


def test_a_log_says_nothing_about_rollouts_from_prefixes():
    assert recipe_method(Method.parse("prefix_sampling", BATCH), N, 0, texts=True) is None


def test_waves_add_up():
    for n in (3, 4, 8, 32, 64):
        _, options = recipe_method(Method.parse("pilot_commit", BATCH), n, 7, texts=False)
        assert options["n_pilot"] + options["n_commit"] == n and options["seed"] == 7
    assert recipe_method(Method.parse("pilot_commit", BATCH), 64, 0, texts=False)[1]["n_pilot"] == 16
    assert recipe_method(Method.parse("hora", BATCH), 32, 0, texts=False)[1]["G0"] == 8


def test_only_an_estimator_that_reads_texts_is_replaced_and_only_without_texts():
    changed = {
        name for name in RECIPES if "estimator" in recipe_method(Method.parse(name, BATCH), N, 0, texts=False)[1]
    }
    assert changed == {"vip"}
    assert "estimator" not in recipe_method(Method.parse("vip", BATCH), N, 0, texts=True)[1]
