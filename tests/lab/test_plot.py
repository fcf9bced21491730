"""Curves over seeds, and colours."""

import numpy as np
import pytest

from verl_ext.lab.method import recipes
from verl_ext.lab.plot import COLORS, REASONS, families, lines, over_seeds, stack_colors, stacks, styles


def series(x, y):
    return np.array(x, dtype=float), np.array(y, dtype=float)


def test_seeds_measured_at_the_same_places_are_not_interpolated():
    curve = over_seeds("a", [series([0, 10, 20], [1, 2, 6]), series([0, 10, 20], [3, 2, 0])])
    assert curve.x.tolist() == [0, 10, 20]
    assert (curve.mean.tolist(), curve.low.tolist(), curve.high.tolist()) == ([2, 2, 3], [1, 2, 0], [3, 2, 6])
    assert (curve.name, curve.seeds) == ("a", 2)


def test_between_its_own_points_a_seed_is_linear_and_beyond_them_it_ends():
    curve = over_seeds("a", [series([0, 10, 20], [0, 10, 20]), series([5, 15, 30], [0, 0, 0])])
    assert curve.x.tolist() == [5, 10, 15, 20]
    assert curve.high.tolist() == [5, 10, 15, 20] and curve.mean.tolist() == [2.5, 5, 7.5, 10]


def test_one_seed_is_its_own_band():
    curve = over_seeds("a", [series([1, 2], [0.5, 0.25]), series([], [])])
    assert curve.seeds == 1
    assert curve.mean.tolist() == curve.low.tolist() == curve.high.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("found", [[], [series([], [])], [series([1], [1]), series([2], [1])]])
def test_without_a_place_that_all_seeds_have_there_is_no_curve(found):
    assert over_seeds("a", found) is None


def test_a_recipe_has_its_colour_in_every_company_and_order():
    for place, name in enumerate(recipes()):
        for names in ([name], [*recipes()], ["mine", name, "other"], [*reversed([*recipes()]), "grpo-n=16"]):
            assert styles(names)[name].color == COLORS[place]
    assert styles(["grpo-n=16"])["grpo-n=16"] == styles(["grpo"])["grpo"]


@pytest.mark.parametrize("rest", ["_1", "_qwen3_8b", "-n=8", " (3 seeds)", "2"])
def test_a_name_that_begins_with_a_recipes_has_its_colour(rest):
    names = ["grpo", "pilot_commit", "prefix_sampling"]
    found = styles([f"{name}{rest}" for name in names])
    assert [found[f"{name}{rest}"] for name in names] == [styles(names)[name] for name in names]


def test_the_longest_recipes_name_decides_and_a_word_must_end_with_it(monkeypatch):
    monkeypatch.setattr("verl_ext.lab.plot.recipes", lambda: dict.fromkeys(["grpo", "grpo_long", "hora"]))
    assert styles(["grpo_long_1"])["grpo_long_1"].color == COLORS[1]
    assert styles(["grpos"])["grpos"].color == styles(["mine_grpo"])["mine_grpo"].color == COLORS[3]
    two = styles(["grpo_1", "grpo_qwen3_8b"])
    assert two["grpo_1"].color == COLORS[0] and two["grpo_qwen3_8b"].color == COLORS[1]


def test_colours_do_not_depend_on_the_order():
    names = ["grpo", "grpo-n=16", "mine", "zz", "hora (3 seeds)", "one/two"]
    assert styles(names) == styles(names[::-1])
    assert len({style.color for style in styles(names).values()}) == len(names)


def test_many_methods_differ():
    names = [f"method {place}" for place in range(4 * len(COLORS))]
    assert len(set(styles(names).values())) == len(names)


def test_reasons_of_discards_differ():
    reasons = ["no_spread", "all_wrong", "all_correct", "empty", "surplus", "stale", "too_hard", "too_easy", "solved"]
    colors = stack_colors([f"discarded: {reason}" for reason in reasons] + ["trained", "failed", "buffered"])
    assert len(set(colors.values())) == len(reasons) + 3
    assert stack_colors(reversed(list(colors))) == colors
    assert [colors[f"discarded: {reason}"] for reason in sorted(reasons)] == list(REASONS[: len(reasons)])


def test_a_reference_that_is_no_method_is_black_and_dashed_beside_methods_with_their_usual_styles():
    names = ["the log", *recipes()]
    curves = [over_seeds(name, [series([1, 2], [1, 2])]) for name in names]
    reference, *methods = lines(curves, "x", "y", among=names, mark=True, reference="the log").axes[0].get_lines()
    assert (reference.get_color(), reference.get_linestyle()) == ("#000000", "--")
    assert reference.get_marker() not in {line.get_marker() for line in methods}
    assert [(line.get_color(), line.get_linestyle()) for line in methods] == [(c, "-") for c in COLORS[: len(methods)]]


def test_a_method_without_a_curve_leaves_its_colour_free():
    curve = over_seeds("zz", [series([1, 2], [1, 2])])
    (line,) = lines([None, curve], "x", "y", among=["grpo", "zz", "mine"]).axes[0].get_lines()
    assert line.get_color() == styles(["mine", "zz", "grpo"])["zz"].color


def test_a_scale_is_that_of_the_line_its_band_the_target_and_the_ring_at_the_first_point_that_has_the_target():
    curve = over_seeds("a", [series([1, 2, 3], [0, 0.5, 0.75]), series([1, 2, 3], [0, 1, 0.75])])
    (axes,) = lines([curve], "x", "y", target=0.75, scale=100).axes
    (line, ring, target), (band,) = axes.get_lines(), axes.collections
    assert line.get_ydata().tolist() == [0, 75, 75]
    assert {tuple(corner) for corner in band.get_paths()[0].vertices} >= {(2, 50), (2, 100)}
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (2, 75)
    assert set(target.get_ydata()) == {75}


@pytest.mark.parametrize(
    ("names", "columns"),
    [("abcdef", 3), ([f"{name}_qwen2_5_math_7b_deepscaler" for name in "abcdef"], 2), (["x" * 70, "y" * 70], 1)],
)
def test_a_legend_has_as_many_columns_as_fit_the_picture(names, columns):
    figure = lines([over_seeds(name, [series([1, 2], [1, 2])]) for name in names], "x", "y")
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert len({text.get_window_extent().x0 for text in legend.get_texts()}) == columns
    assert 0 <= legend.get_window_extent().x0 and legend.get_window_extent().x1 <= figure.bbox.width


def test_a_long_legend_makes_the_picture_higher_and_leaves_the_data_their_room():
    def height(count):
        curves = [over_seeds(f"method {place}", [series([1, 2], [1, 2])]) for place in range(count)]
        figure = lines(curves, "x", "y")
        figure.draw_without_rendering()
        return figure.get_figheight(), figure.axes[0].get_position().height * figure.get_figheight()

    (figure, data), (higher, same) = height(9), height(54)  # 3 and 18 rows
    assert figure == height(1)[0] == 4.4 and higher > 6 and same == pytest.approx(data, rel=0.02)


@pytest.mark.parametrize("name", ["_hidden", "$x$", r"a$\bad$b"])
def test_a_legend_shows_names_that_mean_something_to_matplotlib(name):
    curve = over_seeds(name, [series([1, 2], [1, 2])])
    figures = [lines([curve], "x", "y")] + [
        draw({"a": {name: curve}}, "y", {name: "red"}) for draw in (stacks, families)
    ]
    for figure in figures:
        (label,) = figure.legends[0].get_texts()
        assert label.get_text().replace(r"\$", "$") == name.lstrip("_")
        figure.draw_without_rendering()
