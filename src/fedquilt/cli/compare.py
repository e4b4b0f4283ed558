"""`fedquilt compare`: several modes, several seeds, one table and one figure."""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import interruptible, optional_drawing
from fedquilt.cli.run import CONFIG, JSON, PRESET, QUIET, TRACKER, loading, say
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable, wrapped
from fedquilt.config import MODES, RunConfig, build_config
from fedquilt.config.choices import POLICIES
from fedquilt.config.files import read_beside
from fedquilt.config.modes import MODE_TABLE, recipe_line
from fedquilt.observe.progress import RunsProgress

if TYPE_CHECKING:
    from fedquilt.record.result import RunResult

ARMS = ",".join([*(mode for mode in MODES if mode != "certified"), "certified:worst_case"])
ARMS += ",certified"
"""Worst-case accounting beside what the default does, at the same epsilon."""
MODES_OPTION = typer.Option(
    "--modes",
    metavar="NAMES",
    help="Modes, joined by commas; certified may name its policy, certified:worst_case (then it "
    "shares its settings with the others), and one with noise an epsilon of its own, fixed_dp:54.",
)
SEEDS_OPTION = typer.Option("--seeds", metavar="NUMBERS", help="Seeds, joined by commas.")
RUNS = typer.Argument(metavar="[RUN...]", help="Compare these finished runs; train nothing.")
FIGURES_OPTION = typer.Option(
    "--figures",
    help="Of RUN...: comparison, training, seeds (one figure a setting), paper (its figures 2 "
    "and 3), joined by commas; all, or none.",
)
FORMAT_OPTION = typer.Option("--format", help="Of figures: png, pdf or svg.")
OUTPUT_OPTION = typer.Option(
    "--output", "-o", metavar="FOLDER", help="Where tables and figures of RUN... go."
)


@takes_run_options("mode", "seed")
@interruptible()  # also while it loads
def compare(
    settings: dict[str, Any],
    runs: Annotated[list[str] | None, RUNS] = None,
    modes: Annotated[str, MODES_OPTION] = ARMS,
    seeds: Annotated[str, SEEDS_OPTION] = "0,1,2",
    config: Annotated[str | None, CONFIG] = None,
    preset: Annotated[str | None, PRESET] = None,
    figures: Annotated[str, FIGURES_OPTION] = "comparison",
    figure_format: Annotated[str, FORMAT_OPTION] = "png",
    output: Annotated[str, OUTPUT_OPTION] = "./comparison",
    tracker: Annotated[str, TRACKER] = "none",
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
) -> None:
    """Train the same federation in several modes and lay the results side by side.

    With the folders of finished runs nothing is trained: they are compared as they are, and
    the table is stored as JSON, CSV, Markdown and LaTeX.
    """
    if runs:
        if settings or config or preset or tracker != "none":
            raise InvalidValueError("runs that are finished keep their settings: name RUN... alone")
        _compare_finished(runs, figures, figure_format, Path(output), as_json)
        return
    shown = not quiet and not as_json and not read_beside(config).get("quiet", False)
    _train(settings, preset, config, modes, seeds, tracker, shown, as_json)


def _train(
    settings: dict[str, Any],
    preset: str | None,
    config: str | None,
    modes: str,
    seeds: str,
    tracker: str,
    shown: bool,
    as_json: bool,
) -> None:
    from fedquilt.common.storage import storage_errors
    from fedquilt.experiment.preflight import outlook
    from fedquilt.record.folder import make_fresh
    from fedquilt.setup.build_task import build_task
    from fedquilt.setup.federation import build_method

    arms = _arms(modes)
    bases = {
        name: build_config(
            {**settings, **arm}, preset=preset, file=config, arms=list(arms.values())
        )
        for name, arm in arms.items()
    }
    noise = {}
    for name, base in bases.items():
        config_of_arm, problem = build_task(base)
        build_method(config_of_arm, problem).close()  # a mistake in the last is found at once
        found = outlook(config_of_arm, problem)
        noise[name] = None if found is None else found.cell
    configs = [
        (name, b.replace(seed=seed)) for name, b in bases.items() for seed in parse_seeds(seeds)
    ]
    stem = f"compare_{base.dataset}_{time.strftime('%Y%m%d_%H%M%S')}"
    with storage_errors(base.output_dir):
        Path(base.output_dir).mkdir(parents=True, exist_ok=True)
        folder = make_fresh(Path(base.output_dir), stem)
    with interruptible():
        rounds = sum(one.num_releases for _, one in configs)
        with RunsProgress(len(configs), rounds) if shown else nullcontext() as progress:
            finished = [
                (name, _one(name, one.replace(output_dir=str(folder)), progress, tracker))
                for name, one in configs
            ]
        recipes = {name: recipe_line(b.as_dict()) for name, b in bases.items()}
        _report(finished, noise, {n: line for n, line in recipes.items() if line}, folder, as_json)


def _one(name: str, config: RunConfig, progress: RunsProgress | None, tracker: str) -> RunResult:
    with loading():
        from fedquilt.experiment.api import run_config
        from fedquilt.observe.trackers import tracked

    if progress is not None:
        progress.begin(f"{name}, seed {config.seed}")
    with tracked(tracker, progress) as watching:
        done = run_config(config, watching)
    if progress is not None:
        progress.end()
    return done


def _report(
    finished: list[tuple[str, RunResult]],
    noise: dict[str, str | None],
    recipes: dict[str, str],
    folder: Path,
    as_json: bool,
) -> None:
    from fedquilt.record.folder import finite
    from fedquilt.report import comparison_table, plot_comparison, render_comparison
    from fedquilt.report.comparison import write_tables

    runs = [{**one.result, "mode": name} for name, one in finished]
    rows = comparison_table(runs)
    figure = None
    with optional_drawing("comparison.png"):
        figure = str(plot_comparison(runs, str(folder / "comparison.png")))
    with optional_drawing("the table"):
        names = [
            f"run {i}" if one.folder is None else one.folder.name
            for i, (_, one) in enumerate(finished)
        ]
        write_tables(dict(zip(names, runs, strict=True)), folder)
    summaries = [one.summary() for _, one in finished]
    record = {"runs": summaries, "table": rows, "figure": figure}
    if as_json:
        print(json.dumps(finite(record), allow_nan=False))
        return
    say(render_comparison([{**row, "noise": noise.get(row["mode"])} for row in rows]))
    for name, line in recipes.items():
        say(wrapped(f"{name}: {line}"))
    if figure is not None:
        say(f"\nfigure: {figure}")
    say(f"next: fedquilt report {shlex.quote(str(folder))}")


def _arms(text: str) -> dict[str, dict[str, Any]]:
    """Return what each arm of the comparison sets, by its name."""
    arms: dict[str, dict[str, Any]] = {}
    for name in _unique("modes", [part.strip() for part in text.split(",")]):
        mode, colon, after = name.partition(":")
        arms[name] = {"mode": checks.choice("modes", mode, MODES)}
        epsilon = _number(after)
        if epsilon is not None:
            if not MODE_TABLE[mode].noised:
                raise InvalidValueError(
                    f"modes={name!r} must be a mode with noise, to name epsilon"
                )
            arms[name]["epsilon"] = epsilon
        elif colon:
            if mode != "certified":
                raise InvalidValueError(
                    f"modes={name!r} must be 'certified' to name a policy, or have a number "
                    "after the colon, its epsilon"
                )
            arms[name]["policy"] = checks.choice("modes", after, POLICIES)
    return arms


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _compare_finished(
    runs: list[str], figures: str, figure_format: str, folder: Path, as_json: bool
) -> None:
    from fedquilt.record.folder import finite
    from fedquilt.report.comparison import as_text, comparison_rows, write_tables
    from fedquilt.report.runs import entries_of, group_by_config
    from fedquilt.report.style import FORMATS

    wanted = _figures(figures)
    checks.choice("format", figure_format, FORMATS)
    results = _results(runs)
    tables = write_tables(results, folder)
    drawn: list[str] = []
    with optional_drawing("a figure of the comparison"):
        drawn = _draw(results, wanted, folder, figure_format)
    rows = comparison_rows(group_by_config(entries_of(results)))
    together = _together(runs, results, shown=not as_json)
    if as_json:
        record = {"table": rows, "together": together, "tables": tables, "figures": drawn}
        print(json.dumps(finite(record), allow_nan=False))
        return
    say(as_text(rows))
    for one in together:
        say("\n" + wrapped(f"{one['headline']}\n{one['text']}"))
    say(
        "\n".join(["", *(f"table: {p}" for p in tables.values()), *(f"figure: {p}" for p in drawn)])
    )


def _results(runs: list[str]) -> dict[str, dict[str, Any]]:
    """Read finished runs; others are left out with a warning, and refused if there are no more."""
    from fedquilt.record.folder import RunFolder
    from fedquilt.report.views.page import digests_of, find_runs
    from fedquilt.report.views.run import resume_command

    found: dict[str, dict[str, Any]] = {}
    unfinished: dict[str, str] = {}
    folders = find_runs(runs)
    for path, digests in zip(folders, digests_of(folders), strict=True):
        folder = RunFolder.open(path)
        result = folder.read_result()
        if result is None:
            unfinished[str(path)] = resume_command(folder.read_config(), str(folder.path))
            continue
        found[path.name if path.name not in found else str(path)] = result | digests
    if not found:
        first, command = next(iter(unfinished.items()))
        others = f", nor is any of {len(unfinished) - 1} others" if len(unfinished) > 1 else ""
        raise InvalidValueError(
            f"run {first!r} must be finished, and is not{others}: continue with  {command}"
        )
    for name, command in unfinished.items():
        said = f"run {name!r} is not finished and left out: continue with  {command}"
        print(f"warning: {printable(said)}", file=sys.stderr)
    return found


def _together(
    runs: list[str], results: dict[str, dict[str, Any]], *, shown: bool
) -> list[dict[str, Any]]:
    """Return what runs of one ledger, of one sweep, or that go on from another, claim together."""
    from fedquilt.record.folder import RunFolder
    from fedquilt.report.runs import earlier_runs
    from fedquilt.report.views.claim import together_view
    from fedquilt.report.views.page import find_runs, read_runs, sweeps_of
    from fedquilt.report.views.run import run_view

    folders = find_runs(runs)
    sweeps = sweeps_of(folders)
    shared = any(RunFolder.open(path).read_config().ledger is not None for path in folders)
    go_on = any(earlier_runs([(one["begins"], one["ends"]) for one in results.values()]))
    if not (shared or sweeps or go_on):
        return []
    return together_view(read_runs(folders, run_view, "compare: run", shown=shown), sweeps)


def _figures(text: str) -> list[str]:
    from fedquilt.report.comparison import FIGURES

    if text in ("all", "none"):
        return list(FIGURES) if text == "all" else []
    return [checks.choice("figures", part.strip(), FIGURES) for part in text.split(",")]


def _draw(
    results: dict[str, dict[str, Any]], wanted: list[str], folder: Path, figure_format: str
) -> list[str]:
    from fedquilt.report import (
        plot_comparison,
        plot_multi_seed_comparison,
        plot_training_history,
    )
    from fedquilt.report.paper_figures import plot_paper_figures_of_runs
    from fedquilt.report.runs import series_of

    runs, settings, drawn = list(results.values()), {"format": figure_format}, []
    series = series_of(runs)
    if "comparison" in wanted and len({one.entries[0].dataset for one in series}) > 1:
        print("warning: runs of several data sets are not drawn in one figure", file=sys.stderr)
    elif "comparison" in wanted:
        drawn.append(plot_comparison(runs, str(folder / f"comparison.{figure_format}"), settings))
    if "training" in wanted:
        path = folder / f"training.{figure_format}"
        drawn.append(plot_training_history(runs, config=settings, save_path=str(path)))
    if "seeds" in wanted:
        for number, one in enumerate(series):
            path = folder / f"seeds_{number}_{one.mode}.{figure_format}"
            own = [runs[index] for index in one.members]
            seeds = [entry.seed for entry in one.entries]
            dataset = one.entries[0].dataset
            drawn.append(plot_multi_seed_comparison(own, seeds, dataset, settings, str(path)))
    if "paper" in wanted:
        drawn += plot_paper_figures_of_runs(runs, folder, settings)
    return [str(path) for path in drawn]


def parse_seeds(text: str) -> list[int]:
    """Read seeds joined by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidValueError(f"seeds={text!r} must be whole numbers joined by commas") from None
    return _unique("seeds", [checks.integer("seeds", number, at_least=0) for number in numbers])


def _unique(name: str, items: list[Any]) -> list[Any]:
    if len(set(items)) != len(items):
        raise InvalidValueError(f"{name}={items!r} must not repeat an entry")
    return items
