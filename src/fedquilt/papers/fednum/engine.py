"""Step 3 with FedNumClient objects in the place of data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.engine import RoundModels, TableSource, joined
from fedquilt.condense.method import (
    Condensation,
    assemble_condensation,
    begin_images,
    init_notes,
    make_round_models,
    statistics_notes,
    training_of,
)
from fedquilt.condense.statistics import StatisticsTable
from fedquilt.condense.training import Learner
from fedquilt.config import CondenseConfig
from fedquilt.method import Progress
from fedquilt.papers.fednum.arguments import Client
from fedquilt.papers.fednum.client import FedNumClient, table_of
from fedquilt.population import Cohort
from fedquilt.training import ClientIds, ClientUpdate


class ClientEngine(TableSource):
    """Send the models of the round to the client objects, collect what they return.

    Parameters
    ----------
    clients
        Everybody; a cohort names their places here.
    round_models
        The feature models that they receive.
    augmentation
        That of the round models; a client that takes none can only do without.
    device
        Where the server wants what they send.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        round_models: RoundModels,
        augmentation: Augmentation,
        device: torch.device,
    ) -> None:
        self._clients = clients
        self.round_models = round_models
        self._augmented = augmentation.families != ("none",)
        self._device = device
        self.bytes_up = 0
        self.bytes_down = 0
        self.progress: Progress | None = None
        if self._augmented:
            _check_augmentable(clients, augmentation)

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the table of each client of the cohort as a vector, in its order."""
        self.round_models.open(start, round_index)
        self.bytes_up, self.bytes_down = 0, len(cohort) * self.round_models.bytes_down()
        models = range(len(self.round_models.models))
        for place in map(int, cohort):
            client = self._clients[place]
            table = joined([self._ask(client, round_index, number) for number in models])
            bits = self.round_models.row_bits
            self.bytes_up += table.num_bytes(bits)
            size = int(table.counts.sum())
            yield ClientUpdate(place, table.pack(bits).to(self._device), size, math.nan)

    def _ask(self, client: Client, round_index: int, number: int) -> StatisticsTable:
        round_models = self.round_models
        if isinstance(client, FedNumClient):
            # Not how often it was asked, but the round decides: a resumed run goes on alike.
            client.open_round(round_index * len(round_models.models) + number)
        client.receive_model(round_models.models[number])
        if self._augmented:
            client.receive_augmentation(  # type: ignore[attr-defined]
                round_models.transforms[number], round_models.classes
            )
        message = client.train()
        sizes = (round_models.num_features, round_models.num_logits)
        return table_of(message, client.cid, number, round_models.classes, *sizes)


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


def check_contributes(clients: Sequence[Client]) -> None:
    """Raise, before anything is computed, where it is known that nobody will send anything.

    What clients with a `train` of their own send is known only when they have.
    """
    known = [c for c in clients if isinstance(c, FedNumClient) and _groups_as_ours(c)]
    if len(known) == len(clients) and not any(client.sent_classes() for client in known):
        least = min(client.min_group for client in known)
        raise InvalidValueError(
            f"min_group={least} must be smaller: no client holds so many samples of a class, "
            "and nobody would send anything"
        )


def _groups_as_ours(client: FedNumClient) -> bool:
    return type(client).train is FedNumClient.train


def make_fednum(
    config: CondenseConfig,
    model: nn.Module,
    sample: torch.Tensor,
    clients: Sequence[Client],
    classes: tuple[int, ...],
    num_classes: int,
) -> Condensation:
    """Build the method; `sample` has the shape and the device of the images."""
    check_contributes(clients)
    augmentation = Augmentation(config.augmentation)
    round_models = make_round_models(config, model, sample, augmentation, classes)
    engine = ClientEngine(clients, round_models, augmentation, sample.device)

    def images_of(holders: Sequence[Client], label: int) -> torch.Tensor:
        held = [_images_of(client, label, config).to(sample.device) for client in holders]
        return torch.cat(held)

    held_by = ({c: images_of([client], c) for c in client.classes} for client in clients)
    first = begin_images(config, classes, sample, model, held_by, partial(images_of, clients))
    return assemble_condensation(
        config,
        Learner(model, sample, training_of(config), augmentation, config.seed),
        engine,
        first,
        notes=notes_on(clients, config.init_method),
        num_classes=num_classes,
        trains_late=False,
    )


def _images_of(client: Client, label: int, config: CondenseConfig) -> torch.Tensor:
    get = getattr(client, "get_images", None)
    if get is None:
        raise InvalidValueError(
            f"init_method={config.init_method!r} must be 'random': "
            f"client {client.cid!r} has no get_images(label)"
        )
    images: torch.Tensor = get(label)
    return images


def notes_on(clients: Sequence[Client], init_method: str) -> list[str]:
    """Say what leaves the clients."""
    ours = [c for c in clients if isinstance(c, FedNumClient)]
    known = [c for c in ours if _groups_as_ours(c)]
    notes: list[str] = []
    if known:
        least = min(min(client.min_group, client.avg_num) for client in known)
        notes += statistics_notes(least, "random")
    if len(known) < len(clients):
        notes.append("clients with a train() of their own send what it returns, unchecked")
    return notes + init_notes(init_method)
