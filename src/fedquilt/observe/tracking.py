"""A tracker, and several as one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from numbers import Real
from types import TracebackType
from typing import Any, Protocol

from fedquilt.common import checks

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
    return checks.integer("round", line.get("round"), at_least=0) + 1


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


logger = logging.getLogger("fedquilt.trackers")


class Trackers:
    """Hands every round to each tracker; one that fails is left behind with a warning.

    Only the process that opened the trackers writes to them: in a forked worker, `log`
    and `close` do nothing, so that nothing is written twice or waited for.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._live = dict(trackers)
        self._pid = os.getpid()
        # Reentrant: a signal handler may close what the same thread is writing to.
        self._lock = threading.RLock()

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that still work."""
        return tuple(self._live)

    def log(self, line: Mapping[str, Any]) -> None:
        """Hand one round to every tracker.

        Raises
        ------
        InvalidValueError
            If the line has no whole number >= 0 as its "round".
        """
        step_of(line)
        if os.getpid() != self._pid:
            return
        with self._lock:
            for name, tracker in list(self._live.items()):
                try:
                    tracker.log(line)
                except Exception as error:
                    self._leave_behind(name, error)

    def close(self, *, failed: bool = False) -> None:
        """Close every tracker, also when closing one fails; again does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock, ExitStack() as closing:
            while self._live:
                closing.callback(_close, *self._live.popitem(), failed)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)

    def _leave_behind(self, name: str, error: Exception) -> None:
        _warn(name, error)
        tracker = self._live.pop(name, None)
        if tracker is not None:
            with suppress(Exception):
                tracker.close(failed=True)


def _close(name: str, tracker: Tracker, failed: bool) -> None:
    try:
        tracker.close(failed=failed)
    except Exception as error:
        _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    logger.warning(
        "tracker %s stopped and the run goes on without it: %s: %s",
        name,
        type(error).__name__,
        error,
    )
