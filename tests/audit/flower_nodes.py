"""A run of the audit whose clients are Flower nodes of this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hostile_models import CLIENTS, Data
from task_forms import FORMS
from torch import nn

from fedquilt.experiment.loop import Watching
from fedquilt.flower.client_registry import PlaceRegistry
from fedquilt.flower.node import client_app
from fedquilt.flower.server import run_on_grid
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.record.result import RunResult


class _Nodes(InProcessGrid):
    """Nodes whose logs are their own: in the field nobody else reads them."""

    def _answer(self, message: Any) -> list[Any]:
        before = logging.root.manager.disable
        logging.disable()
        try:
            return super()._answer(message)
        finally:
            logging.disable(before)


def on_nodes(
    task: str,
    model: Callable[[], nn.Module],
    data: Data,
    public_data: Data,
    settings: dict[str, Any],
    observer: Watching,
) -> RunResult:
    """Run on nodes that each have one client's data."""
    inputs, targets = FORMS[task](data)

    def held(context: Any) -> tuple[Any, Any]:
        index = data.clients[int(context.node_config["partition-id"])]
        return inputs[index], targets[index]

    options = {name: value for name, value in settings.items() if name != "output_dir"}
    grid = _Nodes(client_app(model, held), CLIENTS)
    return run_on_grid(
        grid,
        PlaceRegistry(grid, CLIENTS),
        model,
        FORMS[task](public_data),
        {**options, "engine": "sequential"},
        FlowerSettings(poll=0.001),
        output_dir=settings["output_dir"],
        observer=observer,
    )
