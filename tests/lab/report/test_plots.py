"""The plots of a report, and the values drawn."""

import numpy as np
import pytest
from support.runs import training_steps, write_log

from verl_ext.lab.plot import ordered_colors, styles
from verl_ext.lab.report.plots import plots
from verl_ext.lab.report.runs import Run, by_method, read_run

ONE_OF_EACH_KIND = {"reward_mean", "destinations", "allocation"}  # lines, stacks, families
ACCURACY = ["accuracy_rollouts", "accuracy_tokens", "accuracy_step", "accuracy_seconds"]


def run_with(name="a", steps=3, **metrics):
    """A run with the same metrics in every step; ``__`` stands for a slash."""
    record = {metric.replace("__", "/"): float(value) for metric, value in metrics.items()}
    return Run(name, dict.fromkeys(range(1, steps + 1), record))


def drawn(*runs, target=None):
    return {plot.name: plot for plot in plots(by_method(runs), target)}


def test_only_accuracy_without_the_drivers_metrics(tmp_path):
    run = read_run([write_log(tmp_path / "a.jsonl", training_steps([0.1, 0.2], 10))])
    axes = {name: plot.figure.axes[0] for name, plot in drawn(run, target=0.2).items()}
    assert list(axes) == ACCURACY
    drawn_x = [(each.get_xlabel(), each.get_lines()[0].get_xdata().tolist()) for each in axes.values()]
    units = [("rollouts sampled", 10), ("tokens sampled", 100), ("step", 1), ("wall clock (seconds)", 2)]
    assert drawn_x == [(label, [0, last]) for label, last in units]


def test_nothing_without_metrics():
    assert drawn(run_with(), run_with("b")) == {}


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        ("groups__reward_mean", ["reward_mean"]),
        ("groups__reward_std_mean", ["reward_spread"]),
        ("groups__effective_ratio", ["effective_groups"]),
        ("rollouts__effective_ratio", ["effective_rollouts"]),
        ("rollouts__trained_total", ["destinations"]),
        ("allocation__mean", ["allocation"]),
        ("hora__share_of_rollouts_c2", ["hora_shares"]),
        ("knapsack__status_easy", ["knapsack_statuses"]),
        ("prefix_sampling__ratio_k1", ["prefix_ratios"]),
        ("prefix_sampling__pass_rate_ema_k1", ["prefix_pass_rates"]),
        ("off_policy__delay_mean", ["delay_mean"]),
        ("off_policy__delay_max", ["delay_max"]),
        ("allocation__seconds", ["deciding_seconds"]),
    ],
)
def test_a_plot_is_there_when_any_run_has_its_metric(metric, names):
    found = drawn(run_with("blind"), run_with("a", **{metric: 1.0}))
    assert list(found) == names
    if names[0] in ONE_OF_EACH_KIND:
        assert found[names[0]].png().startswith(b"\x89PNG")


def test_everything_at_once_is_in_the_order_of_the_sections():
    run = run_with(
        "a", groups__reward_mean=0.5, rollouts__trained_total=3, allocation__mean=8, allocation__seconds=0.1,
        timing_s__step=2, hora__share_of_rollouts_c0=0.5, off_policy__delay_mean=0, **{"val-core/x/acc/mean@1": 0.5},
    )  # fmt: skip
    found = drawn(run, target=0.5)
    sections = [plot.section for plot in found.values()]
    assert sorted(range(len(sections)), key=lambda place: sections.index(sections[place])) == list(range(len(sections)))
    assert len(set(sections)) == 5
    for name, unit, value in (("seconds", "milliseconds", 100), ("share", "share of the step (%)", 5)):
        (axes,) = found[f"deciding_{name}"].figure.axes
        assert axes.get_ylabel() == unit and set(axes.get_lines()[0].get_ydata()) == {value}


def test_a_method_keeps_its_colour_in_all_plots():
    runs = [run_with("blind"), run_with("a", groups__reward_mean=1), run_with("b", groups__reward_mean=0)]
    expected = styles(["blind", "a", "b"])
    for order in (runs, runs[::-1]):
        lines = drawn(*order)["reward_mean"].figure.axes[0].get_lines()
        assert {line.get_label(): line.get_color() for line in lines} == {name: expected[name].color for name in "ab"}


def test_more_methods_than_colours_stay_apart():
    runs = [run_with(f"method_{chr(97 + place)}", groups__reward_mean=place) for place in range(15)]
    lines = drawn(*runs)["reward_mean"].figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle(), str(line._dash_pattern)) for line in lines}) == 15


def test_seeds_are_one_line_with_a_band():
    runs = [run_with(f"a_{seed}", groups__reward_mean=seed) for seed in (1, 2, 6)]
    (axes,) = drawn(*runs)["reward_mean"].figure.axes
    (line,), (band,) = axes.get_lines(), axes.collections
    assert np.asarray(line.get_ydata()).tolist() == [3, 3, 3] and line.get_label() == "a (3 seeds)"
    assert {y for _, y in band.get_paths()[0].vertices} == {1, 6}


def test_the_ring_is_where_the_target_is_first_reached(tmp_path):
    run = read_run([write_log(tmp_path / "a.jsonl", training_steps([0.1, 0.4, 0.3, 0.5], 10))])
    (axes,) = drawn(run, target=0.35)["accuracy_rollouts"].figure.axes
    line, ring, _ = axes.get_lines()
    assert line.get_ydata().tolist() == pytest.approx([10, 40, 30, 50])
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (10, 40)


def test_rollouts_are_stacked_to_what_was_sampled():
    """One seed has discarded rollouts, the other none: the plot shows the mean, half of them."""
    first = run_with("a_1", rollouts__trained_total=6, rollouts__discarded_solved_total=4, rollouts__failed_total=0)
    figure = drawn(first, run_with("a_2", rollouts__trained_total=10, rollouts__failed_total=0))["destinations"].figure
    (axes,) = figure.axes
    assert [area.get_label() for area in axes.collections] == ["trained", "discarded: solved"]
    assert [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections] == [8, 10]


def test_a_run_that_has_only_discarded_is_drawn():
    assert "destinations" in drawn(run_with("a", rollouts__trained_total=0, rollouts__discarded_stale_total=4))


def test_levels_are_in_the_order_of_difficulty():
    names = ("easy", "extremely_hard", "medium", "extremely_easy", "hard")
    found = drawn(run_with("a", **{f"knapsack__status_{name}": 1 for name in names}))["knapsack_statuses"]
    labels = [area.get_label() for area in found.figure.axes[0].collections]
    assert labels == ["extremely_hard", "hard", "medium", "easy", "extremely_easy"]
    ratios = {f"prefix_sampling__ratio_k{k}": 1 for k in (10, 2, 1)}
    figure = drawn(run_with("a", prefix_sampling__ratio_k10=1), run_with("b", **ratios))["prefix_ratios"].figure
    colors = {line.get_label(): line.get_color() for line in figure.axes[1].get_lines()}
    assert list(colors.items()) == list(ordered_colors(["k1", "k2", "k10"]).items())


def test_the_range_of_allocation_is_not_cut_off():
    narrow = run_with("a", allocation__min=8, allocation__mean=8, allocation__max=8)
    wide = run_with("b_1", allocation__min=2, allocation__mean=8, allocation__max=64)
    seed = run_with("b_2", allocation__min=4, allocation__mean=8, allocation__max=32)
    figure = drawn(narrow, wide, seed)["allocation"].figure
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] >= 64 for axes in figure.axes)
    (line,), (band,) = figure.axes[1].get_lines(), figure.axes[1].collections
    assert set(line.get_ydata()) == {8} and {y for _, y in band.get_paths()[0].vertices} == {2, 64}
    assert not figure.axes[0].collections


def test_single_steps_of_long_runs_are_averaged_and_the_captions_say_so():
    names = ("reward_mean", "allocation", "prefix_ratios")
    metrics = ("groups/reward_mean", "allocation/mean", "prefix_sampling/ratio_k1")
    short, long = (
        drawn(Run("a", {step: dict.fromkeys(metrics, float(step % 2)) for step in range(1, steps + 1)}))
        for steps in (200, 2000)
    )
    for name in names:
        (line,), (mean,) = short[name].figure.axes[0].get_lines(), long[name].figure.axes[0].get_lines()
        assert line.get_xdata().tolist() == list(range(1, 201)) and set(line.get_ydata()) == {0, 1}
        assert mean.get_xdata().tolist() == [5.5 + 10 * place for place in range(200)] and set(mean.get_ydata()) == {
            0.5
        }
        words = "means, and the range as the least and the most," if name == "allocation" else "means"
        added = f" A run of more than 200 steps is shown as {words} of 200 equal stretches."
        assert long[name].caption == short[name].caption + added


def test_no_peak_of_a_long_run_is_averaged_away():
    metrics = ("off_policy/delay_max", "allocation/min", "allocation/mean", "allocation/max")
    found = drawn(Run("a", {step: dict.fromkeys(metrics, float(step % 10 == 5)) for step in range(1, 2001)}))
    (largest,) = found["delay_max"].figure.axes[0].get_lines()
    assert set(largest.get_ydata()) == {1}
    assert "is shown as the largest values of 200" in found["delay_max"].caption
    (axes,) = found["allocation"].figure.axes
    (mean,), (band,) = axes.get_lines(), axes.collections
    assert set(mean.get_ydata()) == {0.1} and {y for _, y in band.get_paths()[0].vertices} == {0, 1}


@pytest.mark.parametrize(("seconds", "label"), [(1, "seconds"), (1000, "minutes"), (10_000, "hours")])
def test_wall_clock_is_in_a_unit_for_readers(tmp_path, seconds, label):
    run = read_run([write_log(tmp_path / "a.jsonl", training_steps([0.1, 0.2], 10, seconds=seconds))])
    plot = drawn(run)["accuracy_seconds"]
    assert plot.title == f"Accuracy against wall clock ({label})"
    assert plot.figure.axes[0].get_lines()[0].get_xdata()[-1] == seconds / {"s": 1, "m": 60, "h": 3600}[label[0]]


@pytest.mark.parametrize("name", ["$x^{", "_hidden", "a\\b", "_", "100%"])
def test_names_that_mean_something_to_matplotlib_are_drawn(name):
    found = drawn(run_with(name, groups__reward_mean=1, allocation__mean=8))
    assert all(plot.png() for plot in found.values())


def test_the_same_runs_give_the_same_bytes():
    one, other = (drawn(run_with("a", groups__reward_mean=1))["reward_mean"].png() for _ in range(2))
    assert one == other


def test_a_part_is_over_the_seeds_that_have_it():
    runs = [run_with("a_1", prefix_sampling__ratio_k1=1), run_with("a_2", prefix_sampling__ratio_k1=3)]
    runs[1].records[1]["prefix_sampling/ratio_k2"] = 5.0
    (axes,) = drawn(*runs)["prefix_ratios"].figure.axes
    found = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in axes.get_lines()}
    assert found == {"k1": [2, 2, 2], "k2": [5, 5, 5]}
    assert len(axes.collections) == 1  # a band for k1 only
