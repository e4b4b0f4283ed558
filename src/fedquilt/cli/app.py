"""The command `fedquilt` and what all its sub-commands share."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import click
import typer
from typer.core import TyperGroup
from typer.models import ArgumentInfo

from fedquilt._version import __version__
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.formatting import printable_message
from fedquilt.common.storage import os_reason

COMMANDS = (
    *("run", "compare", "sweep", "condense", "plan", "statement", "clients", "report", "watch"),
    *("ledger", "audit", "attack", "card", "data", "flower", "site"),
)
"""Each is a function, or a group of commands; in the order of help."""
FILES = {
    "attack": "audit",
    "condense": "run",
    "data": "plan",
    **dict.fromkeys(("card", "clients", "statement", "watch"), "report"),
}
"""Where those are that do not lie in the file of their name."""
MOVED = {"bench": "benchmarks.bench", "reproduce": "reproduction"}
"""Commands of earlier versions, and the modules of the repository that they are now."""


class CommandGroup(TyperGroup):
    """The commands below one, their arguments with the help that was written for them.

    From click 8.5 on an argument has a help of its own, which typer up to 0.20 (the newest that
    Flower takes) leaves empty: what a command says of its arguments would not be shown.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for command in _commands(self):
            unsaid = [item for item in command.params if _lacks_help(item)]
            texts = _texts(command.callback) if unsaid else {}
            for item in unsaid:
                item.help = texts.get(item.name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; click and typer both name the nearest one, and once is enough."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if hasattr(error, "possibilities") and "Did you mean" in error.message:
                error.possibilities = None
            raise

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


app = typer.Typer(
    name="fedquilt",
    cls=CommandGroup,
    help="Federated learning for clients that are not equal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name in COMMANDS:
    _command = getattr(importlib.import_module(f"fedquilt.cli.{FILES.get(_name, _name)}"), _name)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command)
    else:
        app.command()(_command)


@app.command()
def validate() -> None:
    """Check the formulas of the QuAP-FL paper on this machine; exit 0 when all hold."""
    from fedquilt.utils import validate_implementation

    raise typer.Exit(0 if validate_implementation() else 1)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fedquilt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Federated learning for clients that are not equal."""


def main() -> None:
    """Run the command line; a user's mistake ends with one message and exit code 2."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # whatever is wrong with it is said here, not as Python ends
    except FedquiltError as error:
        _refuse(error)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        # Any file that a command meets may be refused by the system: its name, its rights.
        if error.filename is None:
            _drop_output()
            if error.errno not in _NOT_TAKEN:
                raise
            _refuse(f"standard output cannot be written: {os_reason(error)}")
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        if error.errno == errno.ENAMETOOLONG:
            _refuse(f"{name!r} must be a shorter name: {error.strerror}")
        _refuse(f"{name!r} cannot be used: {error.strerror}")


# Files are written by `write_file`, which names them: what has no name is a stream.
_NOT_TAKEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def _drop_output() -> None:
    """Drop what standard output did not take: it would fail once more when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _refuse(reason: object) -> NoReturn:
    """End with one message, in which nothing moves the cursor."""
    print(f"error: {printable_message(reason)}", file=sys.stderr)
    sys.exit(2)
