"""The command `fedquilt` and what all its sub-commands share."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from fedquilt._version import __version__
from fedquilt.cli.audit import audit
from fedquilt.cli.compare import compare
from fedquilt.cli.condense import condense
from fedquilt.cli.data import data
from fedquilt.cli.flower import flower
from fedquilt.cli.ledger import ledger
from fedquilt.cli.plan import plan
from fedquilt.cli.run import run
from fedquilt.cli.statement import statement
from fedquilt.common.errors import FedquiltError

app = typer.Typer(
    name="fedquilt",
    help="Federated learning for clients that are not equal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(compare)
app.command()(condense)
app.command()(plan)
app.command()(statement)
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
        app()
    except FedquiltError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # Any path a user types may be longer than the file system takes.
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(
            f"error: {error.filename!r} must be a shorter name: {error.strerror}", file=sys.stderr
        )
        sys.exit(2)
