"""Each check accepts its values, returns them in one type, and refuses the others with key, value and valid values."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext import checks
from verl_ext.checks import InvalidValue

nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "accepted", "refused", "valid"),
    [
        (checks.COUNT, [1, 7, np.int64(3)], [0, -1, 1.0, True, "1", None, nan], "use an integer of at least 1"),
        (checks.integer_from(0), [0, 5], [-1, 0.0, False], "use an integer of at least 0"),
        (checks.INTEGER, [0, -5, np.int32(1)], [1.5, True, "x"], "use an integer"),
        (checks.BOOLEAN, [True, False, np.bool_(True)], [0, 1, None, "true"], "use true or false"),
        (checks.NUMBER, [0, -1.5, np.float32(2)], [nan, inf, True, "1", None], "use a finite number"),
        (checks.POSITIVE, [1e-9, 2], [0, -1, nan, inf, True], "use a number above 0"),
        (checks.NOT_NEGATIVE, [0, 0.0, 3], [-1e-9, nan, False], "use a number of at least 0"),
        (checks.SHARE, [1e-9, 0.5, 1], [0, 1.0001, -0.5, nan], "use a number above 0 and at most 1"),
        (checks.RATE, [0, 0.5, 1], [-1e-9, 1.0001, nan, True], r"use a number in \[0, 1\]"),
        (checks.TEXT, ["a"], ["", 1, None], "use a text"),
        (checks.one_of("a", "b"), ["a", "b"], ["c", None, 1, ["a"]], "use one of a, b"),
        (checks.one_of("a", None), ["a", None], ["b", 0], "use one of a, null"),
        (checks.COUNT.or_null(), [None, 1], [0, "1"], "use an integer of at least 1, or null"),
    ],
)
def test_kinds_of_scalars(kind, accepted, refused, valid):
    for value in accepted:
        kind.check("key", value)
    for value in refused:
        with pytest.raises(InvalidValue, match=f"^key=.* is not valid: {valid}$"):
            kind.check("key", value)


def test_integers_are_returned_as_int():
    for value in (3, 3.0, np.int64(3), np.float64(3)):
        found = checks.integer("key", value, 3)
        assert found == 3 and type(found) is int
    for value in (2, 3.5, True, "3", nan, inf, None):
        with pytest.raises(InvalidValue, match="^key=.*: use an integer of at least 3$"):
            checks.integer("key", value, 3)
    assert checks.integer("key", 0) == 0
    with pytest.raises(InvalidValue):
        checks.integer("key", -1)


def test_numbers_are_returned_as_float_within_closed_bounds():
    for value in (0, 1, np.float32(0.5)):
        found = checks.number("key", value, 0, 1)
        assert found == value and type(found) is float
    for low, high, refused, valid in (
        (0, 1, (-0.1, 1.1, nan, "1", True), r"use a number in \[0, 1\]"),
        (2, inf, (1.9, inf), "use a number of at least 2"),
        (-inf, inf, (inf, -inf, nan), "use a finite number"),
        (-inf, 2, (3,), r"use a number in \[-inf, 2\]"),
    ):
        for value in refused:
            with pytest.raises(InvalidValue, match=f"^key=.*: {valid}$"):
                checks.number("key", value, low, high)
    found = checks.positive_number("key", 2)
    assert found == 2.0 and type(found) is float
    with pytest.raises(InvalidValue, match="^key=0 is not valid: use a number above 0$"):
        checks.positive_number("key", 0)
    assert checks.positive_number("key", 1e-9) == 1e-9 and checks.positive_number("key", 3, 3) == 3.0
    with pytest.raises(ValueError, match="^key=4 "):
        checks.positive_number("key", 4, 3)


def test_flags_choices_and_options():
    assert checks.flag("key", np.bool_(True)) is True and checks.flag("key", False) is False
    with pytest.raises(InvalidValue, match="^key=1 is not valid"):
        checks.flag("key", 1)
    assert checks.choice("key", "b", ("a", "b")) == "b"
    with pytest.raises(InvalidValue, match="^key=c is not valid: use one of a, b$"):
        checks.choice("key", "c", ("a", "b"))
    given = {"size": 16}
    found = checks.options("key", given)
    assert found == given and found is not given and checks.options("key", None) == {}
    for value in ([1], "size", {1: 2}, {"a": 1, 2: 3}, 0):
        with pytest.raises(InvalidValue, match="^key=.*: use names with values"):
            checks.options("key", value)


def test_a_budget_is_at_most_2_to_the_40_of_the_cheapest_rollouts():
    assert checks.budget(2**40, None) == 2**40 and checks.budget(0, None) == 0
    costs = np.array([4.0, 0.5])
    assert checks.budget(2**39, costs) == 2**39 and checks.budget(0.25, costs) == 0.25
    for value, of in ((2**40 + 1, None), (1.5, None), (-1, None), (2**39 + 1, costs), (-0.5, costs), (inf, costs)):
        with pytest.raises(InvalidValue, match="^budget="):
            checks.budget(value, of)


def test_vectors_name_the_first_bad_entry():
    assert checks.vector("key", [1, 2]).dtype == np.float64
    assert checks.vector("key", 3, 2).tolist() == [3, 3] and checks.vector("key", [1, 2], 2).tolist() == [1, 2]
    for values, size, sentence in (
        ("many", None, "key=many is not valid: use numbers, one per prompt"),
        ([[1]], None, r"key=\[\[1\]\] is not valid: use shape \(n,\)"),
        ([], None, r"it has shape \(0,\)"),
        (3, None, r"it has shape \(\)"),
        ([1, 2, 3], 2, "it has 3 entries, and there are 2 prompts"),
        ([1, nan, inf], None, r"key\[1\]=nan is not valid: use a finite number"),
    ):
        with pytest.raises(InvalidValue, match=sentence):
            checks.vector("key", values, size)


def test_bounds_of_vectors_are_closed_and_named():
    array = np.array([0.0, 0.5, 1.0])
    assert checks.within("key", array, 0, 1) is array
    with pytest.raises(InvalidValue, match=r"key\[2\]=1 is not valid: use a number in \[0, 0.9\]"):
        checks.within("key", array, 0, 0.9)
    with pytest.raises(InvalidValue, match=r"key\[0\]=0 is not valid: use a number of at least 0.1"):
        checks.within("key", array, 0.1, inf)
    with pytest.raises(InvalidValue, match=r"key\[0\]=0 is not valid: use a number above 0"):
        checks.positive("key", array)
    assert checks.positive("key", array[1:]).tolist() == [0.5, 1.0]


def test_integer_vectors_stop_at_2_to_the_53():
    found = checks.integers("key", [0.0, 3, 2.0**60], 3)
    assert found.tolist() == [0, 3, 2**53] and found.dtype == np.int64
    assert checks.integers("key", 2, 3, 2).tolist() == [2, 2, 2]
    for values, least in (([1, 2.5], 0), ([3, 1], 2), ([0, -1], 0)):
        with pytest.raises(InvalidValue, match=rf"^key\[1\]=.*: use an integer of at least {least}$"):
            checks.integers("key", values, 2, least)


@pytest.mark.parametrize(
    ("value", "text"),
    [("a b", "a b"), ("1", "'1'"), ("1e3", "'1e3'"), (" ", "' '"), ("", "''"), (1, "1"), (None, "null"), ([1], "[1]")],
)
def test_values_are_shown_as_a_user_would_type_them(value, text):
    assert checks.shown(value) == text
    assert checks.shown(np.float64(0.25)) == "0.25"
