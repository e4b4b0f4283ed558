"""Before a run: `fedquilt plan`, what a bound costs; `data`, which data sets are here."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.run import CONFIG, JSON, PRESET, say
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import printable, text_table, wrapped
from fedquilt.config import RunConfig, build_config
from fedquilt.config.modes import MODE_TABLE, NOISED_MODES, recipe_line

if TYPE_CHECKING:
    from fedquilt.privacy.feasibility import Feasibility

PARAMETERS = typer.Option(
    "--parameters", metavar="NUMBER", help="Trained parameters, instead of those of --model."
)
FIGURE = typer.Option("--figure", metavar="FILE", help="Draw noise against size.")


@takes_run_options()
def plan(
    settings: dict[str, Any],
    config: Annotated[str | None, CONFIG] = None,
    preset: Annotated[str | None, PRESET] = None,
    parameters: Annotated[int | None, PARAMETERS] = None,
    figure: Annotated[str | None, FIGURE] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Say what the noise of a run will do to it, and what to change first if it is hopeless.

    Takes the options of `fedquilt run` and describes that run; nothing is trained or spent.
    """
    asked = build_config(settings, preset=preset, file=config)
    if not MODE_TABLE[asked.mode].noised:
        raise InvalidValueError(
            f"mode={asked.mode!r} must be one of {', '.join(map(repr, NOISED_MODES))}: "
            "others add no noise that could be planned"
        )
    # Only now: a configuration that is refused is refused at once.
    from fedquilt.experiment.preflight import (
        cohort_line,
        noise_feasibility,
        secure_line,
        secure_plan,
    )
    from fedquilt.privacy import feasibility as planning
    from fedquilt.setup.task import build_selector

    selector = build_selector(asked, _num_clients(asked))
    made = noise_feasibility(asked, selector, _count(asked) if parameters is None else parameters)
    if figure is not None:
        from fedquilt.report.ledger import plan_figure

        plan_figure(made, figure)
    is_secure = asked.secure_aggregation != "off"
    if as_json:
        masked = {"secure_aggregation": secure_plan(asked, made)} if is_secure else {}
        print(json.dumps({"mode": asked.mode, **dataclasses.asdict(made), **masked}))
        return
    print(planning.plan_table(made))
    recipe = recipe_line({**asked.as_dict(), "num_clients": selector.availability.num_clients})
    who = f"with seed {asked.seed}, {cohort_line(selector)}"
    lines = [who, *([] if recipe is None else [recipe])]
    if is_secure:
        lines.append(secure_line(asked, made))
    print(wrapped("\n".join(["", *lines, _advice(made)]), indent="     "))
    if figure is not None:
        say(f"\nfigure: {figure}")


def _advice(made: Feasibility) -> str:
    listed = (f"  {number}. {text}" for number, text in enumerate(made.advice, 1))
    return "\n".join(["", "advice", *listed])


def _num_clients(asked: RunConfig) -> int:
    if asked.num_clients is None and asked.partition == "writer":
        raise InvalidValueError(
            "num_clients must be said for a plan of partition='writer': the writers are counted "
            "when the data are loaded"
        )
    return asked.num_clients or 100


def _count(asked: RunConfig) -> int:
    """Return how many parameters the noise of a run falls on."""
    from fedquilt.common import checks
    from fedquilt.data import DATASETS
    from fedquilt.models import FeatureModel, make_model
    from fedquilt.training.flat import freeze_others, matches

    spec = DATASETS[checks.choice("dataset", asked.dataset, DATASETS)]
    model = make_model(asked.model, spec.image_shape, spec.num_classes, seed=0)
    if isinstance(model, FeatureModel):
        model = model.on_features()
    freeze_others(model, asked.patterns("trainable"))
    by_layer = MODE_TABLE[asked.mode].by_layer
    layers = asked.patterns("noise_layers") if by_layer else ("all",)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    noised = [
        value.numel()
        for name, value in trained.items()
        if any(layer == "all" or matches(name, layer) for layer in layers)
    ]
    if not noised:
        raise InvalidValueError(
            f"noise_layers={asked.noise_layers!r} must match a parameter; "
            f"the model has {', '.join(trained)}"
        )
    return sum(noised)


def data(
    name: Annotated[str | None, typer.Argument(help="Data set to fetch and verify.")] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", help="Data folders, several joined by ':'.")
    ] = None,
    no_download: Annotated[
        bool, typer.Option("--no-download", help="Only verify what is there.")
    ] = False,
) -> None:
    """List the data sets and where they were found, or fetch and verify one."""
    from fedquilt.data import DATASETS, dataset_status, load_dataset

    if name is not None:
        train, test = load_dataset(name, data_dir, download=not no_download, progress=True)
        shape = "x".join(str(size) for size in train.images.shape[1:])
        print(f"{name}: {len(train)} training and {len(test)} test samples of {shape}, verified")
        return
    found = {key: dataset_status(key, data_dir) for key in DATASETS}
    rows = [(key, printable(status.summary())) for key, status in found.items()]
    say(text_table(["data set", "status"], rows))
    absent = [key for key, status in found.items() if status.missing]
    if absent:
        places = ", ".join(str(folder.absolute()) for folder in found[absent[0]].searched)
        order = "the folders of --data-dir, then of FEDQUILT_DATA, else ./data"
        say("\n" + wrapped(f"looked in {places} ({order})"))
        say(f"fetch one with  fedquilt data {absent[0]}")
