"""`fedquilt bench`: how fast this machine trains a federation, beside other frameworks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

WORKS = typer.Option("--works", metavar="NAMES", help="small, cnn, or both joined by a comma.")
PEERS = typer.Option(
    "--peers",
    metavar="FOLDER",
    help="Environments of other frameworks, as benchmarks/peers/install.py makes them.",
)
SCRIPTS = typer.Option("--scripts", metavar="FOLDER", help="Where the peers' scripts are.")
ROUNDS = typer.Option("--rounds", metavar="NUMBER", help="Timed rounds of each work.")
COHORT = typer.Option("--clients-per-round", metavar="NUMBER", help="Clients in each cohort.")
DATASET = typer.Option("--dataset", metavar="NAME", help="mnist, or digits for a quick look.")
ONLY = typer.Option("--only", metavar="NAME", help="Only this way; may be given again.")
OUT = typer.Option("--out", metavar="FILE", help="Where the figures are written as JSON.")


def bench(
    works: Annotated[str, WORKS] = "small,cnn",
    peers: Annotated[str | None, PEERS] = None,
    scripts: Annotated[str | None, SCRIPTS] = None,
    rounds: Annotated[int | None, ROUNDS] = None,
    clients_per_round: Annotated[int | None, COHORT] = None,
    dataset: Annotated[str, DATASET] = "mnist",
    only: Annotated[list[str] | None, ONLY] = None,
    out: Annotated[str | None, OUT] = None,
) -> None:
    """Time a plain loop, every engine and other frameworks on the same work, in turns."""
    from fedquilt.bench import as_json, floors, make_work, measure, table
    from fedquilt.bench.tables import machine
    from fedquilt.common import storage
    from fedquilt.common.errors import InvalidValueError

    if peers is not None and not Path(peers).is_dir():
        raise InvalidValueError(
            f"peers={peers!r} must be a folder that benchmarks/peers/install.py made"
        )
    told = {"machine": machine(), "floors": floors(), "works": []}
    print(_line(told["machine"] | told["floors"]))  # type: ignore[operator]
    for name in works.split(","):
        work = make_work(
            name.strip(), rounds=rounds, clients_a_round=clients_per_round, dataset=dataset
        )
        rows = measure(
            work,
            peers=None if peers is None else Path(peers),
            scripts=None if scripts is None else Path(scripts),
            say=_say,
            only=tuple(only or ()),
        )
        _say("")
        print(f"\n{table(work, rows)}", flush=True)
        told["works"].append(as_json(work, rows))  # type: ignore[attr-defined]
        if out is not None:  # after each, so that one that is stopped leaves the others
            storage.write_file(Path(out), json.dumps(told, indent=1).encode() + b"\n")
    if out is not None:
        print(f"\nfigures: {out}")


def _line(facts: dict[str, object]) -> str:
    shown = (f"{v:.4g}" if isinstance(v, float) else v for v in facts.values())
    return ", ".join(f"{name} {value}" for name, value in zip(facts, shown, strict=True))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
