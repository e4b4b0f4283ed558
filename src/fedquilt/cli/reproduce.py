"""`fedquilt reproduce`: a paper's experiments again, ours beside theirs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.progress import drawing
from fedquilt.cli.run import QUIET, say
from fedquilt.common import checks
from fedquilt.config.choices import ENGINES, PRECISIONS

if TYPE_CHECKING:
    from fedquilt.reproduce import Paper

PAPER = typer.Argument(help="Whose experiments: quap-fl.", metavar="PAPER")
SCALE = typer.Option("--scale", help="small: for a CPU; full: the paper's size, for a GPU.")
ONLY = typer.Option("--only", metavar="PARTS", help="Some parts, by commas: table2,figure4.")
FOLDER = typer.Option("--folder", help="Where finished cells are kept, one small file each.")
WORK = typer.Option("--work", help="Where runs are made; killed ones go on from there.")
PAGE = typer.Option("--page", metavar="FILE.md", help="Write the tables into this page too.")
JOBS = typer.Option("--jobs", help="Runs at the same time, each with one thread.")
DEVICE = typer.Option("--device", help="Where to train.")
ENGINE = typer.Option("--engine", help="How clients are trained.")
PRECISION = typer.Option("--precision", help="What the batched engine computes in on a GPU.")
DATA_DIR = typer.Option("--data-dir", help="Data folders, joined by ':' (or FEDQUILT_DATA).")


def reproduce(
    paper: Annotated[str, PAPER],
    scale: Annotated[str, SCALE] = "small",
    only: Annotated[str | None, ONLY] = None,
    folder: Annotated[str, FOLDER] = "reproduction",
    work: Annotated[str, WORK] = "results/reproduce",
    page: Annotated[str | None, PAGE] = None,
    jobs: Annotated[int, JOBS] = 0,
    device: Annotated[str, DEVICE] = "auto",
    engine: Annotated[str, ENGINE] = "auto",
    precision: Annotated[str, PRECISION] = "float32",
    data_dir: Annotated[str | None, DATA_DIR] = None,
    quiet: Annotated[bool, QUIET] = False,
) -> None:
    """Run the experiments of a published paper again, and lay ours beside theirs.

    Every finished run is kept with its configuration and not run again; what was killed
    goes on. Nothing is tuned to match.
    """
    from fedquilt.reproduce import PAPERS, run_cells, write_page
    from fedquilt.reproduce.papers import count_bytes
    from fedquilt.reproduce.quap_fl_page import draw

    chosen = PAPERS[checks.choice("paper", paper, PAPERS)]
    checks.choice("scale", scale, chosen.scales)
    checks.choice("engine", engine, ENGINES)
    checks.choice("precision", precision, PRECISIONS)
    parts = _parts(chosen, only)
    place = Path(folder) / paper / scale
    how: dict[str, Any] = {"device": device, "engine": engine, "precision": precision}
    how |= {} if data_dir is None else {"data_dir": data_dir}
    if "table1" in parts:
        count_bytes(place)
    at_once = jobs or (2 if scale == "small" and (os.cpu_count() or 1) > 1 else 1)
    progress = None if quiet else _progress
    try:
        kept = run_cells(
            place,
            chosen.cells(scale, parts),
            Path(work) / paper / scale,
            how,
            jobs=at_once,
            progress=progress,
        )
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    with drawing("the figures"):
        draw(scale, kept, place / "figures.png")
    figure = place / "figures.png"
    shown = "" if page is None else os.path.relpath(figure, Path(page).parent)
    text = chosen.markdown(scale, place, shown)
    if page is not None:
        write_page(Path(page), paper, scale, text)
    say(text)


def _parts(chosen: Paper, only: str | None) -> list[str]:
    if only is None:
        return list(chosen.parts)
    return [checks.choice("only", part.strip(), chosen.parts) for part in only.split(",")]


def _progress(kept: int, total: int) -> None:
    print(
        f"\r{kept} of {total} runs", end="\n" if kept == total else "", file=sys.stderr, flush=True
    )
