"""The sentence at the top of a report."""

from __future__ import annotations

import pytest
from support.runs import write_run

from verl_ext.lab.report.finding import finding
from verl_ext.lab.report.ratio import paired
from verl_ext.lab.report.runs import read_run
from verl_ext.lab.report.summary import summarize


def sentence(folder, target=None, **runs):
    """Of runs given as their accuracies and rollouts a step."""
    paths = [write_run(folder / f"{name}.jsonl", accuracies, rollouts) for name, (accuracies, rollouts) in runs.items()]
    return finding(summarize([read_run([path]) for path in paths], target))


def test_several_seeds_give_an_interval(tmp_path):
    costs = {1: (400, 200), 2: (500, 210), 3: (450, 230)}
    runs = {f"grpo_{seed}": ([0.5, 0.7], grpo) for seed, (grpo, _) in costs.items()}
    runs |= {f"hora_{seed}": ([0.5, 0.7], hora) for seed, (_, hora) in reversed(costs.items())}
    runs |= {f"vip_{seed}": ([0.5, 0.7], 440) for seed in costs}
    wide = paired(*zip(*costs.values(), strict=True), chosen_among=2)
    assert sentence(tmp_path, **runs) == (
        f"To reach an accuracy of 70.0%, hora, the best of 2 methods, needed {wide.mean:.2f} times fewer rollouts than "
        f"grpo (3 seeds; 95 % interval {wide.low:.2f} to {wide.high:.2f} times fewer, widened for the choice among 2)."
    )
    runs = {name: run for name, run in runs.items() if not name.startswith("vip")}
    ratio = paired(*zip(*costs.values(), strict=True))
    assert wide.low < ratio.low < ratio.high < wide.high
    assert sentence(tmp_path, **runs) == (
        f"To reach an accuracy of 70.0%, hora needed {ratio.mean:.2f} times fewer rollouts than grpo "
        f"(3 seeds; 95 % interval {ratio.low:.2f} to {ratio.high:.2f} times fewer)."
    )


def test_methods_with_other_seeds_are_paired_over_the_seeds_in_common(tmp_path):
    runs = {f"grpo_{seed}": ([0.5, 0.7], rollouts) for seed, rollouts in ((0, 400), (1, 500), (2, 450), (3, 9000))}
    runs |= {f"vip_{seed}": ([0.5, 0.7], rollouts) for seed, rollouts in ((1, 440), (2, 430), (0, 460), (4, 1))}
    ratio = paired([400, 500, 450], [460, 440, 430])
    said = sentence(tmp_path, **runs)
    assert f"vip needed {ratio.mean:.2f} times fewer rollouts than grpo (3 seeds; 95 % interval {ratio.low:.2f}" in said
    summary = summarize([read_run([path]) for path in sorted(tmp_path.glob("*.jsonl"))])
    assert summary["methods"][1]["times_fewer_rollouts"] == pytest.approx(ratio.mean)
    missed = sentence(tmp_path, 0.7, **runs, vip_6=([0.5, 0.6], 100))
    assert (
        missed
        == "No method has a ratio to grpo: vip_6 never reaches 70.0%. Accuracies at the end: grpo 70.0%, vip 68.0%."
    )
    del runs["vip_0"], runs["vip_1"]
    assert "vip needed 1.05 times fewer rollouts than grpo; with fewer than two seeds in common" in sentence(
        tmp_path, **runs
    )
    del runs["vip_2"]
    runs["vip_5"] = ([0.5, 0.7], 440)
    assert sentence(tmp_path, **runs).startswith(
        "No method has a ratio to grpo: no other method has a seed in common with it."
    )


def test_two_runs_of_a_method_with_one_seed_leave_no_ratio(tmp_path):
    """Which of them makes the pair is unknown."""
    runs = {f"grpo_{seed}": ([0.5, 0.7], 100) for seed in (1, 2)}
    runs |= {name: ([0.5, 0.7], 50) for name in ("hora_1", "hora_seed1", "hora_2")}
    assert sentence(tmp_path, **runs).startswith("No method has a ratio to grpo: hora has several runs of seed 1.")
    summary = summarize([read_run([path]) for path in sorted(tmp_path.glob("*.jsonl"))])
    assert summary["methods"][1]["times_fewer_rollouts"] is None and summary["methods"][1]["paired_seeds"] == 0
    assert "Several runs of a method have one seed, so the method has no ratio: hora 1." in summary["notes"]
    swapped = dict(reversed(runs.items()))
    assert sentence(tmp_path, **swapped).startswith("No method has a ratio to hora: hora has several runs of seed 1.")
    runs["hora_1"] = ([0.5, 0.6], 50)
    missed = "No method has a ratio to grpo: hora_1 never reaches 70.0%; hora has several runs of seed 1."
    assert sentence(tmp_path, 0.7, **runs).startswith(missed)


def test_a_reference_that_misses_the_target_with_a_seed_of_its_own_leaves_no_ratio(tmp_path):
    runs = {f"{name}_{seed}": ([0.5, 0.7], 100) for name in ("grpo", "hora") for seed in (1, 2)}
    runs["grpo_3"] = ([0.5, 0.6], 100)
    assert sentence(tmp_path, 0.7, **runs).startswith("No method has a ratio to grpo: grpo_3 never reaches 70.0%.")


def test_lead_table_and_choice_have_one_ratio(tmp_path):
    """Each seed has its cost; arithmetic means would choose vip, and would say that it needs fewer rollouts."""
    costs = {"grpo": (100, 1000), "vip": (500, 502), "hora": (100, 1200)}
    runs = {f"{name}_{seed}": ([0.5, 0.7], each[seed]) for name, each in costs.items() for seed in (0, 1)}
    said = sentence(tmp_path, **runs)
    assert "hora, the best of 2 methods, needed 1.10 times as many rollouts as grpo" in said
    summary = summarize([read_run([tmp_path / f"{name}.jsonl"]) for name in runs])
    ratios = [method["times_fewer_rollouts"] for method in summary["methods"]]
    assert ratios == pytest.approx([1, (1 / 5 * 1000 / 502) ** 0.5, (1000 / 1200) ** 0.5])


def test_methods_validated_at_different_steps_have_no_interval(tmp_path):
    runs = {f"grpo_{seed}": ([0.5, None, 0.7], 100 + seed) for seed in (1, 2)}
    runs |= {f"vip_{seed}": ([0.5, 0.7, 0.7], 102) for seed in (1, 2)}
    assert sentence(tmp_path, **runs) == (
        "To reach an accuracy of 70.0%, vip needed 1.99 times fewer rollouts than grpo; the two were validated at "
        "different steps, so no interval is computed."
    )


def test_a_seed_that_begins_at_the_target_leaves_no_ratio(tmp_path):
    runs = {"grpo_1": ([0.5, 0.7], 100), "grpo_2": ([0.5, 0.7], 200)}
    runs |= {"vip_1": ([0.7, 0.7], 100), "vip_2": ([0.5, 0.7], 100)}
    said = sentence(tmp_path, **runs)
    assert said.startswith("No method has a ratio to grpo: vip_1 has its first validation at or above 70.0%.")


def test_an_interval_around_equal_costs_has_the_direction_of_the_sentence(tmp_path):
    runs = {"grpo_1": ([0.5, 0.7], 1000), "grpo_2": ([0.5, 0.7], 1001)}
    runs |= {"vip_1": ([0.5, 0.7], 1000), "vip_2": ([0.5, 0.7], 1000)}
    ratio = paired([1000, 1001], [1000, 1000])
    assert f"{1 / ratio.high:.2f} to {1 / ratio.low:.2f}" == "0.99 to 1.01"
    assert sentence(tmp_path, **runs).endswith(
        "vip needed as many rollouts as grpo (2 seeds; 95 % interval 0.99 to 1.01 times as many); chance "
        "alone can explain this."
    )


def test_an_interval_around_1_is_said_to_be_chance(tmp_path):
    runs = {"grpo_1": ([0.5, 0.7], 100), "grpo_2": ([0.5, 0.7], 200)}
    runs |= {"vip_1": ([0.5, 0.7], 200), "vip_2": ([0.5, 0.7], 110)}
    said = sentence(tmp_path, **runs)
    ratio = paired([100, 200], [200, 110])
    assert said.endswith(
        "vip needed 1.05 times as many rollouts as grpo "
        f"(2 seeds; 95 % interval {1 / ratio.high:.2f} to {1 / ratio.low:.2f} times as many); "
        "chance alone can explain this."
    )


def test_a_method_that_surely_needs_more_is_not_said_to_be_chance(tmp_path):
    runs = {f"grpo_{seed}": ([0.5, 0.7], 100) for seed in (1, 2, 3)}
    runs |= {f"vip_{seed}": ([0.5, 0.7], 200 + seed) for seed in (1, 2, 3)}
    said = sentence(tmp_path, **runs)
    assert said.endswith(
        "vip needed 2.02 times as many rollouts as grpo (3 seeds; 95 % interval 2.00 to 2.04 times as many)."
    )


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        (50, "2.00 times fewer rollouts than"),
        (300, "3.00 times as many rollouts as"),
        (100, "as many rollouts as"),
        (100.4, "as many rollouts as"),
        (99.6, "as many rollouts as"),
    ],
)
def test_seeds_with_the_same_ratio_have_no_interval(tmp_path, rollouts, said):
    """Each seed of a method may reach the target at the same validation, since a run has few."""
    runs = {f"grpo_{seed}": ([0.5, 0.7], 100 * seed) for seed in (1, 2, 3)}
    runs |= {f"hora_{seed}": ([0.5, 0.7], rollouts * seed) for seed in (1, 2, 3)}
    runs |= {f"vip_{seed}": ([0.5, 0.7], 1000 * seed) for seed in (1, 2, 3)}
    assert sentence(tmp_path, **runs) == (
        f"To reach an accuracy of 70.0%, hora, the best of 2 methods, needed {said} grpo; "
        "all 3 seeds have this ratio, so no interval can be computed."
    )


def test_a_method_that_misses_the_target_is_one_of_those_that_the_best_was_chosen_among(tmp_path):
    runs = {f"grpo_{seed}": ([0.5, 0.7], 100 + seed) for seed in (1, 2)}
    runs |= {f"hora_{seed}": ([0.5, 0.7], 50) for seed in (1, 2)} | {f"vip_{seed}": ([0.5, 0.6], 10) for seed in (1, 2)}
    said = sentence(tmp_path, 0.7, **runs)
    assert "hora, the best of 2 methods, needed 2.03 times fewer" in said and "the choice among 2)" in said


def test_one_run_of_each_is_said_to_be_no_evidence(tmp_path):
    said = sentence(tmp_path, grpo=([0.5, 0.6, 0.7], 100), hora=([0.5, 0.7], 100))
    assert said == (
        "To reach an accuracy of 70.0%, hora needed 2.00 times fewer rollouts than grpo; with fewer than two "
        "seeds in common, nobody can tell this from chance."
    )


def test_a_run_without_a_validation_is_said_to_have_none(tmp_path):
    said = sentence(tmp_path, grpo_1=([0.5, 0.7], 100), grpo_2=([None, None], 100))
    assert said == "A run of grpo has no validation accuracy at its end, and there is no other method."


def test_runs_that_cannot_be_compared(tmp_path):
    assert sentence(tmp_path, grpo=([0.5, 0.6], 1000)) == (
        "grpo ends at an accuracy of 60.0% after 1,000 rollouts; no other method is here to compare."
    )
    missed = sentence(tmp_path, 0.9, grpo=([0.5, 0.6], 100), hora=([0.5, 0.95], 100))
    assert missed == (
        "No method has a ratio to grpo: grpo never reaches 90.0%. Accuracies at the end: grpo 60.0%, hora 95.0%."
    )
    for best, shown in ((0.55992, "55.992"), (0.55991875, "55.9918")):
        near = sentence(tmp_path, 0.56, grpo=([0.5, 0.56], 100), hora=([0.5, best], 100))
        assert near.startswith(f"No method has a ratio to grpo: hora never reaches 56.0% (its best is {shown}%). ")
    unseen = sentence(tmp_path, grpo=([None, None], 100), hora=([0.5, 0.7], 100))
    assert unseen == (
        "No method has a ratio to grpo: grpo has no validation. Accuracies at the end: grpo unknown, hora 70.0%."
    )
    uncounted = sentence(tmp_path, grpo=([0.5, 0.7], float("nan")), hora=([0.5, 0.7], 100))
    assert uncounted.startswith("No method has a ratio to grpo: grpo counts no rollouts.")
    assert sentence(tmp_path, a=([None, None], 1), b=([None, None], 1)).startswith("No run has a validation accuracy")
