"""`fedquilt compare`: several modes, several seeds, one table and one figure."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.progress import drawing, interruptible, watch
from fedquilt.cli.run import CONFIG, JSON, PRESET, QUIET
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import MODES, RunConfig, build_config

if TYPE_CHECKING:
    from fedquilt.record import RunResult

MODES_OPTION = typer.Option("--modes", help="Modes, joined by commas.")
SEEDS_OPTION = typer.Option("--seeds", help="Seeds, joined by commas.")


@takes_run_options("mode", "seed")
def compare(
    settings: dict[str, Any],
    modes: Annotated[str, MODES_OPTION] = ",".join(MODES),
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

    base = build_config(settings, preset=preset, file=config)
    configs = [
        base.replace(mode=mode, seed=seed) for mode in _modes(modes) for seed in parse_seeds(seeds)
    ]
    for mode in dict.fromkeys(one.mode for one in configs):
        build_method(
            *build_problem(base.replace(mode=mode))
        ).close()  # a mistake in the last mode is found at once
    stem = f"compare_{base.dataset}_{time.strftime('%Y%m%d_%H%M%S')}"
    with storage_errors(base.output_dir):
        Path(base.output_dir).mkdir(parents=True, exist_ok=True)
        folder = make_fresh(Path(base.output_dir), stem)
    with interruptible():
        finished = [
            _one(c.replace(output_dir=str(folder)), not quiet and not as_json) for c in configs
        ]
        _report(finished, folder, as_json)


def _one(config: RunConfig, shown: bool) -> RunResult:
    from fedquilt.experiment import run_config

    with watch(f"{config.mode}, seed {config.seed}", shown) as observer:
        return run_config(config, observer)


def _report(finished: list[RunResult], folder: Path, as_json: bool) -> None:
    from fedquilt.report import comparison_table, plot_comparison, render_comparison
    from fedquilt.run_folder import finite

    runs = [one.result for one in finished]
    rows = comparison_table(runs)
    figure = None
    with drawing("comparison.png"):
        figure = str(plot_comparison(runs, str(folder / "comparison.png")))
    record = {"runs": [one.summary() for one in finished], "table": rows, "figure": figure}
    if as_json:
        print(json.dumps(finite(record), allow_nan=False))
        return
    print(render_comparison(rows))
    if figure is not None:
        print(f"\nfigure: {figure}")


def _modes(text: str) -> list[str]:
    return _unique("modes", [checks.choice("modes", m.strip(), MODES) for m in text.split(",")])


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
