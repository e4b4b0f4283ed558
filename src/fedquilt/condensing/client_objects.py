"""Step 3 when clients are objects: they are handed the models, and asked for statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.client import FedNumClient
from fedquilt.condense.fednum_arguments import Client
from fedquilt.condense.fednum_message import table_of
from fedquilt.condense.table import StatisticsTable
from fedquilt.condensing.engine import joined
from fedquilt.condensing.lens import Lens
from fedquilt.errors import InvalidValueError
from fedquilt.learning import ClientUpdate
from fedquilt.population import Cohort


class ClientEngine:
    """Hand the models of the round to the client objects, take what they return.

    Parameters
    ----------
    clients
        Everybody; a cohort names their places here.
    lens
        What they look through.
    augmentation
        That of the lens; a client that takes none can only do without.
    device
        Where the server wants what they send.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        lens: Lens,
        augmentation: Augmentation,
        device: torch.device,
    ) -> None:
        self._clients = clients
        self._lens = lens
        self._augmented = augmentation.families != ("none",)
        self._device = device
        self.bytes_up = 0
        self.bytes_down = 0
        if self._augmented:
            _check_augmentable(clients, augmentation)

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the table of each client of the cohort as a vector, in its order."""
        self._lens.open(start, round_index)
        self.bytes_up, self.bytes_down = 0, len(cohort) * self._lens.bytes_down()
        models = range(len(self._lens.models))
        for place in map(int, cohort):
            client = self._clients[place]
            table = joined([self._ask(client, round_index, number) for number in models])
            self.bytes_up += table.num_bytes
            size = int(table.counts.sum())
            yield ClientUpdate(place, table.pack().to(self._device), size, math.nan)

    def _ask(self, client: Client, round_index: int, number: int) -> StatisticsTable:
        lens = self._lens
        if isinstance(client, FedNumClient):
            # Not how often it was asked, but the round decides: a resumed run goes on alike.
            client.open_round(round_index * len(lens.models) + number)
        client.receive_model(lens.models[number])
        if self._augmented:
            client.receive_augmentation(  # type: ignore[attr-defined]
                lens.transforms[number], lens.classes
            )
        message = client.train()
        sizes = (lens.num_features, lens.num_logits)
        return table_of(message, client.cid, number, lens.classes, *sizes)

    def close(self) -> None:
        """Hold nothing, give nothing back."""


def _check_augmentable(clients: Iterable[Client], augmentation: Augmentation) -> None:
    for client in clients:
        if not hasattr(client, "receive_augmentation"):
            raise InvalidValueError(
                f"augmentation={augmentation.strategy!r} must be 'none': "
                f"client {client.cid!r} has no receive_augmentation()"
            )


def cohort_of(chosen: Iterable[Client], clients: Iterable[Client]) -> Cohort:
    """Return the places of the chosen clients among all of them."""
    place_of = {id(client): place for place, client in enumerate(clients)}
    found = [place_of.get(id(client), -1) for client in chosen]
    if -1 in found or len(set(found)) < len(found):
        raise InvalidValueError("select_clients() must return clients of the server, each once")
    places = np.array(found, dtype=np.int64)
    return Cohort(places, places)
