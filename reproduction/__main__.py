"""The experiments of a paper run again, and what a condensation is compared with.

    python -m reproduction quap-fl|heflwr|fednum [--scale full] [--only PARTS] [--render] ...
    python -m reproduction fednum-baselines RUN [--baselines NAMES] [--set KEY=VALUE] [--json]

Finished runs are kept and not run again; killed ones go on.  Nothing is tuned to match.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from fedquilt.common.errors import FedquiltError
from fedquilt.common.formatting import printable_message
from fedquilt.observe.progress import Progress
from fedquilt.record.folder import finite
from reproduction.baselines import BASELINES, comparison
from reproduction.baselines.released import RELEASED
from reproduction.command import Wanted, reproduce
from reproduction.papers import PAPERS

_BASELINES_COMMAND = "fednum-baselines"
_HELP = {
    "scale": "small: for a CPU; full: the paper's size, for a GPU.",
    "only": "Some parts, by commas: table2,figure4.",
    "seeds": "Some seeds, by commas.",
    "datasets": "Some data sets, by commas.",
    "folder": "Where finished cells are kept, one small file each.",
    "work": "Where runs are made; killed ones go on from there.",
    "page": "Write the tables into this page (FILE.md) too.",
    "jobs": "Runs at the same time, each with one thread; 0: small: 2; on a GPU: 3; else 1.",
    "device": "Where to train.",
    "engine": "How clients are trained.",
    "precision": "What is computed in on a GPU.",
    "data_dir": "Data folders, joined by ':' (or FEDQUILT_DATA).",
    "rounds": "A trial of so many rounds, kept apart, in no table.",
    "commit": "Of the source, where there is no git to ask.",
    "render": "Run nothing: the tables of what is kept.",
}
"""What the fields of `Wanted` are for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; a mistake ends with one message and code 2."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = _baselines if given[:1] == [_BASELINES_COMMAND] else _reproduce
    try:
        command(given)
    except FedquiltError as error:
        print(f"error: {printable_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m reproduction",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def paper_parser() -> argparse.ArgumentParser:
    """Return what reads the options of a paper, which are the fields of `Wanted`."""
    parser = _parser(__doc__)
    parser.add_argument("paper", help=f"Whose experiments: {', '.join(PAPERS)}.")
    for field in dataclasses.fields(Wanted):
        option, said = f"--{field.name.replace('_', '-')}", _HELP[field.name]
        if field.type == "bool":
            parser.add_argument(option, action="store_true", help=said)
        else:
            kind = int if "int" in str(field.type) else str
            parser.add_argument(option, type=kind, default=field.default, help=said)
    parser.add_argument("--quiet", action="store_true", help="No line after each run.")
    return parser


def _reproduce(arguments: Sequence[str]) -> None:
    """Run the experiments of a paper again, and print its tables."""
    given = vars(paper_parser().parse_args(arguments))
    say = None if given.pop("quiet") else _say
    print(reproduce(given.pop("paper"), Wanted(**given), say))


def baselines_parser() -> argparse.ArgumentParser:
    """Return what reads the options of `fednum-baselines`."""
    parser = _parser(_baselines.__doc__)
    parser.add_argument("command", choices=[_BASELINES_COMMAND])
    parser.add_argument("run", help="The folder of a finished `fedquilt condense`.")
    parser.add_argument(
        "--baselines",
        metavar="NAMES",
        help=f"Joined by commas: {', '.join(BASELINES)}, for a certified one "
        f"{', '.join(RELEASED)}; or all.  Usually coreset,fedavg; for a certified one head.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Another value of an option of the condensation; such rows are not kept.",
    )
    parser.add_argument("--json", action="store_true", help="The rows as one JSON object.")
    return parser


def _baselines(arguments: Sequence[str]) -> None:
    """Print what a finished condensation is compared with; its folder keeps the rows."""
    given = baselines_parser().parse_args(arguments)
    with Progress("baselines") as progress:
        finished, rows = comparison(given.run, given.baselines, given.set, progress.working)
    if given.json:
        print(json.dumps(finite({"table": rows}), allow_nan=False))
        return
    from fedquilt.report import condensation_table

    print(condensation_table(rows))
    beside = [row["name"] for row in rows[1:] if row["name"] not in RELEASED]
    if finished.statement.is_bounded and beside:
        print(f"\nNot covered by the claim of the run, computed from raw data: {', '.join(beside)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
