"""Reading a history: columns of numbers with their rounds, whatever is missing.

A history is what a run wrote: lists, one entry per round or per evaluation.  A
mode without noise or clipping writes None or nothing, and a run that diverged
writes NaN.  Here every column becomes a float array with NaN for what is not a
finite number, so that nothing behind this file meets None or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError

Array = NDArray[np.float64]

ROUND, EVALUATION = "Round", "Evaluation"
_PER_ROUND = ("train_loss", "privacy_budgets", "clip_values", "client_participation")


@dataclass(frozen=True)
class Series:
    """Values at positions; `axis` says what a position counts."""

    positions: Array
    values: Array
    axis: str

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Where there is a value to draw."""
        return np.isfinite(self.values)


def as_number(value: object) -> float:
    """Return `value` as a float, NaN when it is no finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def entries(history: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under `key`, empty when it is missing or None."""
    if not isinstance(history, Mapping):
        raise InvalidValueError(f"history={history!r:.60} must be a dictionary of lists")
    value = history.get(key)
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidValueError(f"history[{key!r}]={value!r:.60} must be a list")
    return list(value)


def column(history: Mapping[str, Any], key: str) -> Array:
    """Return the list under `key` as floats, NaN for what is not a finite number."""
    return np.asarray([as_number(value) for value in entries(history, key)], dtype=np.float64)


def is_absent(history: Mapping[str, Any], key: str) -> bool:
    """Tell whether the mode records nothing under `key`: no entries, or only None."""
    return all(value is None for value in entries(history, key))


def headline(history: Mapping[str, Any]) -> str:
    """Return the key of what a run is judged by: its first metric, where it has none the loss."""
    found = [key for key in history if key.startswith("test_") and not is_absent(history, key)]
    return (*(key for key in found if key != "test_loss"), *found, "test_accuracy")[0]


def in_title(key: str) -> str:
    """Return the name of a metric for a title.

    >>> in_title("test_accuracy"), in_title("test_auroc"), in_title("test_top_5")
    ('Accuracy', 'AUROC', 'Top 5')
    """
    name = key.removeprefix("test_").replace("_", " ")
    return name.upper() if name in ("auroc", "f1", "mse", "mae") else name.capitalize()


def no_budget_in_words(history: Mapping[str, Any]) -> str:
    """Say why a history has no nominal budgets; a mode may have noise without them."""
    if is_absent(history, "noise_levels"):
        return "no noise in this mode"
    return "no nominal budgets in this mode:\nwhat was spent is in the ledger and the statement"


def per_round(history: Mapping[str, Any], key: str) -> Series:
    """Return a column with one entry per round, at rounds 1, 2, ..."""
    values = column(history, key)
    return Series(np.arange(1.0, values.size + 1), values, ROUND)


def per_evaluation(history: Mapping[str, Any], key: str) -> Series:
    """Return a column with one entry per evaluation, at the rounds of those.

    The rounds are `evaluation_rounds`, else the `total_rounds` of the
    participation statistics, else 1, 2, ... when there was an evaluation in
    every round.  A history that tells none of these is drawn by the number of
    the evaluation, and `axis` says so.
    """
    values = column(history, key)
    recorded = (
        column(history, "evaluation_rounds"),
        np.asarray([as_number(total) for total in _stated_totals(history)], dtype=np.float64),
    )
    for rounds in recorded:
        if rounds.size == values.size and np.isfinite(rounds).all():
            return Series(rounds, values, ROUND)
    counted = np.arange(1.0, values.size + 1)
    every_round = values.size == max(len(entries(history, name)) for name in _PER_ROUND)
    return Series(counted, values, ROUND if every_round else EVALUATION)


def _stated_totals(history: Mapping[str, Any]) -> list[object]:
    stats = entries(history, "participation_stats")
    return [item.get("total_rounds") if isinstance(item, Mapping) else None for item in stats]


def aligned(histories: Sequence[Mapping[str, Any]], key: str) -> tuple[Array, Array, str]:
    """Put one column of several histories on the evaluations they share.

    Returns
    -------
    positions, values, axis
        `values` has one row per history that has the column, and one column per
        position.  Histories without common evaluations give zero positions.
    """
    given = [per_evaluation(history, key) for history in histories]
    given = [series for series in given if series.values.size]
    if not given:
        return np.zeros(0), np.zeros((0, 0)), ROUND
    axis = ROUND if all(series.axis == ROUND for series in given) else EVALUATION
    if axis == EVALUATION:
        given = [
            Series(np.arange(1.0, series.values.size + 1), series.values, axis) for series in given
        ]
    tables = [dict(zip(s.positions.tolist(), s.values.tolist(), strict=True)) for s in given]
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    values = [[table[position] for position in shared] for table in tables]
    return np.asarray(shared), np.asarray(values).reshape(len(tables), len(shared)), axis


def running_sum(values: Array) -> Array:
    """Return the cumulative sum, counting a missing value as nothing."""
    return np.cumsum(np.nan_to_num(values, nan=0.0))


def run_label(config: Mapping[str, Any]) -> str:
    """Return mode and method of a run in words; "" when its configuration names none."""
    mode, method = config.get("mode"), config.get("method", "full")
    if not mode or method in ("full", "condense", None):
        return str(mode or "")
    return f"{mode}, {method}"


def target_accuracy(dataset_name: str, config: Mapping[str, Any] | None) -> float | None:
    """Return the target of the run or, without one, of the data set, or None."""
    from fedquilt.config import TARGET_ACCURACY

    own = as_number((config or {}).get("target_accuracy"))
    if math.isfinite(own):
        return own
    return TARGET_ACCURACY.get(str(dataset_name).lower())


_DIGITS = 5  # that a screen can show


def short(value: Any, digits: int = _DIGITS) -> Any:
    """Return a number with so many digits; None for what is no finite number.

    >>> short(0.123456789), short(3), short(float("nan")), short(None)
    (0.12346, 3, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    number = float(value)
    if not math.isfinite(number):
        return None
    return (
        int(number) if number.is_integer() and abs(number) < 1e15 else float(f"{number:.{digits}g}")
    )


def shorts(values: Iterable[Any], digits: int = _DIGITS) -> list[Any]:
    """Return every number with so many digits."""
    return [short(value, digits) for value in values]


def upward(value: float, digits: int = _DIGITS) -> float | str:
    """Return a bound with so many digits, never below what it is; "inf" when there is none.

    >>> upward(2.000001), upward(float("inf"))
    (2.0001, 'inf')
    """
    if not math.isfinite(value):
        return "inf"
    rounded = float(f"{value:.{digits}g}")
    if rounded < value * (1 - 1e-12):
        exponent = math.floor(math.log10(abs(value)))
        rounded = float(f"{rounded + 10.0 ** (exponent - digits + 1):.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
