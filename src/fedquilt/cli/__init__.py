"""The command line: parse, call, print."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C while it loads is no reason for a traceback."""
    try:
        from fedquilt.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
