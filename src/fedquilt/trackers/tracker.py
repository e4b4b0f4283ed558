"""What a tracker is, and what it is told of a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Protocol

from fedquilt import validate

# The names a published system gives to what we measure under our own.
KEYS = {"test_accuracy": "evaluate_acc", "train_loss": "epoch_avg_loss", "seconds": "time"}


class Tracker(Protocol):
    """Takes the rounds of a run, in order, and is closed once at the end."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Take one round."""

    def close(self, *, failed: bool = False) -> None:
        """Write what is left and stop; `failed` says that the run did not end well."""


def step_of(line: Mapping[str, Any]) -> int:
    """Return how many rounds are over after this one: rounds count from 0, steps from 1."""
    return validate.integer("round", line.get("round"), at_least=0) + 1


def scalars_of(line: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a round under the trackers' names.

    Dictionaries are flattened with "/"; lists, texts and None are left out, and so is
    the round itself, which is the step.  Truth values are 0 and 1.
    """
    renamed = {KEYS.get(key, key): value for key, value in line.items() if key != "round"}
    return dict(_flatten("", renamed))


def withholds_time(line: Mapping[str, Any]) -> bool:
    """Tell whether a round keeps its duration to itself.

    How long clients take tells how much they hold, so a run with a privacy claim does
    not publish its seconds.  The clock times that trackers add would give them away.
    """
    return line.get("seconds") is None


def _flatten(prefix: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, int | float]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(f"{name}/", value)
        elif isinstance(value, int):
            yield name, int(value)
        elif isinstance(value, Real):
            yield name, float(value)
