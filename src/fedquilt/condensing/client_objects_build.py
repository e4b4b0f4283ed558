"""From a configuration and client objects to the parts of a condensation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.client import FedNumClient
from fedquilt.condense.fednum_arguments import Client
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condensing.build import (
    groups_per_step,
    init_notes,
    make_lens,
    matching_of,
    statistics_notes,
    training_of,
)
from fedquilt.condensing.client_objects import ClientEngine
from fedquilt.condensing.server import CondensingServer
from fedquilt.condensing.training import Trainer
from fedquilt.config import CondenseConfig
from fedquilt.errors import InvalidValueError
from fedquilt.randomness import generator


def make_parts(
    config: CondenseConfig,
    model: nn.Module,
    sample: torch.Tensor,
    clients: Sequence[Client],
    classes: tuple[int, ...],
) -> tuple[ClientEngine, CondensingServer]:
    """Build engine and server; `sample` has the shape and the device of the images."""
    augmentation = Augmentation(config.augmentation)
    lens = make_lens(config, model, sample, augmentation, classes)
    engine = ClientEngine(clients, lens, augmentation, sample.device)
    synthetic = first_images_of(clients, config, sample[0], classes)
    server = CondensingServer(
        Trainer(model, sample, training_of(config), augmentation, config.seed),
        synthetic,
        lens,
        matching_of(config, sample[0].numel(), lens.num_features),
        groups_per_step=groups_per_step(config.batch_num, config.avg_num),
        traffic=lambda: (engine.bytes_up, engine.bytes_down),
        # Where nobody sent anything the round passes and the model stays as it is.
        trains_in=lambda round_index: server.report()["groups"] > 0,
        restarts=config.feature_model == "random_pool",
        seed=config.seed,
    )
    return engine, server


def first_images_of(
    clients: Sequence[Client],
    config: CondenseConfig,
    like: torch.Tensor,
    classes: tuple[int, ...],
) -> SyntheticSet:
    """Return the images to begin with; a class that nobody holds begins with noise."""
    source = generator(config.seed, "first images")
    first = SyntheticSet.random(classes, config.ipc, like.shape, source, like.device)
    if config.init_method != "real_sample":
        return first
    for label, images in zip(first.classes, first.by_class(), strict=True):
        held = torch.cat([_images_of(client, label).to(like.device) for client in clients])
        if len(held):
            chosen = np.resize(source.permutation(len(held)), config.ipc)
            images.copy_(held[torch.from_numpy(chosen).to(like.device)])
    return first


def _images_of(client: Client, label: int) -> torch.Tensor:
    get = getattr(client, "get_images", None)
    if get is None:
        raise InvalidValueError(
            "init_method='real_sample' must be 'random': "
            f"client {client.cid!r} has no get_images(label)"
        )
    images: torch.Tensor = get(label)
    return images


def notes_on(clients: Sequence[Client], init_method: str) -> list[str]:
    """Say what leaves the clients."""
    ours = [c for c in clients if isinstance(c, FedNumClient)]
    known = [c for c in ours if type(c).train is FedNumClient.train]
    notes: list[str] = []
    if known:
        least = min(min(client.min_group, client.avg_num) for client in known)
        notes += statistics_notes(least, "random")
    if len(known) < len(clients):
        notes.append("clients with a train() of their own send what it returns, unchecked")
    return notes + init_notes(init_method)
