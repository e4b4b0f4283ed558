"""The command line: parse, call, print."""

from fedquilt.cli.app import main

__all__ = ["main"]
