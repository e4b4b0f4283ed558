"""The help of arguments, also where typer and click disagree about it.

From click 8.5 on an argument has a help of its own, which typer up to 0.20 (the newest that
Flower takes) leaves empty: what a command says of its arguments would not be shown.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

from typer.core import TyperGroup
from typer.models import ArgumentInfo

from fedquilt.common.errors import InvalidValueError

MOVED = {"bench": "benchmarks.bench", "reproduce": "reproduction"}
"""Commands of earlier versions, and the modules of the repository that they are now."""


class Group(TyperGroup):
    """The commands below one, their arguments with the help that was written for them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for command in _commands(self):
            unsaid = [item for item in command.params if _lacks_help(item)]
            texts = _texts(command.callback) if unsaid else {}
            for item in unsaid:
                item.help = texts.get(item.name)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name; say of one that has left where it is now."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in MOVED:
            raise InvalidValueError(
                f"fedquilt {cmd_name} is now `python -m {MOVED[cmd_name]}`, in a clone of "
                "fedquilt's repository"
            )
        return found


def _commands(group: Any) -> Iterator[Any]:
    """Yield the commands of a group and of the groups below it."""
    for command in group.commands.values():
        yield command
        if hasattr(command, "commands"):
            yield from _commands(command)


def _lacks_help(parameter: Any) -> bool:
    return parameter.param_type_name == "argument" and not parameter.help


def _texts(command: Callable[..., Any]) -> dict[str, str | None]:
    """Return what a function's annotations say of its arguments, by name."""
    hints = typing.get_type_hints(command, include_extras=True)
    return {
        name: said.help
        for name, hint in hints.items()
        for said in getattr(hint, "__metadata__", ())
        if isinstance(said, ArgumentInfo)
    }
