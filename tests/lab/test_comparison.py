from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from verl_ext.lab.comparison import (
    NO_GAIN,
    LabRun,
    MethodCost,
    compare,
    cost_table,
    print_comparison,
    spread,
    step_table,
    waste_table,
)

ACCURACY = "val-core/words/acc/mean@1"


def lab_run(
    accuracies: list[float], rollouts: int, discarded: int = 0, ended: str | None = None, seconds: float = 1800.0
) -> LabRun:
    """A validation in every step."""
    records = {0: {ACCURACY: accuracies[0]}}
    for step, accuracy in enumerate(accuracies[1:], 1):
        records[step] = {
            ACCURACY: accuracy,
            "rollouts/sampled": float(rollouts),
            "rollouts/trained": float(rollouts - discarded),
            "tokens/sampled": 1e6,
            "rollouts/sampled_total": float(rollouts * step),
            "rollouts/trained_total": float((rollouts - discarded) * step),
            "rollouts/discarded_easy_total": float(discarded * step),
            "tokens/sampled_total": 1e6 * step,
            "timing_s/step": seconds,
            "timing_s/gen": 1000.0,
            "groups/trained": 4.0 * step,
            "groups/effective_ratio": 0.5,
            "rollouts/effective_ratio": 0.25,
            "off_policy/delay_mean": 1.0,
        }
    return LabRun("a", records, duration=seconds / 100, ended=ended)


RUNS = {
    "slow": [lab_run([0.1, 0.2, 0.3], 100), lab_run([0.1, 0.3, 0.4], 100)],
    "fast": [lab_run([0.1, 0.4], 100, 25), lab_run([0.1, 0.4], 100, 25, ended="no more data")],
}


def test_costs_are_those_of_the_first_validation_at_the_common_target():
    target, (slow, fast) = compare(RUNS)
    assert target == 0.3
    assert (slow.to_target("rollouts"), fast.to_target("rollouts")) == ([200, 100], [100, 100])
    units = ("step", "tokens", "seconds")
    assert [slow.to_target(unit) for unit in units] == [[2, 1], [2e6, 1e6], [3600, 1800]]
    assert (slow.accuracy(), fast.waste()["discarded: easy"]) == ([0.3, 0.4], [0.25, 0.25])
    assert fast.ended() == ["no more data"]
    assert fast.average("groups/effective_ratio") == [0.5, 0.5] and slow.average("absent") == [None, None]


def test_groups_count_up_to_the_target_or_to_the_end_of_a_run_that_misses_it():
    _, (slow, fast) = compare(RUNS, 0.35)
    assert slow.to_target("step") == [None, 2] and slow.groups_per_1000() == [30, 30]
    assert fast.groups_per_1000() == [20, 20]
    assert MethodCost("stuck", [LabRun("a", {})]).groups_per_1000() == [None]
    assert compare(RUNS)[1][0].groups_per_1000() == [30, 20]  # the target is 0.3, in the second run after step 1


def test_a_run_that_ended_before_it_trained_leaves_the_target_to_the_others():
    """The failed step samples, and logs neither rollouts that were trained on nor a time."""
    failed = {ACCURACY: 0.1, "rollouts/sampled": 8.0, "rollouts/sampled_total": 8.0, "rollouts/trained": 0.0}
    ended = LabRun("b", {0: {ACCURACY: 0.1}, 1: failed}, ended="no prompt is left")
    target, (slow, stuck) = compare({"slow": RUNS["slow"][:1], "stuck": [ended]})
    assert (target, stuck.to_target("rollouts")) == (0.3, [None])
    assert compare({"stuck": [ended]})[0] == 0.1
    assert MethodCost("stuck", [ended], 0.1).to_target("seconds") == [None]
    cost_table(target, [slow, stuck])


def test_a_run_that_learns_nothing_leaves_the_target_to_the_others_and_is_named(tmp_path):
    """Every run reaches the accuracy of its start at no cost, so as a target it would make each cost 0."""
    stuck = replace(lab_run([0.1, 0.05, 0.1], 100), name="stuck_0")
    target, costs = compare({"a": [lab_run([0.1, 0.4], 100)], "stuck": [stuck]})
    assert (target, [cost.to_target("rollouts") for cost in costs]) == (0.4, [[100], [None]])
    console = Console(width=200, record=True, file=io.StringIO())
    print_comparison(cost_table(target, costs), costs, tmp_path, console)
    assert console.export_text().splitlines()[-2] == f"{NO_GAIN}: stuck_0."
    alone, costs = compare({"stuck": [stuck]})
    print_comparison(cost_table(alone, costs), costs, tmp_path, console)
    assert alone == 0.1 and console.export_text().splitlines()[-2] == f"{NO_GAIN}: stuck_0."


def test_lines_of_a_log_that_were_skipped_are_named(tmp_path):
    console = Console(width=200, record=True, file=io.StringIO())
    runs = {"a": [replace(lab_run([0.1, 0.4], 100), name="a_0", skipped_lines=2)]}
    target, costs = compare(runs)
    print_comparison(cost_table(target, costs), costs, tmp_path, console)
    note = "Lines skipped because they are not those of verl's file logger: a_0 2."
    assert console.export_text().splitlines()[-2] == note


def test_a_target_that_a_seed_misses_is_reached_by_none():
    _, (slow, _) = compare(RUNS, 0.35)
    assert slow.to_target("rollouts") == [None, 200]
    assert spread(slow.to_target("rollouts")) == "– (1 of 2)"


def test_means_and_spreads():
    assert spread([1.0, 3.0], ".1f") == "2.0 ± 1.4"
    assert spread([0.5], ".0f", 100, " %") == "50 %"
    assert spread([None, None]) == "–"


def shown(*renderables) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    for each in renderables:
        console.print(each)
    return " ".join(console.export_text().split())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda t, f: cost_table(t, f),
            ("150 ± 71", "1.41", "25.0 ± 7.1", "geometric mean", "rollouts up to the target, or", "30.0%"),
        ),
        (lambda _, f: waste_table(f), ("easy 25%",)),
        (
            lambda _, f: step_table([MethodCost(each.name, each.runs) for each in f]),
            (
                "100 ± 0",
                "1.00",
                "1800 ± 0",
                "25.0 ± 0.0 % 30.0 ± 0.0",
                "18.8 ± 0.0 % 20.0 ± 0.0",
                "rollouts of the whole run.",
            ),
        ),
    ],
)
def test_tables_show_them(make, expected):
    text = shown(make(*compare(RUNS)))
    assert all(cell in text for cell in expected)


def test_a_step_that_takes_twice_as_long_has_a_two_in_its_row():
    runs = {"slow": [lab_run([0.1, 0.4], 100, seconds=200.0)], "fast": [lab_run([0.1, 0.4], 150, seconds=100.0)]}
    _, (slow, fast) = compare(runs)
    assert "fast 150 1.00 100 0.50 1000 25.0 % 13.3" in shown(step_table([slow, fast]))
    assert "slow 100 1.00 200 2.00 1000 25.0 % 20.0" in shown(step_table([fast, slow]))


def test_a_step_is_compared_seed_by_seed():
    """Arithmetic means, 550 and 500 seconds, would call the method faster."""
    times = {"reference": (100.0, 1000.0), "method": (300.0, 700.0)}
    runs = {name: [lab_run([0.1, 0.4], 100, seconds=each) for each in seconds] for name, seconds in times.items()}
    assert "method 100 ± 0 1.00 ± 0.00 500 ± 283 1.45" in shown(step_table(compare(runs)[1]))


def test_the_accuracy_of_a_run_that_gets_worse_is_its_best():
    _, (worse,) = compare({"worse": [lab_run([0.1, 0.6, 0.4], 100), lab_run([0.1, 0.2, 0.5], 100)]})
    assert worse.accuracy() == [0.6, 0.5]
    assert "55.0 ± 7.1 %" in shown(cost_table(0.2, [worse]))


def test_waste_has_the_reasons_of_every_seed_and_shows_those_of_half_a_percent_or_more():
    one, other = lab_run([0.1, 0.4], 1000, 8), lab_run([0.1, 0.4], 1000)
    other.records[1]["rollouts/buffered"] = 40.0
    _, (method,) = compare({"method": [one, other]})
    assert method.waste() == {"discarded: easy": [0.008, 0.0], "buffered": [0.0, 0.04]}
    assert "1.00 ± 0.00 buffered 2%" in shown(waste_table([method]))


def test_below_the_tables_are_each_reason_for_an_early_end_once_and_the_sums_over_all_runs(tmp_path):
    console = Console(width=160, record=True, file=io.StringIO())
    runs = {"slow": RUNS["slow"], "fast": [RUNS["fast"][1]] * 2, "fast_0": RUNS["slow"][:1]}
    runs = {name: [replace(run, name=f"{name}_{seed}") for seed, run in enumerate(seeds, 9)]
            for name, seeds in runs.items()}  # fmt: skip
    target, costs = compare(runs)
    stuck = MethodCost("stuck", [LabRun("b", {}, ended="no prompt")])
    print_comparison(cost_table(target, costs[:2]), [*costs, stuck], tmp_path, console)
    lines = console.export_text().splitlines()
    logs = " ".join(f"{tmp_path}/{name}.jsonl" for name in ("slow_{9,10}", "fast_{9,10}", "fast_0_9"))
    expected = ["fast ended early: no more data", "stuck ended early: no prompt"]
    assert lines[-3:] == [*expected, f"800 rollouts in 90 s. Plots: verl-ext report {logs}"]
    assert sum("ended early" in line for line in lines) == 2
