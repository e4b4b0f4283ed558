"""`fedquilt compare`: several modes, several seeds, one table and one figure."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import drawing, interruptible, watch
from fedquilt.cli.run import CONFIG, JSON, PRESET, QUIET, say
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import MODES, RunConfig, build_config
from fedquilt.config.choices import POLICIES
from fedquilt.config.files import read_beside

if TYPE_CHECKING:
    from fedquilt.record import RunResult

ARMS = ",".join([*(mode for mode in MODES if mode != "certified"), "certified:worst_case"])
ARMS += ",certified"
"""Worst-case accounting beside what the default does, at the same epsilon."""
MODES_OPTION = typer.Option(
    "--modes",
    metavar="NAMES",
    help="Modes, joined by commas; certified may name its policy: certified:worst_case.",
)
SEEDS_OPTION = typer.Option("--seeds", metavar="NUMBERS", help="Seeds, joined by commas.")


@takes_run_options("mode", "seed")
@interruptible()  # also while it loads
def compare(
    settings: dict[str, Any],
    modes: Annotated[str, MODES_OPTION] = ARMS,
    seeds: Annotated[str, SEEDS_OPTION] = "0,1,2",
    config: Annotated[str | None, CONFIG] = None,
    preset: Annotated[str | None, PRESET] = None,
    as_json: Annotated[bool, JSON] = False,
    quiet: Annotated[bool, QUIET] = False,
) -> None:
    """Train the same federation in several modes and lay the results side by side."""
    from fedquilt.assemble import build_method, build_problem
    from fedquilt.common.storage import storage_errors
    from fedquilt.run_folder import make_fresh

    arms = _arms(modes)
    every = tuple({**settings, **arm}["mode"] for arm in arms.values())
    bases = {
        name: build_config({**settings, **arm}, preset=preset, file=config, arms=every)
        for name, arm in arms.items()
    }
    for base in bases.values():
        build_method(*build_problem(base)).close()  # a mistake in the last is found at once
    configs = [(name, b.replace(seed=seed)) for name, b in bases.items() for seed in _seeds(seeds)]
    stem = f"compare_{base.dataset}_{time.strftime('%Y%m%d_%H%M%S')}"
    with storage_errors(base.output_dir):
        Path(base.output_dir).mkdir(parents=True, exist_ok=True)
        folder = make_fresh(Path(base.output_dir), stem)
    with interruptible():
        shown = not quiet and not as_json and not read_beside(config).get("quiet", False)
        finished = [(n, _one(n, c.replace(output_dir=str(folder)), shown)) for n, c in configs]
        _report(finished, folder, as_json)


def _one(name: str, config: RunConfig, shown: bool) -> RunResult:
    from fedquilt.experiment import run_config

    with watch(f"{name}, seed {config.seed}", shown) as observer:
        return run_config(config, observer)


def _report(finished: list[tuple[str, RunResult]], folder: Path, as_json: bool) -> None:
    from fedquilt.report import comparison_table, plot_comparison, render_comparison
    from fedquilt.run_folder import finite

    runs = [{**one.result, "mode": name} for name, one in finished]
    rows = comparison_table(runs)
    figure = None
    with drawing("comparison.png"):
        figure = str(plot_comparison(runs, str(folder / "comparison.png")))
    summaries = [one.summary() for _, one in finished]
    record = {"runs": summaries, "table": rows, "figure": figure}
    if as_json:
        print(json.dumps(finite(record), allow_nan=False))
        return
    say(render_comparison(rows))
    if figure is not None:
        say(f"\nfigure: {figure}")


def _arms(text: str) -> dict[str, dict[str, str]]:
    """Return what each arm of the comparison sets, by its name."""
    arms: dict[str, dict[str, str]] = {}
    for name in _unique("modes", [part.strip() for part in text.split(",")]):
        mode, colon, policy = name.partition(":")
        arms[name] = {"mode": checks.choice("modes", mode, MODES)}
        if colon:
            if mode != "certified":
                raise InvalidValueError(f"modes={name!r} must be 'certified' to name a policy")
            arms[name]["policy"] = checks.choice("modes", policy, POLICIES)
    return arms


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidValueError(f"seeds={text!r} must be whole numbers joined by commas") from None
    return _unique("seeds", [checks.integer("seeds", number, at_least=0) for number in numbers])


def _unique(name: str, items: list[Any]) -> list[Any]:
    if len(set(items)) != len(items):
        raise InvalidValueError(f"{name}={items!r} must not repeat an entry")
    return items
