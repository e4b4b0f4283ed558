"""The command `fedquilt` and what all its sub-commands share."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from fedquilt._version import __version__
from fedquilt.cli.arguments import Group
from fedquilt.cli.audit import audit
from fedquilt.cli.clients import clients
from fedquilt.cli.compare import compare
from fedquilt.cli.condense import condense
from fedquilt.cli.data import data
from fedquilt.cli.flower import flower
from fedquilt.cli.ledger import ledger
from fedquilt.cli.plan import plan
from fedquilt.cli.report import report
from fedquilt.cli.run import run
from fedquilt.cli.statement import statement
from fedquilt.cli.sweep import sweep
from fedquilt.cli.watch import watch
from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import printable_message
from fedquilt.common.storage import os_reason

app = typer.Typer(
    name="fedquilt",
    cls=Group,
    help="Federated learning for clients that are not equal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(compare)
app.command()(sweep)
app.command()(condense)
app.command()(plan)
app.command()(statement)
app.command()(clients)
app.command()(report)
app.command()(watch)
app.add_typer(ledger)
app.command()(audit)
app.command()(data)
app.add_typer(flower)


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
