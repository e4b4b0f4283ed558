"""`fedquilt plan`: what a bound costs, before anything is trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from fedquilt.cli.options import parse_count
from fedquilt.cli.run import JSON, say


def plan(
    num_clients: Annotated[int, typer.Option("--num-clients", help="Population.")] = 100,
    clients_per_round: Annotated[
        str, typer.Option("--clients-per-round", metavar="COUNT", help="Expected cohort.")
    ] = "0.3",
    num_rounds: Annotated[int, typer.Option("--num-rounds", help="Rounds.")] = 200,
    max_joins: Annotated[
        int | None, typer.Option("--max-joins", help="Most joins of a client; absent is rounds.")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option("--parameters", help="Trainable parameters.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Count the parameters of this model instead.")
    ] = "auto",
    dataset: Annotated[str, typer.Option("--dataset", help="Its data set.")] = "digits",
    epsilon: Annotated[float, typer.Option("--epsilon", help="Epsilon of every client.")] = 3.0,
    delta: Annotated[float, typer.Option("--delta", help="Its delta.")] = 1e-5,
    adjacency: Annotated[
        str, typer.Option("--adjacency", help="What it compares: zero_out or replace_one.")
    ] = "zero_out",
    clip_norm: Annotated[float, typer.Option("--clip-norm", help="Clip bound.")] = 1.0,
    amplification: Annotated[
        bool, typer.Option("--amplification", help="Cohorts by a secret Poisson coin.")
    ] = False,
    figure: Annotated[
        str | None, typer.Option("--figure", metavar="FILE", help="Draw noise against size.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Say what a bound for every client takes, and what to change first if it is hopeless."""
    from fedquilt.common import checks
    from fedquilt.common.errors import InvalidValueError
    from fedquilt.config.choices import ADJACENCIES
    from fedquilt.privacy import feasibility as planning

    checks.choice("adjacency", adjacency, ADJACENCIES)
    size = parse_count(clients_per_round)
    cohort = size * num_clients if isinstance(size, float) else size
    if 0 < cohort * num_rounds < 1:
        raise InvalidValueError(
            f"clients_per_round={clients_per_round} must let at least one client join in "
            f"num_rounds={num_rounds} rounds of num_clients={num_clients}, "
            f"not {cohort * num_rounds:.3g}"
        )
    made = planning.plan(
        population=num_clients,
        rounds=num_rounds,
        epsilon=epsilon,
        delta=delta,
        parameters=_count(model, dataset) if parameters is None else parameters,
        joins=max_joins,
        cohort=cohort,
        clip_norm=clip_norm,
        sampling_rate=cohort / num_clients if amplification else 1.0,
        adjacency=adjacency,
    )
    if figure is not None:
        planning.plan_figure(made, figure)
    if as_json:
        print(json.dumps(dataclasses.asdict(made)))
        return
    print(planning.plan_table(made))
    print(
        "\n".join(
            ["", "advice", *(f"  {number}. {text}" for number, text in enumerate(made.advice, 1))]
        )
    )
    if figure is not None:
        say(f"\nfigure: {figure}")


def _count(model: str, dataset: str) -> int:
    """Return the number of trainable parameters of a model for a data set."""
    from fedquilt.common import checks
    from fedquilt.data import DATASETS
    from fedquilt.models import make_model

    spec = DATASETS[checks.choice("dataset", dataset, DATASETS)]
    built = make_model(model, spec.image_shape, spec.num_classes, seed=0)
    return sum(p.numel() for p in built.parameters() if p.requires_grad)
