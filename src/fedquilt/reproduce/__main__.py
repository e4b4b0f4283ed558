"""`python -m fedquilt.reproduce` is `fedquilt reproduce` where there is no typer."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from fedquilt.common.errors import FedquiltError
from fedquilt.common.printable import printable_message
from fedquilt.reproduce.command import Wanted, reproduce
from fedquilt.reproduce.papers import PAPERS


def main() -> int:
    """Read the options, which are the fields of `Wanted`, and run."""
    parser = argparse.ArgumentParser(prog="python -m fedquilt.reproduce", description=__doc__)
    parser.add_argument("paper", help=", ".join(PAPERS))
    for field in dataclasses.fields(Wanted):
        option = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(option, action="store_true")
        else:
            kind = int if "int" in str(field.type) else str
            parser.add_argument(option, type=kind, default=field.default)
    given = vars(parser.parse_args())
    try:
        print(reproduce(given.pop("paper"), Wanted(**given), _say))
    except FedquiltError as error:
        print(f"error: {printable_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
