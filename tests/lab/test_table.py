"""Tables in terminals of any width."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from verl_ext.lab.table import Table, count, mean_times_fewer, number, open_console, percent, times_fewer

NAME = "pilot_commit-n_pilot=8,n_commit=24-p_solve=null"
TABLE = Table(
    "A title",
    ("method", "rollouts to 70.0%", "times fewer", "start", "final", "best"),
    [
        (NAME, "1,234,567 (1,000,000 to 1,400,000)", "1.33", "50.0%", "70.0%", "71.0%"),
        ("grpo", "–", "–", "5%", "6%", "7%"),
    ],
    expendable=("final",),
)


def printed(table, width):
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue()


def trimmed(text):
    return "\n".join(line.rstrip() for line in text.split("\n"))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_names_are_never_cut_and_numbers_never_broken(width):
    text = printed(TABLE, width)
    assert NAME in text and "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert all(part in text for part in ("1,234,567", "(1,000,000", "1,400,000)", "1.33", "method"))
    assert "(1,000,000 to 1,400,000)" in text or width == 80


def test_a_wide_terminal_shows_everything_on_one_line_per_row():
    text = printed(TABLE, 160)
    assert "Left out" not in text and "1,234,567 (1,000,000 to 1,400,000)" in text


def test_a_narrow_terminal_leaves_out_the_least_important_columns():
    assert "Left out for lack of width: final.\n" in trimmed(printed(TABLE, 100))
    text = trimmed(printed(TABLE, 80))
    assert "Left out for lack of width: final, best.\n" in text
    assert "times" in text and "1.33" in text and "71.0%" not in text


def test_a_name_wider_than_the_terminal_is_folded():
    text = printed(Table("T", ("method", "steps"), [("x" * 100, "3")]), 40)
    assert text.count("x") == 100 and all(len(line) <= 40 for line in text.splitlines())


def test_columns_of_numbers_are_aligned_to_the_right_and_texts_to_the_left():
    table = Table("T", ("run", "steps", "settings"), [("8b", "3", "n=8"), ("grpo", "–", "n=16, s=3")])
    assert table.kinds == ["text", "number", "text"]
    assert [column.justify for column in table.to_rich(80).columns] == ["left", "right", "left"]


def test_numbers():
    assert (count(None), count(1234.4), percent(0.5), number(1.333), number(None)) == (
        "–",
        "1,234",
        "50.0%",
        "1.33",
        "–",
    )


@pytest.mark.parametrize(
    ("reference", "own", "ratio"), [(400, 200, 2), (100, 200, 0.5), (None, 1, None), (1, None, None), (0, 0, None)]
)
def test_more_times_fewer_is_cheaper(reference, own, ratio):
    assert times_fewer(reference, own) == ratio


def test_a_file_or_a_pipe_has_room_for_tables_and_columns_decides(monkeypatch):
    monkeypatch.setattr("sys.stdout", StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == 160
    monkeypatch.setenv("COLUMNS", "70")
    assert open_console().width == 70


def test_benchmarks_show_their_numbers_in_tables_of_the_lab():
    """rich's own tables cut names and numbers on a narrow terminal."""
    texts = {path.name: path.read_text() for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")}
    assert len(texts) > 10 and not [name for name, text in texts.items() if "rich.table" in text]


def test_over_seeds_ratios_are_averaged_geometrically():
    """With means of 550 and 501, the ratio of arithmetic means would say that the method is cheaper."""
    assert mean_times_fewer([100, 1000], [500, 502]) == pytest.approx((100 / 500 * 1000 / 502) ** 0.5)
    assert mean_times_fewer([100, 1000], [500, 502]) < 1
    assert (
        mean_times_fewer([100, None], [50, 50]) is mean_times_fewer([0, 1], [1, 1]) is mean_times_fewer([], []) is None
    )
