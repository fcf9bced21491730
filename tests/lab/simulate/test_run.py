from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from verl_ext.lab.simulate import Method, World, simulate
from verl_ext.lab.simulate.engine_speed import EngineSpeed
from verl_ext.lab.simulate.run import epochs

WORLD = World("1:1:1", 120, steps=12)
METHODS = [
    "grpo n=8",
    "dynamic_sampling n=8",
    "greso n=8",
    "mopps n=8 s=3",
    "pods n=12 m=6",
    "reinforce_ada n=4 M=6",
    "speed_rl n_init=4 n_cont=4",
    "pilot_commit n_pilot=4 n_commit=8",
    "hora G=8 G0=2",
    "vip n=8",
    "knapsack n=8",
    "recall n=8",
    "prefix_sampling",
    "grpo n=8 _target_=support.over_provisioning.OverProvisioning",
]
OVER = METHODS[0], METHODS[-1]


def test_prompts_have_a_data_source_as_under_verl():
    assert next(epochs(3, seed=0)).metadata["data_source"]


def test_a_mode_that_the_method_cannot_work_in_is_refused_as_in_a_training():
    said = "^rollout_policy.max_delay=1 is not valid: with trainer.v1.trainer_mode=separate_async .* use at least 2"
    with pytest.raises(ValueError, match=said):
        simulate(Method.parse("pilot_commit max_delay=1", 8), replace(WORLD, mode="separate_async"), seed=0)


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_every_recipe_runs_and_its_books_balance(text, mode):
    records = simulate(Method.parse(text, 8), replace(WORLD, mode=mode), seed=1).records
    assert list(records) == list(range(1, 13))
    last = records[12]
    gone = last["rollouts/trained_total"] + last["rollouts/discarded_total"] + last["rollouts/failed_total"]
    assert last["rollouts/sampled_total"] == gone + last["rollouts/buffered"] > 0
    for step in range(1, 13):
        record = records[step]
        assert record["timing_s/step"] > record["timing_s/gen"] >= 0
        assert (record["timing_s/gen"] > 0) == (record["rollouts/sampled"] > 0)  # a batch may be waiting already


def test_a_run_is_its_seed():
    one, same, other = (simulate(Method.parse(METHODS[2], 8), WORLD, seed).records for seed in (1, 1, 2))
    for record in (*one.values(), *same.values()):
        record.pop("allocation/seconds", None)
    assert one == same
    assert one[12]["tokens/sampled_total"] != other[12]["tokens/sampled_total"]


def test_the_data_is_the_same_for_every_seed():
    """All prompts in each step, 400 rollouts of each: the mean reward is the mean of the rates."""
    world = replace(WORLD, prompts=8, steps=1)
    means = [simulate(Method.parse("grpo n=400", 8), world, seed).records[1]["rollouts/reward_mean"] for seed in (0, 1)]
    assert means[0] == pytest.approx(means[1], abs=0.03)


def test_every_epoch_has_all_rows_in_an_order_of_its_own():
    drawn = [prompt.row for prompt in islice(epochs(20, 1), 60)]
    orders = [drawn[begin : begin + 20] for begin in (0, 20, 40)]
    assert [sorted(order) for order in orders] == [list(range(20))] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [prompt.row for prompt in islice(epochs(20, 1, seen=27), 33)] == drawn[27:]


def test_success_rates_stay_as_they_are():
    """Groups of 8 from Beta(1, 1) have different rewards with probability 1 - 2/9, at the end as at the start."""
    records = simulate(Method.parse("grpo n=8", 32), replace(WORLD, prompts=2_000, steps=200), 0).records
    first, last = (
        [records[step]["groups/effective_ratio"] for step in steps] for steps in (range(1, 101), range(101, 201))
    )
    assert np.mean(first) == pytest.approx(7 / 9, abs=0.02) and np.mean(last) == pytest.approx(7 / 9, abs=0.02)


def test_a_run_that_cannot_go_on_says_why():
    simulated = simulate(
        Method.parse("dynamic_sampling n=8 max_rounds=1", 8), replace(WORLD, population="1:0.001:10"), 0
    )
    assert "had rollouts with different outcomes" in simulated.ended and len(simulated.records) < 12


def test_a_policy_starts_with_the_number_of_steps_and_a_text_for_each_row(monkeypatch):
    told = []
    monkeypatch.setattr(
        "verl_ext.policy.RolloutPolicy.start_run", lambda self, steps, texts: told.append((steps, len(texts)))
    )
    simulate(Method.parse("grpo n=8", 8), WORLD, 0)
    assert told == [(12, 120)]


def test_predictions_from_texts_are_as_good_as_the_embeddings():
    def correlation(of_embeddings: float) -> float:
        world = replace(WORLD, steps=6, embedding_correlation=of_embeddings)
        return simulate(Method.parse("vip n=8", 8), world, 0).records[6]["vip/prediction_correlation"]

    assert correlation(0.0) < 0.4 < 0.6 < correlation(1.0)


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match="prompts=120: a training step of grpo needs 128"):
        simulate(Method.parse("grpo", 128), WORLD, 0)


def generation(text: str, **world: object) -> float:
    """Mean seconds, the first and the last step left out: they lack pilots of before and of after."""
    records = simulate(Method.parse(text, 8), replace(WORLD, **world), 0).records
    return sum(records[step]["timing_s/gen"] for step in range(2, 12)) / 10


def test_binding_saves_a_wave_and_a_refill_costs_one():
    pilot_commit = "pilot_commit n_pilot=4 n_commit=8"
    assert generation(pilot_commit) < 0.8 * generation(f"{pilot_commit} bind=false")
    assert generation("dynamic_sampling n=8 s=1") > 1.5 * generation("grpo n=8")


def test_smaller_shards_wait_less_where_places_are_scarce():
    scarce = EngineSpeed(engines=1, slots=8)
    assert generation("hora G=8 G0=2 shards=4", speed=scarce) < generation("hora G=8 G0=2 shards=1", speed=scarce)


def test_an_update_that_interrupts_does_not_wait_for_pilots():
    text, scarce = "pilot_commit n_pilot=4 n_commit=8", EngineSpeed(engines=1, slots=16)
    assert generation(text, mode="colocate_async", speed=scarce) < generation(text, speed=scarce)


def test_engines_of_their_own_generate_during_an_update_and_refills_have_the_new_version():
    world = replace(WORLD, steps=5, mode="separate_async", speed=EngineSpeed(update_seconds=1000))
    records = simulate(Method.parse("grpo n=8", 8), world, 0).records
    assert [records[step]["timing_s/gen"] == 0 for step in records] == [False, True, True, True, True]
    assert [records[step]["off_policy/delay_mean"] for step in records] == [0, 1, 1, 1, 1]
    records = simulate(Method.parse("dynamic_sampling n=8 s=1", 8), world, 0).records
    assert all(0 < records[step]["off_policy/delay_mean"] < 1 for step in range(2, 6))


@pytest.mark.parametrize(("argument", "value"), [("mode", "async"), ("steps", 0), ("embedding_correlation", 2)])
def test_bad_worlds_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        World(**{argument: value})


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_cancelling_the_slowest_groups_saves_time_for_tokens(mode):
    patient, hasty = (simulate(Method.parse(text, 8), replace(WORLD, mode=mode), 0).records for text in OVER)
    seconds = [sum(records[step]["timing_s/gen"] for step in range(2, 12)) for records in (patient, hasty)]
    assert seconds[1] < 0.9 * seconds[0]
    assert hasty[12]["rollouts/sampled_total"] == 1.5 * patient[12]["rollouts/sampled_total"]
    assert hasty[12]["rollouts/discarded_cancelled_total"] > 0 and "tokens/cancelled_total" not in patient[12]
    # A cancelled rollout would have been among the longest of all.
    mean = patient[12]["tokens/sampled_total"] / patient[12]["rollouts/sampled_total"]
    assert hasty[12]["tokens/cancelled_total"] > mean * hasty[12]["rollouts/discarded_cancelled_total"]
