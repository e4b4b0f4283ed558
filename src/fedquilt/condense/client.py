"""A client of the FedNum document: it looks at its samples and sends means over groups."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt import validate
from fedquilt.condense.augment import Transform
from fedquilt.condense.embeds import embedding_model, frozen_copy
from fedquilt.condense.fednum_info import ImageInfo, checked_device
from fedquilt.condense.fednum_message import table_of
from fedquilt.condense.fednum_samples import checked_classes, read_samples
from fedquilt.condense.groups import Groups, make_groups
from fedquilt.condense.statistics import BATCH, group_means
from fedquilt.errors import NotReadyError
from fedquilt.randomness import generator

__all__ = ["FedNumClient", "ImageInfo", "checked_device", "table_of"]


class FedNumClient:
    """A client that never trains.

    Parameters
    ----------
    cid
        Name of the client, a number or a text.
    train_set
        Its samples: a pair (images, labels) of tensors or arrays, an object with
        `images` and `targets`, or anything with `len` and `[i] -> (tensor, int)`; it is
        read once.  Images are [C, H, W] and normalised.
    classes
        The labels it holds, any whole numbers below `num_classes`.  A label without
        samples is never sent, samples of a label that is not listed are never looked at.
    dataset_info
        See `ImageInfo`.
    ipc, rho
        Of the document's signature; a client does nothing with them.
    avg_num, min_group, max_samples
        How samples are grouped, see `fedquilt.condense.groups.make_groups`.
    device
        Where its images lie and are looked at.
    seed
        Decides, with `cid` and the round, how samples are shuffled.
    batch_size
        Images that go through the model at a time.
    """

    def __init__(
        self,
        cid: int | str,
        train_set: object,
        classes: Iterable[int],
        dataset_info: Mapping[str, Any],
        ipc: int,
        rho: float,
        avg_num: int,
        device: torch.device | str,
        *,
        min_group: int = 8,
        max_samples: int = 0,
        seed: int = 0,
        batch_size: int = BATCH,
    ) -> None:
        self.cid = cid
        self.info = ImageInfo.read(dataset_info)
        self.ipc = validate.integer("ipc", ipc, at_least=1)
        self.rho = validate.number("rho", rho, at_least=0)
        self.avg_num = validate.integer("avg_num", avg_num, at_least=1)
        self.min_group = validate.integer("min_group", min_group, at_least=1)
        self.max_samples = validate.integer("max_samples", max_samples, at_least=0)
        self.seed = validate.integer("seed", seed, at_least=0)
        self.batch_size = validate.integer("batch_size", batch_size, at_least=1)
        self.device = checked_device(device)
        self.classes = checked_classes(classes, self.info.num_classes)
        images, labels = read_samples(train_set, self.info)
        kept = np.flatnonzero(np.isin(labels, self.classes))
        self._images = images[torch.from_numpy(kept)].to(self.device)
        self._labels: NDArray[np.int64] = labels[kept]
        self._model: nn.Module | None = None
        self._transform: Transform | None = None
        self._row_of: dict[int, int] = {}
        self._turn = 0
        self._groups()  # now, and not in round 0, the numbers are found not to fit together

    def __len__(self) -> int:
        """Return how many samples it looks at."""
        return len(self._labels)

    def receive_model(self, model: nn.Module) -> None:
        """Keep a frozen copy of a model that has `embed`, in evaluation mode."""
        self._model = frozen_copy(embedding_model(model)).to(self.device)

    recieve_model = receive_model  # as the reference spells it

    def receive_augmentation(self, transform: Transform, classes: Sequence[int]) -> None:
        """Look at images under an augmentation from now on; row r is for `classes[r]`."""
        self._transform = transform
        self._row_of = {int(label): row for row, label in enumerate(classes)}

    def open_round(self, turn: int) -> None:
        """Say which call of `train` is the next: equal turns shuffle alike."""
        self._turn = validate.integer("turn", turn, at_least=0)

    def train(self) -> dict[str, Any]:
        """Return the statistics of the samples under the received model; nothing is trained.

        Returns
        -------
        dict
            "cid"; "classes", those that are sent; and for each of them c, with G groups,
            "avg_features"[c] [G, D], "avg_logits"[c] [G, K] and "counts"[c] [G], on the
            CPU.  Every call shuffles the samples anew.
        """
        if self._model is None:
            raise NotReadyError(f"client {self.cid!r} must receive_model() before train()")
        groups = self._groups()
        self._turn += 1
        features, logits = group_means(
            self._model,
            self._images,
            torch.from_numpy(groups.order),
            torch.from_numpy(groups.counts),
            transform=self._transform,
            rows=self._rows(groups.order),
            batch_size=self.batch_size,
        )
        places = {int(c): np.flatnonzero(groups.classes == c) for c in np.unique(groups.classes)}
        features, logits = features.cpu(), logits.cpu()
        return {
            "cid": self.cid,
            "classes": list(places),
            "avg_features": {c: features[at] for c, at in places.items()},
            "avg_logits": {c: logits[at] for c, at in places.items()},
            "counts": {c: torch.from_numpy(groups.counts[at]) for c, at in places.items()},
        }

    def get_images(self, label: int) -> torch.Tensor:
        """Return the images of a class as they are, which `init_method="real_sample"` wants."""
        return self._images[torch.from_numpy(np.flatnonzero(self._labels == label))]

    def _groups(self) -> Groups:
        name = zlib.crc32(repr(self.cid).encode())
        source = generator(self.seed, "client groups", name, self._turn)
        return make_groups(self._labels, self.avg_num, self.min_group, source, self.max_samples)

    def _rows(self, order: NDArray[np.int64]) -> torch.Tensor | None:
        if self._transform is None:
            return None
        return torch.tensor([self._row_of[int(c)] for c in self._labels[order]], dtype=torch.int64)
