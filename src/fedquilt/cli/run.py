"""`fedquilt run`: one mode, one seed; `condense`: statistics in, a synthetic data set out."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import interruptible, optional_drawing, run_observer
from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable_lines, screen_width, wrapped
from fedquilt.common.observer import Observer, Observers, as_observer
from fedquilt.config import CondenseConfig, RunConfig, build_config
from fedquilt.config.choices import FLOWER_ENGINES
from fedquilt.config.condense import ALIASES, CONDENSE_PRESETS
from fedquilt.config.files import read_beside

if TYPE_CHECKING:
    from fedquilt.record.result import RunResult

CONFIG = typer.Option("--config", metavar="FILE.toml", help="Read settings from a TOML file.")
PRESET = typer.Option(
    "--preset", metavar="NAME", help="The QuAP-FL paper's: paper-mnist or paper-cifar10."
)
JSON = typer.Option("--json", metavar="", help="Print one JSON object and nothing else.")
QUIET = typer.Option("--quiet", metavar="", help="Show no progress.")
STATEMENT = typer.Option(
    "--statement", metavar="", help="Print the whole privacy statement too.", hidden=True
)
TRACKER = typer.Option(
    "--tracker", metavar="NAMES", help="Log to wandb,tensorboard,mlflow too.", show_default=False
)
MONITOR = typer.Option("--monitor", metavar="", help="Measure what it uses, by round and tier.")
RESUME = typer.Option("--resume", metavar="RUN_FOLDER", help="Continue a run that was stopped.")


@takes_run_options()
def run(
    settings: dict[str, Any],
    config: Annotated[str | None, CONFIG] = None,
    preset: Annotated[str | None, PRESET] = None,
    resume: Annotated[str | None, RESUME] = None,
    tracker: Annotated[str, TRACKER] = "none",
    monitor: Annotated[bool, MONITOR] = False,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
    statement: Annotated[bool, STATEMENT] = False,
) -> None:
    """Train a federated model on this machine, and say what may be claimed about it.

    Without options: a linear head on scikit-learn's digits, 100 simulated clients, epsilon 6
    for every one of them.
    """
    beside = read_beside(config)
    tracker = beside.get("tracker", "none") if tracker == "none" else tracker
    shown = not quiet and not as_json and not beside.get("quiet", False)
    with interruptible() as kept:
        finished = _run(settings, config, preset, resume, shown, tracker, monitor)
        kept.folder = finished.folder
        with optional_drawing("training.png"):
            draw_history(finished)
        if monitor and finished.folder is not None:
            from fedquilt.report.training_figure import plot_usage

            with optional_drawing("monitor.png"):
                plot_usage(finished.folder)
    if as_json:
        print(json.dumps(finished.summary(), allow_nan=False))
    else:
        _print(finished, statement)


def _run(
    settings: dict[str, Any],
    config: str | None,
    preset: str | None,
    resume: str | None,
    shown: bool,
    tracker: str,
    monitor: bool = False,
) -> RunResult:
    if resume is None:
        wanted = build_config(settings, preset=preset, file=config)
        label = f"{wanted.dataset} {wanted.mode}"
    else:
        from fedquilt.record.folder import RunFolder

        stands_alone(resume, settings, config, preset)
        wanted, label = RunFolder.open(resume).read_config(), Path(resume).name
    with (
        run_observer(label, shown, tracker) as shows,
        _monitored(monitor, shows) as observer,
    ):
        return run_or_resume(wanted, resume, observer)


@contextmanager
def _monitored(monitor: bool, observer: Observer | None) -> Iterator[Observer | None]:
    """Yield an observer that also measures what the run uses, if that is wanted."""
    if not monitor:
        yield observer
        return
    optional.require("psutil", "--monitor")
    from fedquilt.observe.monitors import RoundMonitor

    with RoundMonitor() as measures:
        yield Observers(as_observer(observer), measures)


@contextmanager
def loading() -> Iterator[None]:
    """Import within it: modules make objects by the hundred thousand and no garbage.

    A collection goes through all of them several times while they load, a fifth of a second in
    all; afterwards they are set aside, so that no collection of the run looks at them again.
    Once torch is there, there is nothing of the kind to do.
    """
    if "torch" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def run_or_resume(config: RunConfig, resume: str | None, observer: Observer | None) -> RunResult:
    """Run what a configuration describes, or continue a folder, with the engine that it names."""
    with loading():
        from fedquilt.experiment.api import resume_run, run_config

    if config.engine in FLOWER_ENGINES:
        optional.require("flwr", f"engine={config.engine!r}")
        from fedquilt.flower.simulate import simulate

        return simulate(config, observer, resume=resume)
    return run_config(config, observer) if resume is None else resume_run(resume, observer)


def say(text: object) -> None:
    """Print text that may hold names from files: line ends stay, control characters do not."""
    print(printable_lines(text))


def tell(text: object) -> None:
    """Print prose so, broken at words to fit the screen."""
    print(wrapped(printable_lines(text), indent="  "), flush=True)


def stands_alone(resume: str, *given: object) -> None:
    """Refuse settings beside --resume."""
    if any(given):
        raise InvalidValueError(
            f"resume={resume!r} must stand alone: a run goes on with its own settings"
        )


def draw_history(finished: RunResult) -> Path | None:
    """Draw training.png in the run's folder, unless it is there already.

    Its dashed lines stand at the run's own epsilon and target accuracy.
    """
    from fedquilt.config import VISUALIZATION_CONFIG
    from fedquilt.report import plot_training_history

    if finished.folder is None:
        return None
    path = finished.folder / "training.png"
    if not path.exists():
        metadata = finished.result["metadata"]
        settings = metadata["hyperparameters"]
        wanted = ("epsilon", "target_accuracy", "mode", "method")
        own = {key: settings.get(key) for key in wanted}
        plot_training_history(
            finished.result["history"],
            metadata["dataset"],
            metadata["seed"],
            {**VISUALIZATION_CONFIG, **own},
            str(path),
        )
    return path


def closing_lines(finished: RunResult) -> list[tuple[str, str]]:
    """Return what a run ends with: headline, claim, where it is kept, what comes next."""
    result, folder = finished.result, finished.folder
    name, value = next(iter(finished.metrics.items()), ("measured", None))
    measured = "nothing" if value is None else f"{value:.4f}"
    lines = [(name, f"{measured} after round {result['rounds']}")]
    if result.get("stopped"):
        lines.append(("ended", f"after round {result['rounds']}: {result['stopped']}"))
    lines.append(("claim", finished.statement.claim))
    lifetime = [note for note in finished.statement.notes if note.startswith("lifetime: ")]
    lines += [("lifetime", note.partition(": ")[2]) for note in lifetime]
    if folder is not None:
        lines.append(("folder", str(folder)))
        ledger = result.get("ledger")
        if ledger is not None and Path(ledger["ledger"]).parent != folder:
            lines.append(("ledger", _ledger_words(ledger)))
        lines.append(("next", f"fedquilt report {shlex.quote(str(folder))}"))
    return lines


def _ledger_words(record: dict[str, Any]) -> str:
    """Say which account the run is in, and whether it is a new one."""
    new = {"ledger": " (both new)", "population": " (new population)"}.get(
        record.get("created") or "", ""
    )
    joined = record.get("enrolled") or 0
    if joined and not new:
        new = f" ({joined} clients new)"
    return f"{record['ledger']}, population {record['population']}{new}"


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _print(finished: RunResult, statement: bool) -> None:
    from fedquilt.report import slices_table

    if "slices" in finished.result:
        say(f"{slices_table(finished.result['slices'])}\n")
    colour = typer.colors.GREEN if finished.statement.is_bounded else typer.colors.RED
    for name, text in closing_lines(finished):
        line = wrapped(f"{name:<9} {printable_lines(text)}", indent=" " * 10)
        print(typer.style(line, fg=colour) if name == "claim" and _coloured() else line)
    if statement:
        claim = finished.statement.as_text(screen_width())
        say(f"\nWhat may be claimed ({finished.result['mode']})\n{claim}")
    sys.stdout.flush()


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
        with run_observer(label, shown, tracker, _Pictures()) as observer:
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
        _print_condensation(finished, row, pictures)


def _config_of(resume: str) -> RunConfig:
    from fedquilt.record.folder import RunFolder

    config = RunFolder.open(resume).read_config()
    if not isinstance(config, CondenseConfig):
        raise InvalidValueError(
            f"resume={resume!r} must be a condensation; continue this one with "
            "fedquilt run --resume"
        )
    return config


class _Pictures(Observer):
    """Draws the images of each file on the way; a run goes on without."""

    def on_artifact(self, path: Path) -> None:
        from fedquilt.papers.fednum.pictures import draw_one

        with optional_drawing(path.with_suffix(".png").name):
            draw_one(path)


def _print_condensation(finished: RunResult, row: dict[str, Any], pictures: list[Path]) -> None:
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
