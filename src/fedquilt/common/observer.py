"""What may watch a run: a base class with empty methods, and plain functions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedquilt.common.errors import InvalidValueError


class Observer:
    """Told what happens in a run; override what you care for.

    What it is given may be shown to anybody: nothing in it depends on what a protected
    client holds beyond what the run's releases say.
    """

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Called after a round with the configuration and the round's public line."""

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        """Called once, before anything is spent, with what the run may expect, in words."""

    def opened(self, config: Any, folder: Path) -> None:
        """Called once, before the first round, with the run's folder."""

    def working(self, what: str, share: float) -> None:
        """Called within a round with the step that is running and the share that is done."""

    def on_artifact(self, path: Path) -> None:
        """Called with each file that the method writes between rounds."""

    kept = on_artifact

    def __init_subclass__(cls) -> None:
        """Read `kept`, as `on_artifact` was called."""
        accept_old_names(cls, {"kept": "on_artifact"})


def accept_old_names(cls: type, names: Mapping[str, str]) -> None:
    """Let a subclass define methods by their old names, and call those of its parents by them."""
    own = vars(cls)
    for old, new in names.items():
        if old in own and new not in own:
            words = f"{cls.__qualname__}.{old} is called {new} now; {old} is read until version 0.2"
            warnings.warn(words, DeprecationWarning, stacklevel=4)
            setattr(cls, new, own[old])
        elif new in own:
            setattr(cls, old, own[new])


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
    if not callable(watching) or not _takes_two(watching):
        raise InvalidValueError(
            f"observer={watching!r:.60} must be an Observer, or a function of the configuration "
            "and a finished round's line"
        )
    return watching if isinstance(watching, Observer) else _EachRound(watching)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Tell whether a function can be called with two arguments, as far as it says."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # some builtins do not say
        return True
    return True


class Observers(Observer):
    """Several observers, told one after the other."""

    def __init__(self, *members: Observer) -> None:
        self._members = members

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        for member in self._members:
            member(config, line)

    def expects(self, config: Any, lines: Sequence[str]) -> None:
        for member in self._members:
            member.expects(config, lines)

    def opened(self, config: Any, folder: Path) -> None:
        for member in self._members:
            member.opened(config, folder)

    def working(self, what: str, share: float) -> None:
        for member in self._members:
            member.working(what, share)

    def on_artifact(self, path: Path) -> None:
        for member in self._members:
            member.on_artifact(path)
