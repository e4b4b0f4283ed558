"""Running the experiments of a paper again: what to run, with what, and the page of results.

It needs neither typer nor matplotlib, so that it also runs on a machine that has little beside
torch and numpy.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import ENGINES, PRECISIONS
from fedquilt.observe.progress import StepsProgress
from reproduction.cells import Cell, Kept, kept_cells, run_cells
from reproduction.papers import PAPERS, Paper, page_around, write_page

FIGURES_FILE = "figures.png"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to run of a paper, how, and where things are kept.

    Parameters
    ----------
    scale
        small, for a CPU, or full, the paper's size.
    only, seeds, datasets
        Parts, seeds and data sets by commas; absent, all.
    folder, work
        Where finished cells are kept, and where runs are made.
    page
        A page whose section of this paper and scale is written anew.
    jobs
        Runs at the same time, each in a process of its own; 0: two in the small form where
        there are two cores, three on a GPU, else one.
    rounds
        A trial: every run has so many rounds, and is kept apart and in no table.
    commit
        Of the source, where there is no git to ask; cells say it.
    render
        Run nothing: the tables, and the page, of what is kept.
    """

    scale: str = "small"
    only: str | None = None
    seeds: str | None = None
    datasets: str | None = None
    folder: str = "reproduced"
    work: str = "results/reproduction"
    page: str | None = None
    jobs: int = 0
    device: str = "auto"
    engine: str = "auto"
    precision: str = "float32"
    data_dir: str | None = None
    rounds: int | None = None
    commit: str | None = None
    render: bool = False


def reproduce(name: str, wanted: Wanted, say: Callable[[str], None] | None = None) -> str:
    """Run what is not kept yet, write the page if one is named, and return the tables.

    Parameters
    ----------
    say
        Called with a line before the first and after each run, and with the time at the end.
    """
    began = time.perf_counter()
    paper = PAPERS[checks.choice("paper", name, PAPERS)]
    cells, chosen = _cells(paper, wanted)
    how = _how(wanted)
    _check_page(name, wanted)
    jobs = checks.integer("jobs", wanted.jobs, at_least=0) or _usual_jobs(wanted.scale, how)
    size = wanted.scale if wanted.rounds is None else f"{wanted.scale}-{wanted.rounds}-rounds"
    place = Path(wanted.folder) / name / size
    if wanted.render:
        return _written(name, paper, wanted, place, say)
    if wanted.rounds is None:
        paper.prepare(place, _parts(paper, wanted.only))

    done = len(kept_cells(place, chosen))
    if say is not None:
        say(f"{len(chosen)} runs, {jobs} at a time; {done} of them are kept in {place}")
    with StepsProgress(f"{name}: run", len(chosen), shown=say is not None) as steps:
        steps.start_at(done)

        def tell(kept: Kept, number: int, total: int) -> None:
            steps.end()
            if say is not None:
                spent = time.perf_counter() - began
                say(f"{number} of {total} runs after {spent:.0f} s: {kept.as_line()}")

        kept = run_cells(
            place,
            cells,
            Path(wanted.work) / name / size,
            _with_engine(how, paper, jobs),
            jobs=jobs,
            only=[cell.name for cell in chosen],
            progress=tell,
            commit=wanted.commit,
        )
    if wanted.rounds is not None:
        text = "\n".join(one.as_line() for one in kept.values())
    else:
        text = _written(name, paper, wanted, place, say)
    if say is not None:
        say(
            f"{len(kept)} runs are kept in {place}; {time.perf_counter() - began:.0f} s with "
            f"{jobs} at a time on {how['device']}"
        )
    return text


def _check_page(name: str, wanted: Wanted) -> None:
    """Refuse a page that the section could not be written to, before anything runs."""
    if wanted.page is None:
        return
    if wanted.rounds is not None:
        raise InvalidValueError(f"page={wanted.page!r} must be left out of a trial (rounds)")
    page_around(Path(wanted.page), name, wanted.scale)


def _written(
    name: str, paper: Paper, wanted: Wanted, place: Path, say: Callable[[str], None] | None
) -> str:
    """Draw the figures, write the page, and return the section."""
    try:
        paper.draw(wanted.scale, place, place / FIGURES_FILE)
    except (ImportError, OSError) as error:  # the tables are worth more than a picture
        if say is not None:
            say(f"warning: the figures could not be drawn: {error}")
    shown = ""
    if wanted.page is not None and (place / FIGURES_FILE).is_file():
        shown = os.path.relpath(place / FIGURES_FILE, Path(wanted.page).parent)
    text = paper.markdown(wanted.scale, place, shown)
    if wanted.page is not None:
        write_page(Path(wanted.page), name, wanted.scale, text)
    return text


def _cells(paper: Paper, wanted: Wanted) -> tuple[list[Cell], list[Cell]]:
    """Return all cells of the scale, and those that are wanted.

    A seed after the other, so that what is there when time is up is whole tables.
    """
    checks.choice("scale", wanted.scale, paper.scales)
    every = sorted(paper.cells(wanted.scale, paper.parts), key=lambda cell: cell.seed)
    if wanted.rounds is not None:
        checks.integer("rounds", wanted.rounds, at_least=1)
        short = {"num_rounds": wanted.rounds, "eval_every": wanted.rounds}
        every = [dataclasses.replace(c, settings={**c.settings, **short}) for c in every]
    inside = {cell.name for cell in paper.cells(wanted.scale, _parts(paper, wanted.only))}
    seeds = _some("seeds", wanted.seeds, sorted({str(cell.seed) for cell in every}))
    datasets = _some("datasets", wanted.datasets, sorted({cell.dataset for cell in every}))
    chosen = [
        cell
        for cell in every
        if cell.name in inside and str(cell.seed) in seeds and cell.dataset in datasets
    ]
    return every, chosen


def _parts(paper: Paper, only: str | None) -> Sequence[str]:
    return _some("only", only, paper.parts)


def _some(name: str, given: str | None, allowed: Sequence[str]) -> Sequence[str]:
    """Return the values that are named by commas, in order; absent, all."""
    if given is None:
        return allowed
    return [checks.choice(name, part.strip(), allowed) for part in given.split(",")]


def _how(wanted: Wanted) -> dict[str, Any]:
    """Return the options of where and how fast, with the device that `auto` is."""
    import torch

    checks.choice("engine", wanted.engine, ENGINES)
    checks.choice("precision", wanted.precision, PRECISIONS)
    device = wanted.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.precision != "float32" and device == "cpu":
        raise InvalidValueError(
            f"precision={wanted.precision!r} must be 'float32' on a CPU: the other is for a GPU"
        )
    how = {"device": device, "engine": wanted.engine, "precision": wanted.precision}
    return how if wanted.data_dir is None else {**how, "data_dir": wanted.data_dir}


def _with_engine(how: dict[str, Any], paper: Paper, jobs: int) -> dict[str, Any]:
    """Return the options with an engine of one process where several runs share the cores.

    `auto` would start worker processes for each of them.
    """
    if how["engine"] != "auto" or how["device"] != "cpu" or jobs == 1:
        return how
    return {**how, "engine": paper.cpu_engine}


def _usual_jobs(scale: str, how: Mapping[str, Any]) -> int:
    if how["device"] != "cpu":
        return 3
    return 2 if scale == "small" and (os.cpu_count() or 1) > 1 else 1
