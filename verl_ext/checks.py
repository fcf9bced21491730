"""One vocabulary for refusing values: every refusal names a key, its value, and a valid value.

:class:`Kind` describes a valid scalar; the functions below check a value and return it in its canonical type. Policies,
allocators, estimators and the driver's preflight all use this module, so a rule is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import ArrayLike


class InvalidValue(ValueError):
    """A value that cannot work: ``<key>=<value> is not valid: <valid>``.

    Args:
        key: name of the argument or configuration key.
        value: the refused value.
        valid: clause that says which values are valid.
    """

    def __init__(self, key: str, value: object, valid: str):
        super().__init__(key, value, valid)
        self.key, self.value, self.valid = key, value, valid

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)} is not valid: {self.valid}"


def shown(value: object) -> str:
    """``value`` as a user would type it; a text that looks like a number, or is blank, keeps its quotes."""
    if value is None:
        return "null"
    if isinstance(value, str) and value.strip():
        try:
            float(value)
        except ValueError:
            return value
    return f"{value:g}" if isinstance(value, np.floating) else repr(value)


def require(accepted: bool, key: str, value: object, valid: str) -> None:
    """Raise InvalidValue unless ``accepted``."""
    if not accepted:
        raise InvalidValue(key, value, valid)


# ---- scalars ----


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite int or float; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return False
    return bool(np.isfinite(value))


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int; booleans are not integers, and neither is 3.0."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Kind(NamedTuple):
    """The valid values of a scalar: a test, and the clause that describes them."""

    accepts: Callable[[Any], bool]
    valid: str

    def or_null(self) -> Kind:
        """This kind, or None."""
        return Kind(lambda value: value is None or self.accepts(value), f"{self.valid}, or null")

    def check(self, key: str, value: object) -> None:
        """Raise InvalidValue unless ``value`` is of this kind."""
        require(self.accepts(value), key, value, self.valid)


def integer_from(least: int) -> Kind:
    """Integers of at least ``least``."""
    return Kind(lambda value: is_integer(value) and value >= least, f"use an integer of at least {least}")


def one_of(*choices: str | None) -> Kind:
    """One of these names; None is written null."""
    names = ", ".join("null" if choice is None else choice for choice in choices)
    return Kind(lambda value: (value is None or isinstance(value, str)) and value in choices, f"use one of {names}")


MOST_ROLLOUTS = 2**40  # of an allocation; sums of counts stay exact in float64 and int64
COUNT = integer_from(1)
INTEGER = Kind(is_integer, "use an integer")
BOOLEAN = Kind(lambda value: isinstance(value, bool | np.bool_), "use true or false")
NUMBER = Kind(is_number, "use a finite number")
POSITIVE = Kind(lambda value: is_number(value) and value > 0, "use a number above 0")
NOT_NEGATIVE = Kind(lambda value: is_number(value) and value >= 0, "use a number of at least 0")
SHARE = Kind(lambda value: is_number(value) and 0 < value <= 1, "use a number above 0 and at most 1")
RATE = Kind(lambda value: is_number(value) and 0 <= value <= 1, "use a number in [0, 1]")
TEXT = Kind(lambda value: isinstance(value, str) and bool(value), "use a text")


def integer(key: str, value: object, least: int = 0) -> int:
    """``value`` as an int of at least ``least``; 3.0 is accepted as 3.

    Raises:
        InvalidValue: ``value`` is not an integer, or too small.
    """
    if (is_integer(value) or (is_number(value) and float(value) == int(value))) and value >= least:
        return int(value)
    raise InvalidValue(key, value, integer_from(least).valid)


def number(key: str, value: object, low: float = -np.inf, high: float = np.inf) -> float:
    """``value`` as a finite float in [low, high].

    Raises:
        InvalidValue: ``value`` is not a finite number, or outside of the interval.
    """
    if is_number(value) and low <= value <= high:
        return float(value)
    raise InvalidValue(key, value, _interval(low, high))


def positive_number(key: str, value: object, most: float = np.inf) -> float:
    """``value`` as a finite float above 0 and at most ``most``; raises InvalidValue otherwise."""
    require(is_number(value) and 0 < value <= most, key, value, _positive(most))
    return float(value)  # type: ignore[arg-type]


def flag(key: str, value: object) -> bool:
    """``value`` as a bool; raises InvalidValue for anything but true or false."""
    BOOLEAN.check(key, value)
    return bool(value)


def choice(key: str, value: object, choices: Sequence[str]) -> str:
    """``value`` if it is one of ``choices``; raises InvalidValue otherwise."""
    one_of(*choices).check(key, value)
    return str(value)


def names(key: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise InvalidValue for the first name in ``given`` that is not among ``known``."""
    for name, value in given.items():
        require(name in known, f"{key}.{name}", value, f"there is no such key, use {', '.join(known)}")


def options(key: str, value: object) -> dict[str, Any]:
    """``value`` as a dict of named options; None means no options.

    Raises:
        InvalidValue: ``value`` is not a mapping from names.
    """
    named = value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    require(named, key, value, "use names with values, such as {size: 16}")
    return dict(value or {})  # type: ignore[call-overload]


def budget(value: object, costs: np.ndarray | None) -> float:
    """The budget: an integer number of rollouts or, with ``costs``, a finite number in their unit.

    Raises:
        InvalidValue: ``value`` is negative, not finite, more than 2**40 rollouts or, without costs, not an integer.
    """
    checked = integer("budget", value) if costs is None else number("budget", value, 0)
    most = MOST_ROLLOUTS * (1.0 if costs is None else float(costs.min()))
    require(checked <= most, "budget", value, f"use at most {most:g}, which pays for 2**40 of the cheapest rollouts")
    return checked


# ---- arrays ----


def vector(key: str, values: ArrayLike, size: int | None = None) -> np.ndarray:
    """``values`` as finite float64 of shape (n,); a scalar is repeated ``size`` times.

    Raises:
        InvalidValue: ``values`` are not finite numbers, not one-dimensional, empty, or not ``size`` many.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidValue(key, values, "use numbers, one per prompt") from None
    if size is not None and array.ndim == 0:
        array = np.full(size, array)
    if array.ndim != 1 or array.size == 0:
        raise InvalidValue(
            key, values, f"use shape (n,) with one entry per prompt, n >= 1 (it has shape {array.shape})"
        )
    if size is not None and array.size != size:
        raise InvalidValue(key, values, f"it has {array.size} entries, and there are {size} prompts")
    return _each(key, array, np.isfinite(array), NUMBER.valid)


def within(key: str, array: np.ndarray, low: float, high: float) -> np.ndarray:
    """``array`` if every entry is in [low, high]; raises InvalidValue naming the first other entry."""
    return _each(key, array, (array >= low) & (array <= high), _interval(low, high))


def positive(key: str, array: np.ndarray, most: float = np.inf) -> np.ndarray:
    """``array`` if every entry is above 0 and at most ``most``; raises InvalidValue naming the first other entry."""
    return _each(key, array, (array > 0) & (array <= most), _positive(most))


def integers(key: str, values: ArrayLike, size: int, least: int = 0) -> np.ndarray:
    """``values`` as (size,) int64, each at least ``least``; a scalar is repeated. Entries above 2**53 become 2**53.

    Raises:
        InvalidValue: naming the first entry that is not an integer or too small.
    """
    array = vector(key, values, size)
    _each(key, array, (array == np.floor(array)) & (array >= least), integer_from(least).valid)
    return np.minimum(array, 2**53).astype(np.int64)


def _each(key: str, array: np.ndarray, accepted: np.ndarray, valid: str) -> np.ndarray:
    if not accepted.all():
        row = int(np.argmin(accepted))
        raise InvalidValue(f"{key}[{row}]", array[row], valid)
    return array


def _positive(most: float) -> str:
    return POSITIVE.valid if np.isinf(most) else f"{POSITIVE.valid} and at most {most:g}"


def _interval(low: float, high: float) -> str:
    if np.isinf(low) and np.isinf(high):
        return NUMBER.valid
    return f"use a number of at least {low:g}" if np.isinf(high) else f"use a number in [{low:g}, {high:g}]"
