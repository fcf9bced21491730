"""The comparison's settings, costs, targets and intervals; and a comparison of real runs."""

from __future__ import annotations

import json
import math
from functools import partial

import comparison
import numpy as np
import pytest
from comparison import QUESTIONS, Experiment, Question, extended
from comparison_results import in_every_world, results, rollouts_cell, table, time_cell, write_page
from comparison_runs import SHARES, Kept, Setting, choose, cost_of, ranked, target_of
from comparison_stack import in_shares
from support.commands import invoke

from verl_ext.lab.learn.run import Length
from verl_ext.lab.learn.worlds import CLASSES, WorldSource
from verl_ext.lab.report.ratio import Ratio

TUNING, FRESH = (100, 101), (0, 1, 2)
LOW, HIGH = Setting(1e-4, 32, 8), Setting(1e-3, 32, 8)
CERTAIN = [("pods", 0.5, 0.4, 0.6), ("hora", 2.0, 1.5, 2.5), ("vip", 1.5, 0.9, 2.5)]


def run_of(method, setting, seed, accuracy, spent=None, **changes):
    spent = spent or [100 * place for place in range(len(accuracy))]
    units = {unit: [factor * each for each in spent] for unit, factor in (("tokens", 10), ("waves", 0.1), ("steps", 1))}
    run = {"method": method, **setting._asdict(), "seed": seed, "ended": None, "rollouts": spent, "accuracy": accuracy}
    return run | units | changes


def kept(tmp_path, *runs):
    made = Kept(tmp_path / "runs.jsonl")
    for run in runs:
        made.add(run)
    return made


def test_runs_that_begin_with_another_model_are_not_kept_beside_the_others(tmp_path):
    runs = kept(tmp_path, run_of("grpo", LOW, 0, [0.6665, 0.7]), run_of("grpo", LOW, 1, [0.6666, 0.7]))
    lines = runs.file.read_text()
    with pytest.raises(ValueError, match=r"begins at an accuracy of 0\.7278, and others at 0\.6665: two models"):
        runs.add(run_of("grpo", LOW, 2, [0.7278, 0.8]))
    assert runs.file.read_text() == lines and len(runs.runs) == len(Kept(runs.file).runs) == 2
    runs.file.write_text(lines + json.dumps(run_of("grpo", LOW, 2, [0.7278, 0.8])) + "\n")
    with pytest.raises(ValueError, match="two models"):
        Kept(runs.file)


@pytest.mark.parametrize(
    ("target", "amount", "reached"),
    [(0.5, 200, True), (0.45, 150, True), (0.55, 250, True), (0.7, 400, False), (0.3, 100, True), (0.61, 400, False)],
)
def test_cost_is_where_the_line_between_measurements_first_crosses_the_target(target, amount, reached):
    run = run_of("grpo", LOW, 0, [0.3, 0.4, 0.5, 0.6, 0.5])
    cost = cost_of(run, target, "rollouts")
    assert (cost.amount, cost.reached) == (pytest.approx(amount), reached)
    assert cost_of(run, target, "tokens").amount == pytest.approx(10 * amount)


@pytest.mark.parametrize(
    ("budget", "target", "rollouts", "tokens", "reached"),
    [
        (350, 0.6, 300, 3000, True),
        (300, 0.6, 300, 3000, True),
        (250, 0.6, 250, 2500, False),  # reached, but after the budget
        (350, 0.7, 350, 3500, False),  # the last step has passed the budget
        (800, 0.7, 800, 8000, False),  # ended early: as much again at the same rate
    ],
)
def test_a_run_that_misses_the_target_costs_the_budget(budget, target, rollouts, tokens, reached):
    run = run_of("grpo", LOW, 0, [0.3, 0.4, 0.5, 0.6, 0.5])
    assert cost_of(run, target, "rollouts", budget) == (pytest.approx(rollouts), reached)
    assert cost_of(run, target, "tokens", budget) == (pytest.approx(tokens), reached)


def test_the_target_is_a_share_of_the_way_to_the_best_setting_of_the_reference(tmp_path):
    runs = kept(
        tmp_path,
        *(run_of("grpo", LOW, seed, [0.2, 0.4, best, 0.1]) for seed, best in zip(TUNING, (0.6, 0.8), strict=True)),
        *(run_of("grpo", HIGH, seed, [0.2, 0.5, 0.5]) for seed in TUNING),
        run_of("grpo", Setting(1e-2, 32, 8), 100, [0.2, 0.9]),  # not run on all tuning seeds
        *(run_of("vip", LOW, seed, [0.2, 1.0]) for seed in TUNING),
    )
    assert target_of(runs, TUNING, 0.5) == pytest.approx(0.2 + 0.5 * (0.7 - 0.2))
    assert target_of(runs, TUNING) == pytest.approx(0.6)


def test_settings_are_ranked_by_missed_seeds_and_then_by_the_mean_logarithm(tmp_path):
    def both(setting, *costs):
        curves = ([0.0, 0.0, 1.0] if cost else [0.0, 0.0, 0.5] for cost in costs)
        points = ([0, cost or 1, (cost or 1) + 1] for cost in costs)
        return [
            run_of("grpo", setting, seed, accuracy, spent)
            for seed, accuracy, spent in zip(TUNING, curves, points, strict=True)
        ]

    even, uneven, missed, half, low, high = (Setting(lr, 4, 4) for lr in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    runs = kept(tmp_path, *both(even, 500, 500), *both(uneven, 100, 1000), *both(missed, 10, None))
    runs.add(run_of("grpo", half, 100, [0.0, 1.0], [0, 5]))
    order = ranked(runs, "grpo", [missed, even, uneven], TUNING, 0.9)
    assert order == [uneven, even, missed]  # sqrt(100 * 1000) < 500
    for setting, best, length in ((low, 0.3, 10), (high, 0.6, 1000)):  # both miss the target: the accuracy decides
        for seed in TUNING:
            runs.add(run_of("grpo", setting, seed, [0.0, best], [0, length]))
    assert ranked(runs, "grpo", [low, high, missed], TUNING, 0.9) == [missed, high, low]
    assert choose(runs, "grpo", TUNING) == uneven and choose(runs, "grpo", TUNING[:1]) == half
    dear = Setting(7.0, 4, 4)
    for seed, best in zip(TUNING, (0.95, 0.8), strict=True):  # one seed misses, as with the cheaper setting
        runs.add(run_of("grpo", dear, seed, [0.0, best], [0, 1000]))
    assert ranked(runs, "grpo", [missed, dear], TUNING, 0.9) == [dear, missed]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [([2e-4], [1e-4, 2e-4, 4e-4]), ([1e-4, 2e-4], [5e-5, 1e-4, 2e-4, 4e-4]), ([4e-4], [1e-4, 2e-4, 4e-4, 8e-4])],
)
def test_the_list_of_learning_rates_grows_at_an_end_that_was_chosen(chosen, expected):
    assert list(extended([1e-4, 2e-4, 4e-4], chosen)) == pytest.approx(expected)


def test_there_is_no_result_before_the_reference_is_tuned_and_run(tmp_path):
    accuracy = [0.2, 0.6]
    runs = kept(tmp_path, *(run_of("vip", LOW, seed, accuracy) for seed in TUNING + FRESH))
    assert list(results(runs, TUNING, FRESH)) == []
    for seed in TUNING:
        runs.add(run_of("grpo", LOW, seed, accuracy))
    assert list(results(runs, TUNING, FRESH)) == []
    for seed in FRESH:
        runs.add(run_of("grpo", LOW, seed, accuracy))
    assert [result.method for result in results(runs, TUNING, FRESH)] == ["grpo", "vip"]


def test_a_result_is_that_of_the_fresh_seeds_at_the_targets_of_the_tuning_seeds(tmp_path):
    """The targets are 0.4, 0.52 and 0.58. Each seed has its ratio: 2, 2 and 240 / 259 at the second target."""
    tuned = [run_of(method, LOW, seed, [0.2, 0.6]) for method in ("vip", "grpo") for seed in TUNING]
    fresh = [run_of("grpo", LOW, seed, [0.2, 0.6, 0.7], [0, 100 * (seed + 1), 900]) for seed in FRESH]
    fresh += [run_of("vip", LOW, seed, [0.2, 0.6], [0, 50 * (seed + 1)]) for seed in FRESH[:2]]
    fresh.append(run_of("vip", LOW, 2, [0.2, 0.57], [0, 300]))
    reference, vip = results(kept(tmp_path, *tuned, *fresh), TUNING, FRESH, 1000)
    ours, last = (80, 160, 240), 300 * 0.32 / 0.37
    assert reference.needed == pytest.approx(math.prod(ours) ** (1 / 3))
    assert vip.needed == pytest.approx((40 * 80 * last) ** (1 / 3))
    ratio = vip.rollouts[1]
    mean = pytest.approx((2 * 2 * 240 / last) ** (1 / 3))
    assert ratio.mean == mean and vip.tokens.mean == mean and vip.waves.mean == mean
    assert vip.times[1].mean == mean  # waves of equal sizes
    assert ratio.low < 1 < ratio.high
    assert (reference.missed, vip.missed, vip.accuracy) == ([0, 0, 0], [0, 0, 1], [0.6, 0.6, 0.57])
    lines = table([reference, vip])
    assert lines[2] == "| `grpo` | 0.0001, 32, 8 | 145 | 1 | 1 | 1 | 1 | 1 | 1 | 1 | – | 0.700 ± 0.000 |"
    assert lines[3].endswith("] | 0/0/1 | 0.590 ± 0.017 |")
    shown = f"{mean.expected:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] |"
    assert lines[3].count(shown) == 6  # rollouts and time at two targets, tokens and waves
    (*_, unfair) = table([reference, vip._replace(missed=[0, 1, 1])])
    assert unfair.count(shown) == 4 and unfair.count(f" ({mean.expected:.2f}) |") == 2
    steady = [vip._replace(method=name, rollouts=[Ratio(mean, low, high)] * 3) for name, mean, low, high in CERTAIN]
    worlds = {"few_prompts": [reference, *steady], "all_medium": [reference, steady[0]._replace(missed=[1, 1, 1])]}
    assert in_every_world(worlds, rollouts_cell)[2:] == [
        "| `hora` | **2.00 [1.50, 2.50]** | – |",
        "| `vip` | 1.50 [0.90, 2.50] | – |",
        "| `pods` | **0.50 [0.40, 0.60]** | **0.50 [0.40, 0.60]** |",
    ]
    bounded = [own._replace(method="recall", times=own.rollouts, times_at_most=True) for own in steady]
    assert [time_cell(own, reference) for own in bounded] == [
        "≥ 0.50 [0.40, 0.60]",
        "**≥ 2.00 [1.50, 2.50]**",
        "≥ 1.50 [0.90, 2.50]",
    ]
    assert in_every_world(worlds, time_cell)[4] == f"| `pods` | {shown} ({mean.expected:.2f}) |"


def test_time_is_measured_or_modelled_or_unknown(tmp_path):
    """On the stack, runs have seconds; older runs there have neither seconds nor waves."""
    runs = [run_of(method, LOW, seed, [0.2, 0.6]) for method in ("grpo", "vip") for seed in (*TUNING, *FRESH)]
    (_, vip) = results(kept(tmp_path / "lab", *runs), TUNING, FRESH)
    assert [ratio.mean for ratio in vip.times] == [1, 1]
    larger = [run_of("recall", LOW._replace(prompts=9), seed, [0.2, 0.6]) for seed in (*TUNING, *FRESH)]
    (_, recall) = results(kept(tmp_path / "other", *runs[: len(runs) // 2], *larger), TUNING, FRESH)
    assert recall.times is None  # recall's steps are larger than GRPO's
    for run in runs[-len(FRESH) :]:
        run["seconds"] = [0.0, 8.0]
    for run in runs[len(TUNING) : len(TUNING) + len(FRESH)]:
        run["seconds"] = [0.0, 12.0]
    (_, vip) = results(kept(tmp_path / "stack", *runs), TUNING, FRESH)
    assert [ratio.mean for ratio in vip.times] == pytest.approx([1.5] * 2)
    for run in runs:
        run.pop("seconds", None), run.pop("waves")
    (_, vip) = results(kept(tmp_path / "older", *runs), TUNING, FRESH)
    assert vip.times is vip.waves is None and table([vip])[-1].count(" | – | – | – |") == 1


@pytest.mark.parametrize(
    ("question", "method"),
    [(name, method) for name in ("tool256", "stack64", "confirm_stack64") for method in QUESTIONS[name].methods],
)
def test_a_method_has_the_rollouts_of_its_setting(question, method):
    for n, prompts in QUESTIONS[question].sizes:
        policy = QUESTIONS[question].variant(method, Setting(1e-3, n, prompts)).policy(0)
        cost = policy.step_cost()
        assert (cost.n, cost.prompts) == (n, prompts)
    if question == "tool256":
        assert getattr(policy, "use_prefixes", None) == {"prefix_sampling": True, "without_prefixes": False}.get(method)


def test_real_runs_are_kept_chosen_compared_and_not_repeated(few_prompts, tmp_path, monkeypatch):
    """Two methods and two learning rates; the smallest learns nothing, so that tuning has to choose the other."""
    monkeypatch.setattr(comparison, "KEPT", tmp_path / "kept")
    monkeypatch.setitem(comparison.TUNING, "n32", TUNING)
    monkeypatch.setitem(comparison.FRESH, "n32", FRESH)
    experiment = Experiment("few_prompts", "n32", few_prompts, tmp_path / "scratch", 1)
    experiment.length, lrs = Length(1024, 512), [1e-9, 1e-3]
    monkeypatch.setitem(comparison.BUDGETS, "n32", 1024)
    chosen = {method: experiment.tune(method, lrs) for method in ("grpo", "hora")}
    assert {setting.lr for setting in chosen.values()} == {1e-3}
    for method, setting in chosen.items():
        experiment.run(method, [setting], FRESH)
    lines = experiment.kept.file.read_text().splitlines()
    assert len(lines) == 2 * (2 * len(TUNING) + len(FRESH))
    again = Experiment("few_prompts", "n32", few_prompts, tmp_path / "other", 1)
    again.run("grpo", [chosen["grpo"]], FRESH)
    assert again.kept.file.read_text().splitlines() == lines and not (tmp_path / "other").exists()
    run = json.loads(lines[0])
    assert run["rollouts"] == [0, 512, 1024] and run["steps"] == [0, 2, 4] == run["waves"]
    assert run["tokens"][-1] > 1024 and all(len(run[unit]) == 3 for unit in ("tokens", "accuracy"))

    found = write_page(tmp_path / "page.md", {("few_prompts", "n32"): again.kept})
    (reference, hora) = found["few_prompts", "n32"]
    assert [ratio.mean for ratio in reference.rollouts] == [1.0] * len(SHARES)
    assert list(results(again.kept, TUNING, FRESH, 1024)) == [reference, hora]
    page = (tmp_path / "page.md").read_text()
    assert f"| {hora.rollouts[1].mean:.2f} [{hora.rollouts[1].low:.2f}, {hora.rollouts[1].high:.2f}] |" in page
    assert (tmp_path / "page_worlds.png").stat().st_size > 5000 and "14 runs, tuning included; 3 fresh seeds." in page


def test_one_method_brings_the_reference_that_sets_its_targets(few_prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "WorldSource", partial(WorldSource, cache=few_prompts.cache))
    monkeypatch.setattr(comparison, "KEPT", tmp_path / "kept")
    monkeypatch.setitem(comparison.TUNING, "n32", TUNING[:1])
    monkeypatch.setitem(comparison.FRESH, "n32", FRESH[:1])
    methods = {"grpo": "grpo", "recall": "recall", "hora": "hora"}
    monkeypatch.setitem(QUESTIONS, "n32", Question([(4, 4)], methods, [1e-4, 1e-3, 1e-2]))
    monkeypatch.setitem(comparison.BUDGETS, "n32", 32)
    ran = invoke(comparison.run, "few_prompts", "n32", "--method", "recall", "--scratch", tmp_path)
    assert ran.exit_code == 0, ran.output
    kept = (tmp_path / "kept" / "few_prompts-n32.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in kept} == {"grpo", "recall"}


def test_splits_have_the_shares_of_the_classes_and_no_row_twice():
    rates = np.random.default_rng(0).choice([1.0, 0.95, 0.94, 0.8, 0.02, 0.019, 0.001, 0.0], 4000)
    rows = [{"place": place, "rate": rate} for place, rate in enumerate(rates)]
    shares = {"solved": 0.6, "learnable": 0.3, "hopeless": 0.1}
    splits = in_shares(rows, rates, shares, {"train": 1000, "held_out": 200})
    places = [row["place"] for split in splits.values() for row in split]
    assert len(set(places)) == 1200 and max(places) > 3900 and min(places) < 100  # from the whole of the rows
    for split, size in (("train", 1000), ("held_out", 200)):
        of_class = {
            name: sum(low <= row["rate"] <= high for row in splits[split]) for name, (low, high) in CLASSES.items()
        }
        assert {name: of_class[name] for name in shares} == {
            name: round(share * size) for name, share in shares.items()
        }
    with pytest.raises(ValueError, match=r"^3200 rows must be solved, and \d+ of 4000 are\.$"):
        in_shares(rows, rates, {"solved": 1.0}, {"train": 3200})


@pytest.mark.parametrize(
    ("world", "question", "given"),
    [
        ("quickstart", "stack256", []),
        ("quickstart_mostly_solved", "stack256", []),
        ("quickstart_mostly_solved", "n32", ["--task", "outputs"]),
        ("long_tailed", "n32", ["--task", "outputs"]),
        ("long_tailed", "stack256", []),
        ("mostly_solved", "confirm_stack256", []),
    ],
)
def test_worlds_of_the_stack_their_questions_and_a_task_belong_together(world, question, given):
    refused = invoke(comparison.run, world, question, *given)
    assert refused.exit_code == 2 and "belong together" in refused.output


def test_a_world_without_the_quickstarts_model_is_refused_in_one_sentence(tmp_path):
    refused = invoke(comparison.make_world, "--task", tmp_path, "--out", tmp_path / "world")
    assert refused.exit_code == 2 and "config.json is missing" in " ".join(refused.output.split())
