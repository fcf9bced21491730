"""The numbers, from fabricated logs."""

import json

import pytest
from support.runs import training_steps, write_log, write_run

from verl_ext.lab.report.accuracy import NO_GAIN, accuracy_against, points
from verl_ext.lab.report.ratio import paired
from verl_ext.lab.report.runs import Run, read_run
from verl_ext.lab.report.summary import (
    deciding_share,
    destinations,
    groups_per_1000,
    paired_costs,
    summarize,
    validated_alike,
)
from verl_ext.lab.report.tables import tables


def summary_of(paths, target=None):
    summary = summarize([read_run([path]) for path in paths], target)
    json.dumps(summary, allow_nan=False)
    return summary


@pytest.fixture
def two(tmp_path):
    slow = write_run(tmp_path / "grpo.jsonl", [0.5, None, 0.6, None, 0.7, 0.65], 100)
    return [slow, write_run(tmp_path / "pilot_commit.jsonl", [0.5, 0.69, 0.71, 0.9], 150)]


def test_what_two_runs_paid_for_the_target(two):
    summary = summary_of(two)
    assert summary["target_accuracy"] == 0.7
    first, second = summary["runs"]
    assert (first["name"], first["steps"], first["rollouts"], first["tokens"]) == ("grpo", 5, 500, 5000)
    assert (first["first_accuracy"], first["final_accuracy"], first["best_accuracy"]) == (0.5, 0.65, 0.7)
    assert first["validations"][0] == {"step": 0, "rollouts": 0, "tokens": 0, "seconds": 0, "accuracy": 0.5}
    assert first["to_target"] == {"step": 4, "rollouts": 400, "tokens": 4000, "seconds": 8, "accuracy": 0.7}
    # 0.7 lies between 0.69 and 0.71: the first validation at or above the target counts, without interpolation.
    assert (second["final_accuracy"], second["rollouts_to_target"], second["seconds"]) == (0.9, 300, 6)
    assert (first["times_fewer_rollouts"], second["times_fewer_rollouts"]) == (1, pytest.approx(400 / 300))
    assert summary["notes"] == []  # every 200 and every 150 rollouts


def test_the_steps_between_validations_are_compared(tmp_path):
    """The last step is validated whatever trainer.test_freq, and a single validation has none."""
    often, seldom, once = [0.5, 0.6, 0.7, 0.7], [0.5, None, 0.6, None, 0.7, 0.7], [None, 0.5]
    runs = {"a_1": often, "a_2": seldom, "b_1": seldom, "b_2": seldom, "c": once}
    paths = {name: write_run(tmp_path / f"{name}.jsonl", values, 10) for name, values in runs.items()}
    summary = summary_of(paths.values())
    assert [run["validated_every"] for run in summary["runs"]] == [1, 2, 2, 2, None]
    assert any(note.endswith("earlier: a_1 every 1; a_2 every 2; b every 2.") for note in summary["notes"])
    alike = summary_of([paths[name] for name in ("b_1", "b_2", "c")])
    assert not any("different steps, and" in note for note in alike["notes"])


def test_runs_validated_every_500_rollouts_are_alike_whatever_their_rollouts_a_step(tmp_path):
    """As `verl-ext learn` validates: with the step that passes the next 500 rollouts."""
    values = {
        "grpo": (64, [0.5, *[None] * 7, 0.6, *[None] * 7, 0.7, 0.7]),  # verl validates at the last step, too
        "hora": (280, [0.5, None, 0.7, None, 0.7]),
        "often": (64, [0.5, None, None, 0.7]),
    }
    runs = {f"{name}_{seed}": (each, size + seed) for name, (size, each) in values.items() for seed in (0, 1)}
    paths = {name: write_run(tmp_path / f"{name}.jsonl", *run) for name, run in runs.items()}
    summary = summary_of([path for name, path in paths.items() if not name.startswith("often")])
    assert [run["rollouts_between_validations"] for run in summary["runs"]] == [512, 520, 560, 562]
    ratio = paired((1024, 1040), (560, 562))
    assert summary["methods"][1]["times_fewer_rollouts_interval"] == [ratio.low, ratio.high]
    assert not any("different steps" in note for note in summary["notes"])
    assert summary_of(paths.values())["methods"][2]["times_fewer_rollouts_interval"] is None


def test_a_target_of_ones_own(two):
    summary = summary_of(two, 0.8)
    assert summary["target_accuracy"] == 0.8 and "every run" not in summary["rule"]
    first, second = summary["runs"]
    assert (first["rollouts_to_target"], second["rollouts_to_target"]) == (None, 450)
    assert (first["times_fewer_rollouts"], second["times_fewer_rollouts"]) == (None, None)


def test_two_single_runs_are_a_pair_whatever_their_seeds_and_several_are_paired_by_seed():
    costs = {"a_1": 100, "a_2": 200, "b_2": 50, "b_3": 70, "c_3": None}
    rows = {name: {"rollouts_to_target": cost} for name, cost in costs.items()}
    assert paired_costs(rows, ["a_1"], ["b_2"]) == ([100], [50])
    assert paired_costs(rows, ["a_1", "a_2"], ["b_3", "b_2"]) == ([200], [50])
    assert paired_costs(rows, ["a_1", "a_2"], ["b_3"]) is None
    assert paired_costs(rows, ["a_1"], ["c_3"]) is None


def test_the_parts_that_rollouts_went_to_are_in_one_order():
    reasons = ["surplus", "empty", "stale", "all_wrong", "no_spread", "solved", "too_hard"]
    logged = {f"rollouts/discarded_{reason}_total": 1.0 for reason in reasons}
    run = Run(
        "a", {1: logged | {"rollouts/buffered": 1.0, "rollouts/trained_total": 8.0, "rollouts/failed_total": 2.0}}
    )
    assert list(destinations(run)) == [
        "trained",
        *(f"discarded: {each}" for each in sorted(reasons)),
        "failed",
        "buffered",
    ]


def test_a_run_first_validated_after_a_step_has_no_accuracy_at_its_start(tmp_path):
    late = write_run(tmp_path / "late.jsonl", [None, 0.3, 0.5], 10)
    summary = summary_of([late, write_run(tmp_path / "a.jsonl", [0.1, 0.5], 10)])
    assert [run["first_accuracy"] for run in summary["runs"]] == [None, 0.1]
    assert [row[-2:] for row in tables(summary)[0].rows] == [("–", "50.0%"), ("10.0%", "50.0%")]


def test_runs_of_a_single_validation(tmp_path):
    paths = [write_run(tmp_path / f"{name}.jsonl", [value], 10) for name, value in (("a", 0.3), ("b", 0.4))]
    summary = summary_of(paths)
    assert summary["target_accuracy"] == 0.3
    assert [run["rollouts_to_target"] for run in summary["runs"]] == [0, 0]
    assert [run["times_fewer_rollouts"] for run in summary["runs"]] == [None, None]  # 0 times anything
    assert summary["notes"] == []


def test_a_run_that_has_not_trained_a_step_yet_is_left_out(tmp_path):
    runs = {"grpo_1": [0.3, 0.5, 0.7], "hora_1": [0.3, 0.7], "hora_2": [0.3, 0.8], "hora_3": [0.2], "vip": [0.1]}
    summary = summary_of([write_run(tmp_path / f"{name}.jsonl", values, 10) for name, values in runs.items()])
    assert summary["target_accuracy"] == 0.7
    assert [run["name"] for run in summary["runs"]] == ["grpo_1", "hora_1", "hora_2"]
    assert [method["rollouts_to_target"] for method in summary["methods"]] == [20, 10]
    assert summary["notes"] == [
        "Runs left out, since they have not trained a step yet: hora_3; vip.",
        "Taken as seeds: hora 1, 2.",
    ]


def test_a_run_that_learns_nothing_leaves_the_target_to_the_others(tmp_path):
    """A run without a validation before its first step may have been better than at its start."""
    runs = {"grpo": [0.3, 0.5, 0.7], "stuck": [0.3, 0.2, 0.3]}
    paths = [write_run(tmp_path / f"{name}.jsonl", values, 10) for name, values in runs.items()]
    summary = summary_of(paths)
    assert summary["target_accuracy"] == 0.7 and f"{NO_GAIN}: stuck." in summary["notes"]
    late = summary_of([*paths, write_run(tmp_path / "late.jsonl", [None, 0.6, 0.5], 10)])
    assert late["target_accuracy"] == 0.6 and f"{NO_GAIN}: stuck." in late["notes"]


def validated(path, steps, rollouts=100):
    """A log of runs with these accuracies by data source, a validation per step."""
    records = {
        step: {f"val-core/{source}/acc/mean@4": value for source, value in accuracies.items()}
        | {"rollouts/sampled_total": float(rollouts * step)}
        for step, accuracies in enumerate(steps)
    }
    return write_log(path, records)


def test_a_validation_that_lacks_a_data_source_is_skipped(tmp_path):
    """The easy source alone, at step 1, would reach the target ten times earlier."""
    steps = [{"easy": 0.6, "hard": 0.2}, {"easy": 0.9, "hard": float("nan")}, *[{"easy": 0.7, "hard": 0.3}] * 9]
    path = validated(tmp_path / "a.jsonl", [*steps, {"easy": 0.9, "hard": 0.7}])
    run = read_run([path])
    assert [point.step for point in points(run)] == [0, *range(2, 12)]
    assert accuracy_against(run, "step")[1].max() == pytest.approx(0.8)
    summary = summary_of([path], 0.8)
    assert summary["runs"][0]["rollouts_to_target"] == 1100
    assert "Validations skipped because they lack a data source of their run: a 1." in summary["notes"]


def test_runs_are_compared_on_the_data_sources_they_have_in_common(tmp_path):
    both = validated(tmp_path / "a.jsonl", [{"easy": 0.5, "hard": 0.1}, {"easy": 0.7, "hard": 0.2}])
    easy = validated(tmp_path / "b.jsonl", [{"easy": 0.5}, {"easy": 0.7}])
    blind = write_run(tmp_path / "blind.jsonl", [None, None], 10)
    summary = summary_of([both, easy, blind])
    assert summary["target_accuracy"] == 0.7
    assert [run["best_accuracy"] for run in summary["runs"]] == [0.7, 0.7, None]
    note = "Data sources left out of the accuracy, since not every run was validated on them: hard."
    assert note in summary["notes"]
    assert not any("left out" in note for note in summary_of([both])["notes"])


def test_runs_without_a_common_data_source_are_refused(tmp_path):
    paths = [validated(tmp_path / f"{name}.jsonl", [{f"of_{name}": 0.5}]) for name in "ab"]
    with pytest.raises(ValueError, match=r"in common \(a: of_a; b: of_b\)"):
        summary_of(paths)


def test_seeds_give_mean_and_range(tmp_path):
    paths = [write_run(tmp_path / f"grpo_{seed}.jsonl", values, 100)
             for seed, values in ((1, [0.5, 0.6, 0.8]), (2, [0.4, 0.8, 0.9]), (3, [0.5] * 6 + [0.8]))]  # fmt: skip
    paths.append(write_run(tmp_path / "hora_1.jsonl", [0.5, 0.8], 75))
    grpo, hora = summary_of(paths)["methods"]
    assert (grpo["name"], grpo["runs"], hora["name"]) == ("grpo", ["grpo_1", "grpo_2", "grpo_3"], "hora_1")
    assert (grpo["rollouts_to_target"], grpo["rollouts_to_target_range"]) == (300, [100, 600])
    assert grpo["final_accuracy"] == pytest.approx(2.5 / 3) and grpo["final_accuracy_range"] == [0.8, 0.9]
    assert hora["times_fewer_rollouts"] == pytest.approx(200 / 75)  # of the common seed, 1


def test_each_method_has_its_own_interval_over_the_seeds_in_common(tmp_path):
    costs = {"grpo": (400, 500, 450, 300), "hora": (200, 210, 230), "vip": (200, 250, 225)}
    runs = {f"{name}_{seed}": cost for name, each in costs.items() for seed, cost in enumerate(each)} | {"one": 100}
    summary = summary_of([write_run(tmp_path / f"{name}.jsonl", [0.5, 0.7], cost) for name, cost in runs.items()])
    ratio = paired(costs["grpo"][:3], costs["hora"])
    assert [method["paired_seeds"] for method in summary["methods"]] == [4, 3, 3, 0]
    intervals = [None, [ratio.low, ratio.high], None, None]  # all seeds of vip have the same ratio
    assert [method["times_fewer_rollouts_interval"] for method in summary["methods"]] == intervals
    (table,) = (table for table in tables(summary) if table.title.startswith("Over seeds"))
    shown = {row[0]: row[table.header.index("95 % interval")] for row in table.rows}
    assert shown == {"grpo": "–", "hora": f"{ratio.low:.2f} to {ratio.high:.2f}", "vip": "–", "one": "–"}
    assert table.caption.endswith(
        "Each interval is for one method alone, and is not widened for the choice of the best."
    )


def test_there_is_no_interval_without_costs_or_between_different_validations(tmp_path):
    runs = {f"grpo_{seed}": ([0.5, None, 0.7], 100 + seed) for seed in (1, 2)}
    runs |= {f"often_{seed}": ([0.5, 0.7, 0.7], 100) for seed in (1, 2)}
    runs |= {"begun_1": ([0.7, None, 0.7], 100), "begun_2": ([0.5, None, 0.7], 100)}
    paths = [write_run(tmp_path / f"{name}.jsonl", *values) for name, values in runs.items()]
    methods = summary_of(paths)["methods"]
    assert [method["times_fewer_rollouts_interval"] for method in methods] == [None] * 3
    assert [method["paired_seeds"] for method in methods] == [2, 2, 2]


def test_a_method_of_which_a_seed_fails_has_no_rollouts_to_target(tmp_path):
    seeds = {1: [0.1, 0.9, 0.8], 2: [0.2, 0.5, 0.4]}
    summary = summary_of([write_run(tmp_path / f"grpo_{seed}.jsonl", each, 100) for seed, each in seeds.items()], 0.8)
    (grpo,) = summary["methods"]
    assert (grpo["reached_target"], grpo["rollouts_to_target"]) == (1, None)
    table = tables(summary)[1]
    assert dict(zip(table.header, table.rows[0], strict=True)) == {
        "method": "grpo", "seeds": "2", "reached": "1", "rollouts to 80.0%": "–", "times fewer rollouts": "–",
        "95 % interval": "–", "start": "15.0% (10.0% to 20.0%)", "final": "60.0% (40.0% to 80.0%)",
        "best": "70.0% (50.0% to 90.0%)",
    }  # fmt: skip


def test_validations_with_different_numbers_of_samples_are_in_the_notes(tmp_path):
    paths = [
        write_log(
            tmp_path / f"{name}.jsonl",
            {step: {f"val-core/{source}/{kind}/mean@{n}": 0.5 for source, n in samples.items()} for step in range(2)},
        )
        for name, kind, samples in (
            ("grpo_1", "acc", {"x": 1, "y": 1}),
            ("grpo_2", "acc", {"x": 1, "y": 1}),
            ("hora", "reward", {"x": 1, "y": 16}),
        )
    ]
    note = "Validated with different numbers of samples: grpo mean@1; hora x mean@1, y mean@16."
    assert note in summary_of(paths)["notes"]
    assert not any("samples" in note for note in [*summary_of(paths[:2])["notes"], *summary_of(paths[2:])["notes"]])


def test_without_validation_the_rest_is_there(tmp_path):
    blind = write_run(tmp_path / "blind.jsonl", [None, None, None], 10)
    summary = summary_of([blind, write_run(tmp_path / "a.jsonl", [0.1, 0.2], 10)])
    assert summary["target_accuracy"] == 0.2
    assert (summary["runs"][0]["rollouts"], summary["runs"][0]["final_accuracy"]) == (20, None)
    assert summary["rule"].startswith("The target is the best accuracy that every run with a validation reached, exc")
    assert summary["notes"] == [
        "No validation accuracy (simulations have none; trainings need trainer.test_freq and data.val_files): blind."
    ]
    alone = summary_of([blind])
    assert (alone["target_accuracy"], alone["rule"]) == (None, "")


def rewarded(path, rewards, source="x"):
    """A log with a validation per step, of a reward function that returns no acc."""
    return write_log(path, {step: {f"val-core/{source}/reward/mean@4": value} for step, value in enumerate(rewards)})


def test_mean_rewards_within_0_and_1_are_the_accuracy_where_there_is_no_acc(tmp_path):
    paths = [rewarded(tmp_path / "a.jsonl", [0.0, 1.0]), validated(tmp_path / "b.jsonl", [{"x": 0.4}, {"x": 0.5}])]
    summary = summary_of(paths)
    assert [run["best_accuracy"] for run in summary["runs"]] == [1.0, 0.5] and summary["target_accuracy"] == 0.5
    assert "The accuracy is the mean reward, since the reward function returns no acc: a x." in summary["notes"]
    data = {"val-core/x/acc/mean@4": 0.5, "val-core/x/reward/mean@4": 0.9}
    summary = summary_of([write_log(tmp_path / "both.jsonl", {0: data})])
    assert summary["runs"][0]["best_accuracy"] == 0.5 and not any("reward" in note for note in summary["notes"])


@pytest.mark.parametrize("outside", [-0.1, 1.5])
def test_mean_rewards_outside_0_and_1_are_no_accuracy_and_the_note_says_why(tmp_path, outside):
    summary = summary_of([rewarded(tmp_path / "a.jsonl", [0.25, outside, 0.5])])
    assert summary["runs"][0]["best_accuracy"] is None
    note = "No accuracy from mean rewards outside 0 to 1 (return acc from the reward function): a x."
    assert [each for each in summary["notes"] if "accuracy" in each] == [note]


def test_a_run_of_plain_verl_is_compared_by_steps_and_time(tmp_path):
    data = {"timing_s/step": 3.0, "val-core/x/acc/mean@1": 0.5}
    path = write_log(tmp_path / "verl.jsonl", {0: {"val-core/x/acc/mean@1": 0.4}, 1: data, 2: data})
    run = read_run([path])
    assert [(point.step, point.rollouts, point.seconds) for point in points(run)] == [
        (0, None, 0),
        (1, None, 3),
        (2, None, 6),
    ]
    assert accuracy_against(run, "rollouts")[0].size == 0 and accuracy_against(run, "seconds")[0].tolist() == [0, 3, 6]
    assert "No count of rollouts, so the comparison is by steps and time only: verl." in summary_of([path])["notes"]


def test_what_a_missing_first_part_has_spent_is_not_known(tmp_path):
    steps = {10: {"val-core/reasoning_gym/spell_backward/acc/mean@4": 0.4}} | training_steps([0.5], 7, first=11)
    found = points(read_run([write_log(tmp_path / "a.jsonl", steps)]))
    assert [(point.step, point.rollouts) for point in found] == [(10, None), (11, 77)]


def test_broken_lines_and_values_are_in_the_notes(tmp_path):
    steps = {0: {"val-core/x/acc/mean@1": 0.4}, 1: {"loss": float("nan"), "rollouts/sampled_total": 1}}
    notes = summary_of([write_log(tmp_path / "a.jsonl", steps, tail="{\n{")])["notes"]
    assert notes == [
        "Lines skipped because they are not those of verl's file logger: a 2.",
        "Values skipped because they are not finite: a 1.",
    ]


def test_dropped_records_are_in_the_notes(tmp_path):
    """Two runs in one file: the validation before the first step stays, and steps 1 and 2 are those of the second."""
    path = write_log(tmp_path / "a.jsonl", training_steps([0.1, 0.2, 0.3], 10))
    path.write_text(2 * path.read_text())
    summary = summary_of([path])
    assert summary["runs"][0]["replaced_records"] == 2
    (note,) = (note for note in summary["notes"] if note.startswith("Records dropped"))
    assert note.endswith("as in a resumed run (in a.jsonl+b.jsonl, a is the older file): a 2.")


def test_the_validations_of_a_long_run_are_collected_few_times(monkeypatch):
    """Each time passes over all metrics of all steps."""
    collected = []
    for module in ("accuracy", "summary"):
        monkeypatch.setattr(f"verl_ext.lab.report.{module}.points", lambda run: collected.append(run) or points(run))
    assert summarize([Run("a", training_steps([0.5] * 50, 10))])["target_accuracy"] == 0.5 and len(collected) == 3


def test_the_time_of_a_log_that_begins_later_is_unknown(tmp_path):
    steps = training_steps([0.4, 0.5], 7, first=6)
    path = write_log(tmp_path / "a.jsonl", steps)
    summary = summary_of([path], 0.5)
    assert [point.seconds for point in points(read_run([path]))] == [None, None]
    assert summary["runs"][0]["seconds"] is None and summary["runs"][0]["to_target"]["seconds"] is None
    assert summary["notes"] == ["Time unknown, since the log begins after step 1: a begins at step 6."]
    steps[1] = steps[6]
    path = write_log(tmp_path / "b.jsonl", dict(sorted(steps.items())))
    assert summary_of([path])["runs"][0]["seconds"] == 6 and not summary_of([path])["notes"]


def test_the_cost_of_a_target_that_the_first_validation_reaches_is_unknown(tmp_path):
    """The run may have reached it earlier. At step 0, nothing has been sampled."""
    runs = {"grpo": [0.5, None, None, 0.8], "late": [None, None, None, 0.8, 0.9], "begun": [0.8, 0.9]}
    summary = summary_of([write_run(tmp_path / f"{name}.jsonl", values, 1000) for name, values in runs.items()])
    assert [run["rollouts_to_target"] for run in summary["runs"]] == [3000, None, 0]
    assert [run["times_fewer_rollouts"] for run in summary["runs"]] == [1, None, None]
    assert summary["runs"][1]["to_target"] == {
        "step": 3, "rollouts": None, "tokens": None, "seconds": None, "accuracy": 0.8
    }  # fmt: skip
    note = (
        "Cost to the target unknown, since the first validation reaches it: late at step 3, so at most 3,000 rollouts."
    )
    assert note in summary["notes"]


def test_a_log_that_begins_at_step_2_lacks_the_time_of_step_1(tmp_path):
    summary = summary_of([write_run(tmp_path / "a.jsonl", [0.4, 0.5], 7, first=2)], 0.5)
    assert summary["runs"][0]["seconds"] is None
    assert "Time unknown, since the log begins after step 1: a begins at step 2." in summary["notes"]


@pytest.mark.parametrize(("rollouts", "alike"), [(150, True), (151, False)])
def test_the_limit_of_validations_that_are_equally_often(rollouts, alike):
    run = {"validated_every": 1, "rollouts_between_validations": 100}
    other = {"validated_every": 2, "rollouts_between_validations": rollouts}
    assert validated_alike({"a": run, "b": other}, "ab") is alike


def test_seeds_of_different_length_are_in_the_notes(tmp_path):
    paths = [write_run(tmp_path / f"a_{seed}.jsonl", [0.1] * steps, 10) for seed, steps in ((1, 3), (2, 5))]
    assert summary_of(paths)["notes"][-1].endswith(": a 2, 4.")


def test_numbers_taken_as_seeds_are_in_the_notes(tmp_path):
    """They may be sizes of groups."""
    names = ["grpo_8", "grpo_64", "hora-seed1", "hora", "vip_3"]
    paths = [write_run(tmp_path / f"{name}.jsonl", [0.1, 0.2], 10) for name in names]
    assert summary_of(paths)["notes"] == ["Taken as seeds: grpo 8, 64; hora 1, no number."]


def test_where_rollouts_went(tmp_path):
    steps = {
        0: {"val-core/x/acc/mean@1": 0.4},
        1: {"rollouts/trained_total": 6, "rollouts/failed_total": 1, "rollouts/buffered": 3,
            "timing_s/step": 50, "allocation/seconds": 0.5},
        2: {"rollouts/trained_total": 12, "rollouts/failed_total": 1, "rollouts/buffered": 2,
            "rollouts/discarded_too_hard_total": 4, "rollouts/discarded_solved_total": 1, "rollouts/discarded_total": 5,
            "rollouts/truncated_total": 4, "timing_s/step": 40, "allocation/seconds": 0.2,
            "rollouts/sampled": 20, "groups/trained": 3, "groups/effective_ratio": 1},
    }  # fmt: skip
    path = write_log(tmp_path / "a.jsonl", steps)
    found = destinations(read_run([path]))
    assert {part: counts.tolist() for part, counts in found.items()} == {
        "trained": [0, 6, 12], "discarded: solved": [0, 0, 1], "discarded: too_hard": [0, 0, 4], "failed": [0, 1, 1],
        "buffered": [0, 3, 2],
    }  # fmt: skip
    summary = summary_of([path])
    summary["runs"] += [summary["runs"][0] | {"seconds": seconds} for seconds in (600, 10_800)]
    table = tables(summary)[-1]
    row, *others = (dict(zip(table.header, cells, strict=True)) for cells in table.rows)
    assert row == {
        "run": "a", "trained": "60.0%", "discarded": "25.0%", "failed": "5.0%", "buffered": "10.0%",
        "groups per 1,000": "150.0", "time": "90.0 s", "deciding": "350.0 ms", "of step": "0.75%",
    }  # fmt: skip
    assert [other["time"] for other in others] == ["10.0 min", "3.0 h"]


def test_groups_with_a_gradient_count_per_1000_sampled_rollouts(tmp_path):
    counts = [(500, 8, 0.5), (250, 4, 0.25), (250, 10, 1.0)]
    steps: dict[int, dict[str, float]] = {
        step: {"rollouts/sampled": sampled, "groups/trained": groups, "groups/effective_ratio": ratio}
        for step, (sampled, groups, ratio) in enumerate(counts, 1)
    }
    steps[0] = {"val-core/x/acc/mean@1": 0.4}
    steps[4] = {"rollouts/sampled": 500}  # a step without a batch
    path = write_log(tmp_path / "a.jsonl", dict(sorted(steps.items())))
    run = read_run([path])
    assert [groups_per_1000(run, until) for until in (1, 2, 3, 4)] == pytest.approx([8, 5000 / 750, 15, 10])
    assert groups_per_1000(run, 0) is None
    assert groups_per_1000(read_run([write_log(tmp_path / "verl.jsonl", {1: {"timing_s/step": 3.0}})])) is None
    assert summary_of([path])["runs"][0]["groups_per_1000"] == pytest.approx(10)


def test_time_spent_deciding(tmp_path):
    seconds = {1: 0.01, 2: 0.02, 3: 0.3}
    steps = {step: {"allocation/seconds": own, "timing_s/step": 2.0} for step, own in seconds.items()}
    steps[4] = {"allocation/seconds": 1.0}
    path = write_log(tmp_path / "a.jsonl", steps)
    assert deciding_share(read_run([path]))[1].tolist() == pytest.approx([0.005, 0.01, 0.15])
    (row,) = summary_of([path])["runs"]
    assert (row["deciding_median_seconds"], row["deciding_median_share"]) == pytest.approx((0.16, 0.01))
