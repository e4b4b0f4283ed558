"""What may watch a run: a base class with empty methods, and plain functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Observer:
    """Told what happens in a run; override what you care for.

    What it is given may be shown to anybody: nothing in it depends on what a protected
    client holds beyond what the run's releases say.
    """

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Take notice of a finished round: the configuration and the round's public line."""

    def opened(self, config: Any, folder: Path) -> None:
        """Take notice of the run's folder, once, before the first round."""

    def working(self, what: str, share: float) -> None:
        """Take notice of what is being done within a round, and how much of it is done."""

    def kept(self, path: Path) -> None:
        """Take notice of a file that the method has written on the way."""


class _EachRound(Observer):
    """A plain function, called after each round."""

    def __init__(self, function: Callable[[Any, dict[str, Any]], None]) -> None:
        self._function = function

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        self._function(config, line)


def as_observer(watching: Callable[[Any, dict[str, Any]], None] | None) -> Observer:
    """Return an observer; a function is called after each round, None watches nothing."""
    if watching is None:
        return Observer()
    return watching if isinstance(watching, Observer) else _EachRound(watching)
