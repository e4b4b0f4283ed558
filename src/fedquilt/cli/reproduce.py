"""`fedquilt reproduce`: a paper's experiments again, ours beside theirs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedquilt.cli.run import QUIET, say

PAPER = typer.Argument(help="Whose experiments: quap-fl, heflwr or fednum.", metavar="PAPER")
SCALE = typer.Option("--scale", help="small: for a CPU; full: the paper's size, for a GPU.")
ONLY = typer.Option("--only", metavar="PARTS", help="Some parts, by commas: table2,figure4.")
SEEDS = typer.Option("--seeds", help="Some seeds, by commas.")
DATASETS = typer.Option("--datasets", help="Some data sets, by commas.")
FOLDER = typer.Option("--folder", help="Where finished cells are kept, one small file each.")
WORK = typer.Option("--work", help="Where runs are made; killed ones go on from there.")
PAGE = typer.Option("--page", metavar="FILE.md", help="Write the tables into this page too.")
JOBS = typer.Option(
    "--jobs",
    help="Runs at the same time, each with one thread.",
    show_default="small: 2; on a GPU: 3; else 1",
)
DEVICE = typer.Option("--device", help="Where to train.")
ENGINE = typer.Option("--engine", help="How clients are trained.")
PRECISION = typer.Option("--precision", help="What the batched engine computes in on a GPU.")
DATA_DIR = typer.Option("--data-dir", help="Data folders, joined by ':' (or FEDQUILT_DATA).")
COMMIT = typer.Option("--commit", help="Of the source, where there is no git to ask.")
RENDER = typer.Option("--render", help="Run nothing: the tables of what is kept.")
ROUNDS = typer.Option("--rounds", help="A trial of so many rounds, kept apart, in no table.")


def reproduce(
    paper: Annotated[str, PAPER],
    scale: Annotated[str, SCALE] = "small",
    only: Annotated[str | None, ONLY] = None,
    seeds: Annotated[str | None, SEEDS] = None,
    datasets: Annotated[str | None, DATASETS] = None,
    folder: Annotated[str, FOLDER] = "reproduction",
    work: Annotated[str, WORK] = "results/reproduce",
    page: Annotated[str | None, PAGE] = None,
    jobs: Annotated[int, JOBS] = 0,
    device: Annotated[str, DEVICE] = "auto",
    engine: Annotated[str, ENGINE] = "auto",
    precision: Annotated[str, PRECISION] = "float32",
    data_dir: Annotated[str | None, DATA_DIR] = None,
    rounds: Annotated[int | None, ROUNDS] = None,
    commit: Annotated[str | None, COMMIT] = None,
    render: Annotated[bool, RENDER] = False,
    quiet: Annotated[bool, QUIET] = False,
) -> None:
    """Run the experiments of a paper again (quap-fl, heflwr, fednum), ours beside theirs.

    Finished runs are kept and not run again; killed ones go on. Nothing is tuned to match.
    """
    from fedquilt.reproduce import Wanted
    from fedquilt.reproduce import reproduce as run_again

    wanted = Wanted(
        scale=scale,
        only=only,
        seeds=seeds,
        datasets=datasets,
        folder=folder,
        work=work,
        page=page,
        jobs=jobs,
        device=device,
        engine=engine,
        precision=precision,
        data_dir=data_dir,
        rounds=rounds,
        commit=commit,
        render=render,
    )
    try:
        say(run_again(paper, wanted, None if quiet else _tell))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
