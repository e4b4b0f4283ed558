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
        """Called after a round with the configuration and the round's public line."""

    def opened(self, config: Any, folder: Path) -> None:
        """Called once, before the first round, with the run's folder."""

    def working(self, what: str, share: float) -> None:
        """Called within a round with the step that is running and the share that is done."""

    def kept(self, path: Path) -> None:
        """Called with each file that the method writes between rounds."""


class _EachRound(Observer):
    """A plain function, called after each round."""

    def __init__(self, function: Callable[[Any, dict[str, Any]], None]) -> None:
        self._function = function

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        self._function(config, line)


class Several(Observer):
    """Several observers, told in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Pass a round on."""
        for one in self._observers:
            one(config, line)

    def opened(self, config: Any, folder: Path) -> None:
        """Pass the folder on."""
        for one in self._observers:
            one.opened(config, folder)

    def working(self, what: str, share: float) -> None:
        """Pass progress on."""
        for one in self._observers:
            one.working(what, share)

    def kept(self, path: Path) -> None:
        """Pass a file on."""
        for one in self._observers:
            one.kept(path)


def as_observer(watching: Callable[[Any, dict[str, Any]], None] | None) -> Observer:
    """Return an observer; a function is called after each round, None watches nothing."""
    if watching is None:
        return Observer()
    return watching if isinstance(watching, Observer) else _EachRound(watching)
