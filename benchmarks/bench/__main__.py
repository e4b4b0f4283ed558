"""How fast this machine trains a federation, beside other frameworks.

    python -m benchmarks.bench [--works small] [--rounds 40] [--peers FOLDER] [--out FILE]

Times a plain loop, every engine and other frameworks on the same work, in turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import as_json, floors, make_work, measure, table
from benchmarks.bench.tables import machine
from fedquilt.common import storage
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.formatting import printable_message


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; a mistake ends with one message and code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--works", default="small,cnn", help="small, cnn, or both by a comma.")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="Environments of other frameworks, as benchmarks/peers/install.py makes them.",
    )
    parser.add_argument("--scripts", type=Path, metavar="FOLDER", help="The peers' scripts.")
    parser.add_argument("--rounds", type=int, help="Timed rounds of each work.")
    parser.add_argument("--clients-per-round", type=int, help="Clients in each cohort.")
    parser.add_argument("--dataset", default="mnist", help="mnist, or digits for a quick look.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="This way; may be repeated."
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="The figures as JSON.")
    try:
        _bench(parser.parse_args(arguments))
    except FedquiltError as error:
        print(f"error: {printable_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: works that are finished stand above, and in --out", file=sys.stderr)
        return 130
    return 0


def _bench(given: argparse.Namespace) -> None:
    if given.peers is not None and not given.peers.is_dir():
        raise InvalidValueError(
            f"peers={str(given.peers)!r} must be a folder that benchmarks/peers/install.py made"
        )
    told: dict[str, Any] = {"machine": machine(), "floors": floors(), "works": []}
    print(_line(told["machine"] | told["floors"]))
    for name in given.works.split(","):
        work = make_work(
            name.strip(),
            rounds=given.rounds,
            clients_a_round=given.clients_per_round,
            dataset=given.dataset,
        )
        rows = measure(
            work, peers=given.peers, scripts=given.scripts, say=_say, only=tuple(given.only)
        )
        _say("")
        print(f"\n{table(work, rows)}", flush=True)
        told["works"].append(as_json(work, rows))
        if given.out is not None:  # after each, so that one that is stopped leaves the others
            storage.write_file(given.out, json.dumps(told, indent=1).encode() + b"\n")
    if given.out is not None:
        print(f"\nfigures: {given.out}")


def _line(facts: dict[str, object]) -> str:
    shown = (f"{v:.4g}" if isinstance(v, float) else v for v in facts.values())
    return ", ".join(f"{name} {value}" for name, value in zip(facts, shown, strict=True))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
