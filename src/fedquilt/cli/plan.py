"""`fedquilt plan`: what a bound costs, before anything is trained."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquilt.cli.options import takes_run_options
from fedquilt.cli.run import CONFIG, JSON, PRESET, say
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.text_table import wrapped
from fedquilt.config import RunConfig, build_config
from fedquilt.config.modes import MODE_TABLE, NOISED_MODES

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
    from fedquilt.experiment.preflight import cohort_line, noise_feasibility
    from fedquilt.privacy import feasibility as planning
    from fedquilt.setup.task import build_selector

    selector = build_selector(asked, _num_clients(asked))
    made = noise_feasibility(asked, selector, _count(asked) if parameters is None else parameters)
    if figure is not None:
        from fedquilt.report.plan import plan_figure

        plan_figure(made, figure)
    if as_json:
        print(json.dumps({"mode": asked.mode, **dataclasses.asdict(made)}))
        return
    print(planning.plan_table(made))
    print(wrapped(f"\n{cohort_line(selector)}\n{_advice(made)}", indent="     "))
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
