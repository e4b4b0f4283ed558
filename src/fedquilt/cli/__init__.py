"""The command line: parse, call, print."""

import signal
import sys

__all__ = ["main", "program"]


def main() -> None:
    """Run the command line; Ctrl-C before a command has begun is no reason for a traceback."""
    try:
        from fedquilt.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def program() -> None:
    """Be the program `fedquilt`: once it has said how it ended, Ctrl-C interrupts nothing."""
    try:
        main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
