"""Clients that train slices of the model, as a `Method` of the round."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import Place
from fedquilt.common.errors import InvalidValueError
from fedquilt.learning import ClientUpdate, Task, public_inputs
from fedquilt.method import MethodParts, WholeModel
from fedquilt.slices.engine import SlicedEngine
from fedquilt.slices.slicing import Slicing, cost_of_everybody, cost_table, make_slicing

_NEED_CLASSES = {
    "heterofl": "hides the classes that a client has no sample of",
    "fjord": "distils class scores from wide to narrow models",
    "depthfl": "distils class scores between exits",
}
"""Methods whose loss is one of classes, and why."""


def refuse_without_classes(what: str, method: str, task: Task) -> None:
    """Raise where a method needs one class a sample, and the task is another."""
    why = _NEED_CLASSES.get(method)
    if why is not None and not task.is_classification:
        raise InvalidValueError(
            f"{what} must be used with one class a sample and loss='cross_entropy', not with "
            f"loss={task.objective.name!r}: it {why}; 'fedrolex', 'dropout', 'mfl', 'smallest' and "
            "'largest' take any loss"
        )


class Slices(WholeModel):
    """Each client trains the slice it can hold; a part moves by those who hold it."""

    holds_parts = True

    def __init__(self, parts: MethodParts) -> None:
        config = parts.config
        if parts.engine is not None:
            raise InvalidValueError(
                f"engine must be a name with method={config.method!r}, which makes an engine for "
                "every slice"
            )
        refuse_without_classes(f"method={config.method!r}", config.method, parts.task)
        sample = parts.task.public().inputs
        self.slicing: Slicing = make_slicing(config, parts.flat, sample, len(parts.task.clients))
        super().__init__(
            parts, SlicedEngine(self.slicing, parts.task, parts.local_settings, config.engine)
        )

    def place(self, client: int, round_index: int) -> Place:
        """Return where a client's slice lies in the whole vector."""
        return self.slicing.place(client, round_index)

    def outgoing(self, weights: torch.Tensor, client: int, round_index: int) -> torch.Tensor:
        """Return the client's slice of the model."""
        return self.slicing.place(client, round_index).gather(weights)

    def work(
        self, sent: torch.Tensor, client: int, round_index: int, learning_rate: float
    ) -> ClientUpdate:
        """Train the slice that was sent; the rest of the model is nowhere used."""
        place = self.slicing.place(client, round_index)
        whole = sent.new_zeros(place.whole_size)
        place.scatter_(whole, sent)
        return super().work(whole, client, round_index, learning_rate)

    def update_size(self, client: int, round_index: int) -> int | None:
        """Return the size of the client's slice."""
        return self.slicing.place(client, round_index).size

    def coverage(self, clients: NDArray[np.int64], round_index: int) -> torch.Tensor:
        """Return the share of clients that hold each coordinate."""
        return self.slicing.coverage(clients, round_index)

    def result(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what a client of each width sends, receives and computes."""
        return {"slices": cost_table(self.slicing)}


class Smallest(WholeModel):
    """Everybody trains the model that even the weakest client can hold."""

    def __init__(self, parts: MethodParts, width: str) -> None:
        super().__init__(parts)
        self._parts, self._width = parts, width

    def result(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what each client sends, receives and computes."""
        flat, task = self._parts.flat, self._parts.task
        sample, count = public_inputs(task.inputs, 1), len(task.clients)
        method = self._parts.config.method
        costs = cost_of_everybody(method, self._width, count, flat.vector, flat.module, sample)
        return {"slices": costs}
