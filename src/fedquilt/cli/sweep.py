"""`fedquilt sweep`: many runs over some options, in one table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.compare import SEEDS_OPTION, parse_seeds
from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import optional_drawing
from fedquilt.cli.run import CONFIG, JSON, PRESET, QUIET, TRACKER, say
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import format_bound, four_digits, printable, text_table, wrapped
from fedquilt.config import build_config
from fedquilt.config.files import kind_of, read_config_file
from fedquilt.observe.progress import StepsProgress

if TYPE_CHECKING:
    from fedquilt.report.runs import Spread
    from fedquilt.sweep import Plan, SweepSummary
    from fedquilt.sweep.table import Setting

OVER = typer.Option(
    "--over",
    metavar="KEY=VALUES",
    help="An option and its values: key=a,b,c; or, with --samples, a range key=low:high[:log].",
)
SAMPLES = typer.Option("--samples", help="Draw so many settings at random instead of the grid.")
JOBS = typer.Option("--jobs", help="Runs at the same time, each with one thread.")
FOLDER = typer.Option("--folder", metavar="FOLDER", help="Where the sweep goes.")
_MOST_REASONS = 10
RESUME = typer.Option("--resume", metavar="SWEEP_FOLDER", help="Go on with a sweep.")


@takes_run_options("seed")
def sweep(
    settings: dict[str, Any],
    over: Annotated[list[str] | None, OVER] = None,
    seeds: Annotated[str, SEEDS_OPTION] = "0,1,2",
    samples: Annotated[int | None, SAMPLES] = None,
    sweep_seed: Annotated[int, typer.Option("--sweep-seed", help="Of the draws.")] = 0,
    jobs: Annotated[int, JOBS] = 1,
    folder: Annotated[str | None, FOLDER] = None,
    resume: Annotated[str | None, RESUME] = None,
    config: Annotated[str | None, CONFIG] = None,
    preset: Annotated[str | None, PRESET] = None,
    tracker: Annotated[str, TRACKER] = "none",
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
) -> None:
    """Run every combination of some options, or random ones, with every seed.

    The results are one SQLite table in the sweep's folder. A sweep that was stopped goes on
    with --resume. On a ledger every run is charged like any other.
    """
    from fedquilt.sweep import run_sweep

    if tracker != "none":
        from fedquilt.observe.trackers import check_trackers

        check_trackers(tracker)
    plan, place = None, Path(resume or "")
    if resume is None:
        plan, place = _planned(
            settings, over or [], seeds, samples, sweep_seed, config, preset, folder
        )
    elif over or {*settings} - {"ledger"} or config or preset or samples is not None or folder:
        raise InvalidValueError(f"resume={resume!r} must stand alone: a sweep has its own settings")
    named = [settings["ledger"]] if settings.get("ledger") else []
    word = ",".join(named if plan is None else plan.ledgers(plan.points)) or None
    again = f"fedquilt sweep --resume {shlex.quote(str(place))}"
    again += "" if word is None else f" --ledger {shlex.quote(word)}"
    try:
        with _SweepProgress(shown=not (quiet or as_json)) as progress:
            table = run_sweep(
                place, plan, jobs=jobs, tracker=tracker, progress=progress, ledger=word
            )
    except KeyboardInterrupt:
        print(f"interrupted: continue with  {printable(again)}", file=sys.stderr)
        raise typer.Exit(130) from None
    _report(table.plan, table.rows(), place, as_json, again)


def _planned(
    settings: dict[str, Any],
    over: list[str],
    seeds: str,
    samples: int | None,
    sweep_seed: int,
    config: str | None,
    preset: str | None,
    folder: str | None,
) -> tuple[Plan, Path]:
    from fedquilt.sweep import choose, make_plan, parse_axis

    if not over:
        raise InvalidValueError("--over KEY=VALUES must be given at least once")
    kind = kind_of(settings, config)
    axes = [parse_axis(text, kind) for text in over]
    swept = [axis.key for axis in axes]
    common = {key: value for key, value in settings.items() if key not in swept}
    arms = choose(axes, samples, sweep_seed)
    base = build_config(common, preset=preset, file=config, arms=arms)
    said = {*common, *(() if config is None else read_config_file(config, kind.method))}
    plan = make_plan(
        base.as_dict(), axes, parse_seeds(seeds), samples=samples, sweep_seed=sweep_seed, said=said
    )
    stem = f"sweep_{base.dataset}_{time.strftime('%Y%m%d_%H%M%S')}"
    return plan, Path(base.output_dir) / stem if folder is None else Path(folder)


class _SweepProgress:
    """One bar for all runs with the time left, or a line every so many seconds."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._stack = contextlib.ExitStack()
        self._steps: StepsProgress | None = None

    def __enter__(self) -> _SweepProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, ended: int, total: int) -> None:
        """Show that so many runs of all have ended; before the first, those of last time."""
        if self._steps is None:
            steps = StepsProgress("sweep: run", total, shown=self._shown)
            self._steps = self._stack.enter_context(steps)
            self._steps.start_at(ended)
        else:
            self._steps.end()


def _report(
    plan: Plan, rows: list[dict[str, Any]], folder: Path, as_json: bool, again: str
) -> None:
    """Say what was found; end with 1 where runs did not end, or none of them could begin."""
    from fedquilt.record.folder import finite
    from fedquilt.sweep import summarise
    from fedquilt.sweep.table import FAILED, REFUSED, WAITING, plot_sweep

    found = summarise(plan, rows)
    points = [
        {
            "values": {k: printable(v) if isinstance(v, str) else v for k, v in s.values.items()},
            "mean": s.spread.mean,
            "low": s.spread.low,
            "high": s.spread.high,
        }
        for s in found.settings
    ]
    figures: list[str] = []
    with optional_drawing("the figures of the sweep"):
        figures = plot_sweep(points, plan.axes, folder / "sweep.png", metric=found.metric)
    if as_json:
        record = {"folder": str(folder), "figures": figures, **_plain(found)}
        print(json.dumps(finite(record), allow_nan=False))
    else:
        _print(found, sum(row["state"] in (WAITING, FAILED) for row in rows), again)
        say("\n".join([f"\ntable: {folder / 'sweep.sqlite'}", *(f"figure: {f}" for f in figures)]))
    states = {row["state"] for row in rows}
    if states & {WAITING, FAILED} or states == {REFUSED}:
        raise typer.Exit(1)


def _print(found: SweepSummary, unfinished: int, again: str) -> None:
    say(_table(found))
    for one in found.reasons[:_MOST_REASONS]:
        runs = "1 run" if one.runs == 1 else f"{one.runs} runs"
        say("\n" + wrapped(f"{runs} {one.state}: {printable(one.message)}"))
    more = len(found.reasons) - _MOST_REASONS
    if more > 0:
        say(f"\n{more} more reasons are in the table")
    if unfinished:
        say(f"\n{unfinished} of the runs did not end: {again}")
    say(f"\n{wrapped(found.looks.text)}")


def _plain(found: SweepSummary) -> dict[str, Any]:
    record: dict[str, Any] = dataclasses.asdict(found)
    record["differences"] = [
        {"label": label, **dataclasses.asdict(pair)} for label, pair in found.differences
    ]
    return record


def _table(found: SweepSummary) -> str:
    body = [
        (
            one.label,
            four_digits(one.spread.mean),
            four_digits(one.spread.sd),
            _interval(one.spread),
            str(one.spread.count) + _lacking(one),
            format_bound(one.epsilon),
        )
        for one in found.settings
    ]
    interval, worst = "95 % interval of the mean", "worst client's ε"
    titles = ["setting", found.metric, "sd", interval, "seeds", worst]
    parts = [text_table(titles, body)]
    pairs = [
        (
            label,
            four_digits(pair.spread.mean),
            _interval(pair.spread),
            "-" if pair.p is None else f"{pair.p:.2g}",
            str(len(pair.seeds)),
        )
        for label, pair in found.differences
        if len(pair.seeds) > 1
    ]
    if pairs:
        heads = ["on the same seeds", "difference", "95 % interval", "p", "seeds"]
        parts.append(text_table(heads, pairs))
    return "\n\n".join(parts)


def _interval(found: Spread) -> str:
    return "-" if found.low is None else f"{four_digits(found.low)} to {four_digits(found.high)}"


def _lacking(one: Setting) -> str:
    counts = {"refused": one.refused, "failed": one.failed}
    said = [f"{count} {what}" for what, count in counts.items() if count]
    return f" ({', '.join(said)})" if said else ""
