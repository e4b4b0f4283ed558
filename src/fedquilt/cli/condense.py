"""`fedquilt condense`: clients send statistics, the server grows a synthetic data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import interruptible, optional_drawing, run_observer
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
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.text_table import screen_width
from fedquilt.config import CondenseConfig, RunConfig, build_config
from fedquilt.config.condense import ALIASES, CONDENSE_PRESETS
from fedquilt.config.files import read_beside

if TYPE_CHECKING:
    from fedquilt.record.result import RunResult

BASELINES_OPTION = typer.Option(
    "--baselines", hidden=True, help="Of earlier versions: refused with what replaces it."
)
PRESET_OPTION = typer.Option(
    "--preset", help=f"Settings of a document: {', '.join(CONDENSE_PRESETS)}."
)


@takes_run_options(kind=CondenseConfig, also=ALIASES)
@interruptible("condense")  # also while it loads
def condense(
    settings: dict[str, Any],
    preset: Annotated[str | None, PRESET_OPTION] = None,
    config: Annotated[str | None, CONFIG] = None,
    resume: Annotated[str | None, RESUME] = None,
    tracker: Annotated[str, TRACKER] = "none",
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    baselines: Annotated[str, BASELINES_OPTION] = "none",
) -> None:
    """Grow a synthetic data set on the server from class statistics of the clients."""
    if baselines != "none":
        raise InvalidValueError(
            f"baselines={baselines!r} must be left out: in a clone of fedquilt's repository "
            "`python -m reproduction fednum-baselines RUN` computes them beside a finished run"
        )
    beside = read_beside(config, CondenseConfig.method)
    tracker = beside.get("tracker", "none") if tracker == "none" else tracker
    shown = not quiet and not as_json and not beside.get("quiet", False)
    if resume is not None:
        stands_alone(resume, settings, preset, config)
        wanted = _config_of(resume)
    else:
        wanted = build_config({**settings, "method": "condense"}, preset=preset, file=config)
    from fedquilt.papers.fednum.pictures import draw_pictures
    from fedquilt.record.folder import finite
    from fedquilt.report import condensation_row

    with interruptible("condense") as kept:
        label = f"{wanted.dataset} {wanted.mode}"
        with run_observer(label, shown, tracker, _draw_on_the_way) as observer:
            finished = run_or_resume(wanted, resume, observer)
        kept.folder = finished.folder
        pictures: list[Path] = []
        with optional_drawing("the pictures"):
            pictures = draw_pictures(finished.folder)
    row = condensation_row(finished.result)
    if as_json:
        summary = {**finished.summary(), "table": [row], "pictures": [str(p) for p in pictures]}
        print(json.dumps(finite(summary), allow_nan=False))
    else:
        _print(finished, row, pictures)


def _config_of(resume: str) -> RunConfig:
    from fedquilt.record.folder import RunFolder

    config = RunFolder.open(resume).read_config()
    if not isinstance(config, CondenseConfig):
        raise InvalidValueError(
            f"resume={resume!r} must be a condensation; continue this one with "
            "fedquilt run --resume"
        )
    return config


def _draw_on_the_way(path: Path) -> None:
    """Draw the images of one file; a run goes on without."""
    from fedquilt.papers.fednum.pictures import draw_one

    with optional_drawing(path.with_suffix(".png").name):
        draw_one(path)


def _print(finished: RunResult, row: dict[str, Any], pictures: list[Path]) -> None:
    from fedquilt.record.folder import RunFolder
    from fedquilt.report import condensation_table

    say(condensation_table([row]))
    if finished.result.get("stopped"):
        say(f"\nended after round {finished.result['rounds']}: {finished.result['stopped']}")
    claim = finished.statement.as_text(screen_width())
    say(f"\nWhat may be claimed ({finished.result['mode']})\n{claim}")
    if finished.folder is not None:
        say(f"\nimages    {RunFolder(finished.folder).synthetic_path()}")
        if pictures:
            say(f"pictures  {', '.join(path.name for path in pictures)}")
        say(f"\n{finished.folder}")
    sys.stdout.flush()
