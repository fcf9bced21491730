"""Arguments of allocators and estimators, refused in one sentence that names them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def vector(name: str, values: ArrayLike, size: int | None = None) -> np.ndarray:
    """``values`` as finite float64 of shape (n,); a scalar is repeated where ``size`` says how often.

    Raises:
        ValueError: not numbers, not finite, not one-dimensional, empty, or not of the size the other arguments have.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={values!r} must be numbers, one per prompt.") from error
    if size is not None and array.ndim == 0:
        array = np.full(size, array)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; it must be (n,) with one entry per prompt, n at least 1.")
    if size is not None and array.size != size:
        raise ValueError(f"{name} has {array.size} entries, but there are {size} prompts.")
    finite = np.isfinite(array)
    if not finite.all():
        row = int(np.argmin(finite))
        raise ValueError(f"{name}[{row}]={array[row]} is not finite.")
    return array


def within(name: str, array: np.ndarray, low: float, high: float) -> np.ndarray:
    """``array``, all of it in [low, high].

    Raises:
        ValueError: naming the first entry that is not.
    """
    outside = (array < low) | (array > high)
    if outside.any():
        row = int(np.argmax(outside))
        valid = f"at least {low:g}" if np.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name}[{row}]={array[row]:g} must be {valid}.")
    return array


def positive(name: str, array: np.ndarray) -> np.ndarray:
    """``array``, all of it greater than zero.

    Raises:
        ValueError: naming the first entry that is not.
    """
    if (array <= 0).any():
        row = int(np.argmax(array <= 0))
        raise ValueError(f"{name}[{row}]={array[row]:g} must be greater than 0.")
    return array


def number(name: str, value: float, low: float = -np.inf, high: float = np.inf) -> float:
    """``value`` as a finite float in [low, high].

    Raises:
        ValueError: it is not.
    """
    _require_scalar(name, value)
    if not low <= value <= high:
        valid = f"at least {low:g}" if np.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name}={value:g} must be {valid}.")
    return float(value)


def positive_number(name: str, value: float) -> float:
    """``value`` as a finite float greater than zero.

    Raises:
        ValueError: it is not.
    """
    _require_scalar(name, value)
    if value <= 0:
        raise ValueError(f"{name}={value:g} must be greater than 0.")
    return float(value)


def flag(name: str, value: bool) -> bool:
    """``value``, true or false.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be true or false.")
    return bool(value)


def _require_scalar(name: str, value: float) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not np.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number.")


def whole(name: str, value: int, least: int = 0) -> int:
    """``value`` as an int that is at least ``least``.

    Raises:
        ValueError: not a whole number, or too small.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} must be a whole number.") from error
    if isinstance(value, bool) or not np.isfinite(number) or number != int(number) or number < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}.")
    return int(number)


def whole_vector(name: str, values: ArrayLike, size: int, least: int = 0) -> np.ndarray:
    """``values`` as (size,) int64, each at least ``least``; a scalar is repeated.

    Raises:
        ValueError: naming the first entry that is not a whole number or too small.
    """
    array = within(name, vector(name, values, size), least, np.inf)
    if (array != np.floor(array)).any():
        row = int(np.argmax(array != np.floor(array)))
        raise ValueError(f"{name}[{row}]={array[row]:g} must be a whole number.")
    return array.astype(np.int64)


def choice(name: str, value: str, valid: tuple[str, ...]) -> str:
    """``value``, one of ``valid``.

    Raises:
        ValueError: it is not.
    """
    if value not in valid:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(valid)}.")
    return value


def budget(value: float, costs: np.ndarray | None) -> float:
    """The budget: a whole number of rollouts, or with ``costs`` any finite number of their units.

    Raises:
        ValueError: it is negative, not finite or, without costs, not whole.
    """
    if costs is None:
        return whole("budget", value)
    return number("budget", value, 0)
