"""Several trackers as one, none of which can break a run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

from fedquilt.trackers.tracker import Tracker, step_of

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
