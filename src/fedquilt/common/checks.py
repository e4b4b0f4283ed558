"""Short validators with one form of message.

clip_norm=0.0 must be > 0
mode='quapfl' must be one of 'fedavg', 'quap_fl' (did you mean 'quap_fl'?)
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex

from fedquilt.common.errors import InvalidValueError

if TYPE_CHECKING:  # numpy only where a list is checked: the log needs none
    import numpy as np
    from numpy.typing import NDArray


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return `value` as a finite float inside the stated bounds, or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidValueError(f"{name}={value!r} must be a number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    _check_bounds(name, value, result, above, at_least, below, at_most)
    return result


def integer(
    name: str, value: object, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """Return `value` as an int inside the stated bounds, or raise.

    Whole numbers of NumPy and torch count; truth values and floats do not.
    """
    whole = _index(value)
    if whole is None:
        raise InvalidValueError(f"{name}={value!r} must be a whole number")
    _check_bounds(name, value, whole, None, at_least, None, at_most)
    return whole


def _index(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_bounds(
    name: str,
    given: object,
    value: float,
    above: float | None,
    at_least: float | None,
    below: float | None,
    at_most: float | None,
) -> None:
    bounds = (
        (above, ">", operator.gt),
        (at_least, ">=", operator.ge),
        (below, "<", operator.lt),
        (at_most, "<=", operator.le),
    )
    rules = [f"{sign} {bound:.15g}" for bound, sign, _ in bounds if bound is not None]
    inside = all(holds(value, bound) for bound, _, holds in bounds if bound is not None)
    infinite = isinstance(value, float) and not math.isfinite(value)
    if inside and not infinite:
        return
    if inside:
        rules.insert(0, "finite")
    raise InvalidValueError(f"{name}={given!r} must be {' and '.join(rules)}")


def flag(name: str, value: object) -> bool:
    """Return `value` when it is True or False, or raise."""
    if not isinstance(value, bool):
        raise InvalidValueError(f"{name}={value!r} must be True or False")
    return value


def text(name: str, value: object) -> str:
    """Return `value` when it is a text that is not empty, or raise."""
    if not isinstance(value, str) or not value:
        raise InvalidValueError(f"{name}={value!r} must be a text that is not empty")
    return value


def path(name: str, value: object) -> str:
    """Return `value` as the text of a path that is not empty, or raise."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InvalidValueError(f"{name}={value!r} must be a path")
    return str(os.fspath(value))


def indices(name: str, values: object, size: int, *, unique: bool = False) -> NDArray[np.int64]:
    """Return client or sample numbers as int64 [n], each >= 0 and < `size`, or raise.

    Parameters
    ----------
    name
        What the list is, for the message.
    values
        An array, a tensor or anything that can be listed; whole numbers of NumPy and
        torch count, truth values and floats do not.
    size
        How many clients or samples there are.
    unique
        Whether a number may stand there only once.
    """
    import numpy as np

    if isinstance(values, Iterable) and not hasattr(values, "__array__"):
        values = list(values)
        if any(isinstance(value, bool) for value in values):
            raise InvalidValueError(f"{name}={values!r:.80} must be a flat list of whole numbers")
    try:
        given = np.asarray(values)
    except (ValueError, TypeError):  # lists of different lengths
        given = np.empty((0, 0))
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidValueError(f"{name}={values!r:.80} must be a flat list of whole numbers")
    outside = given[(given < 0) | (given >= size)]
    if outside.size:
        raise InvalidValueError(
            f"{name} holds {outside[0]}, every number must be >= 0 and < {size}"
        )
    if unique:
        numbers, counts = np.unique(given, return_counts=True)
        if numbers.size < given.size:
            raise InvalidValueError(f"{name} holds {numbers[counts > 1][0]} more than once")
    return given.astype(np.int64)


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return `value` when it is one of `allowed`, or raise and name the nearest."""
    options = list(allowed)
    if isinstance(value, str) and value in options:
        return value
    listed = ", ".join(repr(option) for option in options)
    raise InvalidValueError(
        f"{name}={value!r} must be one of {listed}{did_you_mean(value, options)}"
    )


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known word nearest to `word`, else ""."""
    words = list(known)
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in words}
    near = [name for name in words if "_" in name and word == initials[name]]
    near = near or difflib.get_close_matches(str(word), words, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
