"""Training a cohort whose clients hold different slices."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.learning import ClientUpdate, Engine, LocalSettings, Task, make_engine
from fedquilt.slicing.losses import class_mask, loss_of_slice
from fedquilt.slicing.slices import Cut, Slicing

_REMEMBERED = 16


class SlicedEngine:
    """Cut the model for each group of clients with the same slice, and train the group.

    A group is one call of an ordinary engine on a small model, so that the clients of
    a tier can run as one program on a GPU.  An update is the vector of the client's
    slice.  Updates come group by group, in the order of the cohort within a group.

    Parameters
    ----------
    slicing : Slicing
        Who holds what.
    task, settings
        As of any engine.
    name : str
        The engine that trains a group: auto, sequential or batched.
    """

    def __init__(self, slicing: Slicing, task: Task, settings: LocalSettings, name: str) -> None:
        self.slicing = slicing
        self.settings = settings
        self._name = name
        mask = class_mask(slicing.model, task) if slicing.method == "heterofl" else None
        self.task = dataclasses.replace(task, class_mask=mask)
        self._engines: OrderedDict[Hashable, Engine] = OrderedDict()
        self._engine(slicing.cut(0, 0))  # an engine that cannot train this is an error now

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the update of each client, as a vector of its slice."""
        for cut, clients in self.slicing.groups(cohort, round_index).items():
            part = self.slicing.place_of(cut).gather(start)
            yield from self._engine(cut).train(part, clients, round_index, learning_rate)

    def _engine(self, cut: Cut) -> Engine:
        key = self.slicing.structure(cut)
        if key not in self._engines:
            model = self.slicing.sub_model(cut)
            loss = loss_of_slice(self.slicing, model)
            self._engines[key] = make_engine(self._name, model, self.task, self.settings, loss)
            if len(self._engines) > _REMEMBERED:
                self._engines.popitem(last=False)[1].close()
        self._engines.move_to_end(key)
        return self._engines[key]

    def close(self) -> None:
        """Close the engines of all slices."""
        for engine in self._engines.values():
            engine.close()
