"""`fedquilt condense`: clients send statistics, the server grows a synthetic data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import drawing, interruptible, watch
from fedquilt.cli.run import (
    CONFIG,
    JSON,
    QUIET,
    RESUME,
    TRACKER,
    run_or_resume,
    say,
    stands_alone,
)
from fedquilt.cli.screen import screen_width
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import CondenseConfig, RunConfig, build_config
from fedquilt.config.choices import BASELINES, RELEASE_USES
from fedquilt.config.condense import (
    ALIASES,
    COMMON_OF_CONDENSE,
    CONDENSE_PRESETS,
    NOT_FOR_CONDENSE,
)
from fedquilt.config.files import read_beside

if TYPE_CHECKING:
    from fedquilt.record import RunResult

BASELINE_OPTION = typer.Option(
    "--baselines",
    help=f"What stands beside it, joined by commas: {', '.join(BASELINES)}, for certified "
    f"{', '.join(RELEASE_USES)}; all, or none.",
    show_default="coreset,fedavg; head for certified",
)
PRESET_OPTION = typer.Option(
    "--preset", help=f"Settings of a document: {', '.join(CONDENSE_PRESETS)}."
)
_USUAL = ("coreset", "fedavg")
_USUAL_BOUNDED = ("head",)  # networks from scratch take minutes on a CPU


@takes_run_options(*NOT_FOR_CONDENSE, kind=CondenseConfig, also=ALIASES, common=COMMON_OF_CONDENSE)
@interruptible("condense")  # also while it loads
def condense(
    settings: dict[str, Any],
    preset: Annotated[str | None, PRESET_OPTION] = None,
    config: Annotated[str | None, CONFIG] = None,
    baselines: Annotated[str | None, BASELINE_OPTION] = None,
    resume: Annotated[str | None, RESUME] = None,
    tracker: Annotated[str, TRACKER] = "none",
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
) -> None:
    """Grow a synthetic data set on the server from class statistics of the clients."""
    from fedquilt.fednum.baselines import baseline_row, condensation_row
    from fedquilt.fednum.pictures import draw_pictures
    from fedquilt.run_folder import RunFolder, finite

    beside = read_beside(config, CondenseConfig.method)
    tracker = beside.get("tracker", "none") if tracker == "none" else tracker
    shown = not quiet and not as_json and not beside.get("quiet", False)
    if resume is not None:
        stands_alone(resume, settings, preset, config)
        wanted = _config_of(resume)
    else:
        beside_it = BASELINES if baselines == "all" else (baselines or "").split(",")
        wanted = build_config(
            {**settings, "method": "condense"}, preset=preset, file=config, baselines=beside_it
        )
    names = _baseline_names(baselines, wanted)
    if resume is not None and baselines is None:
        asked = RunFolder.open(resume).wanted_baselines()
        names = names if asked is None else asked

    def remember(folder: Path) -> None:
        if resume is None:
            RunFolder(folder).write_baselines({}, names)

    with interruptible("condense") as kept:
        with watch(_label(wanted), shown, tracker, _draw_on_the_way, remember) as observer:
            finished = run_or_resume(wanted, resume, observer)
        kept.folder = finished.folder
        pictures: list[Path] = []
        with drawing("the pictures"):
            pictures = draw_pictures(finished.folder)
        rows = [condensation_row(finished)]
        for name in names:
            with watch(f"{wanted.dataset} {name}", shown) as observer:
                working = None if observer is None else observer.working
                rows.append(baseline_row(name, finished, working))
    if as_json:
        summary = {**finished.summary(), "table": rows, "pictures": [str(p) for p in pictures]}
        print(json.dumps(finite(summary), allow_nan=False))
    else:
        _print(finished, rows, pictures)


def _config_of(resume: str) -> RunConfig:
    from fedquilt.run_folder import RunFolder

    config = RunFolder.open(resume).read_config()
    if not isinstance(config, CondenseConfig):
        raise InvalidValueError(
            f"resume={resume!r} must be a condensation; continue this one with "
            "fedquilt run --resume"
        )
    return config


def _label(config: RunConfig) -> str:
    return f"{config.dataset} {config.mode}"


def _baseline_names(text: str | None, config: RunConfig) -> list[str]:
    """Return the rows that are asked for.

    Beside a run that is bounded there is the head that it released, and no baselines unless
    asked for: they read the clients' data, and their accuracies are covered by no claim.
    """
    bounded = config.is_bounded(covered=True)
    if text is None:
        from fedquilt.data import DATASETS

        # None beside somebody's own data: they cannot be loaded by name.
        theirs = config.dataset not in DATASETS
        return [] if theirs else list(_USUAL_BOUNDED if bounded else _USUAL)
    if text == "none":
        return []
    possible = (*RELEASE_USES, *BASELINES) if bounded else BASELINES
    if text == "all":
        return list(possible)
    names = [checks.choice("baselines", part.strip(), possible) for part in text.split(",")]
    if len(set(names)) != len(names):
        raise InvalidValueError(f"baselines={text!r} must not repeat a name")
    return names


def _draw_on_the_way(path: Path) -> None:
    """Draw the images of one file; a run goes on without."""
    from fedquilt.fednum.pictures import draw_one

    with drawing(path.with_suffix(".png").name):
        draw_one(path)


def _print(finished: RunResult, rows: list[dict[str, Any]], pictures: list[Path]) -> None:
    from fedquilt.report import condensation_table
    from fedquilt.run_folder import RunFolder

    say(condensation_table(rows))
    if finished.result.get("stopped"):
        say(f"\nended after round {finished.result['rounds']}: {finished.result['stopped']}")
    beside = [row["name"] for row in rows[1:] if row["name"] not in RELEASE_USES]
    if finished.statement.is_bounded and beside:
        say(f"\nNot covered by the claim below, computed from raw data: {', '.join(beside)}")
    claim = finished.statement.as_text(screen_width())
    say(f"\nWhat may be claimed ({finished.result['mode']})\n{claim}")
    if finished.folder is not None:
        say(f"\nimages    {RunFolder(finished.folder).synthetic_path()}")
        if pictures:
            say(f"pictures  {', '.join(path.name for path in pictures)}")
        say(f"\n{finished.folder}")
    sys.stdout.flush()
