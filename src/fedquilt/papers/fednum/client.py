"""FedNumClient: samples in, a table of class statistics out."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Transform
from fedquilt.condense.embeds import embedding_model, frozen_copy
from fedquilt.condense.statistics import BATCH, Groups, StatisticsTable, group_means, make_groups
from fedquilt.papers.fednum.arguments import ImageInfo, checked_device

__all__ = ["FedNumClient", "ImageInfo", "checked_device", "table_of"]


def table_of(
    message: object,
    cid: int | str,
    number: int,
    classes: Sequence[int],
    num_features: int,
    num_logits: int,
) -> StatisticsTable:
    """Check what a client's `train` returned and lay its classes out in one table.

    `number` is that of the feature model.  Without "counts" every group counts alike, as
    in the reference; logits are left behind where `num_logits` is 0.
    """
    who = f"train() of client {cid!r}"
    if not isinstance(message, Mapping) or not {"classes", "avg_features"} <= message.keys():
        raise InvalidValueError(f"{who} must return a dictionary with 'classes' and 'avg_features'")
    none = torch.zeros(0)
    parts = [(none, none, none.view(0, num_features), none.view(0, num_logits))]
    for label in message["classes"]:
        if label not in classes:
            raise InvalidValueError(f"{who}: class {label!r} must be one of {tuple(classes)}")
        if _is_empty(message["avg_features"], label):
            continue  # the published client lists classes that it has no samples of
        parts.append(_groups_of(message, label, who, num_features, num_logits))
    labels, counts, features, logits = (torch.cat(part) for part in zip(*parts, strict=True))
    labels = labels.to(torch.int64)
    models = torch.full_like(labels, number)
    return StatisticsTable(models, labels, counts.to(torch.int64), features, logits)


def _is_empty(features: object, label: int) -> bool:
    """Tell whether a message has no groups of a class that it lists."""
    if not isinstance(features, Mapping):
        return False
    return label not in features or (
        isinstance(features[label], Sized) and len(features[label]) == 0
    )


def _groups_of(
    message: Mapping[str, Any], label: int, who: str, num_features: int, num_logits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return label, count, features and logits of each group of a class."""
    features = _part(message, "avg_features", label, who, (-1, num_features))
    groups = len(features)
    logits, counts = torch.zeros(groups, 0), torch.ones(groups)
    if num_logits:
        logits = _part(message, "avg_logits", label, who, (groups, num_logits))
    if "counts" in message:
        counts = _part(message, "counts", label, who, (groups,))
    if not bool((counts >= 1).all()):
        raise InvalidValueError(f"{who}: 'counts'[{label}]={counts.tolist()} must be >= 1")
    return torch.full((groups,), float(label)), counts, features, logits


def _part(
    message: Mapping[str, Any], key: str, label: int, who: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return one tensor of a message in float32 on the CPU; -1 in `shape` is any length."""
    try:
        part = torch.as_tensor(message[key][label]).detach().to("cpu", torch.float32)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidValueError(
            f"{who} must return a tensor as {key!r}[{label!r}]: {error!r}"
        ) from error
    if part.ndim != len(shape) or any(
        wanted not in (-1, size) for size, wanted in zip(part.shape, shape, strict=True)
    ):
        raise InvalidValueError(
            f"{who}: {key!r}[{label}] of shape {tuple(part.shape)} must have shape {shape}"
        )
    return part


def checked_classes(classes: object, num_classes: int) -> list[int]:
    """Return labels ascending, each once, or raise where they are none."""
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise InvalidValueError(f"classes={classes!r} must be a list of labels")
    labels = {
        checks.integer("classes", label, at_least=0, at_most=num_classes - 1) for label in classes
    }
    return sorted(labels)


def read_samples(train_set: object, info: ImageInfo) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return all images as one float32 tensor, and their labels; none at all is allowed."""
    images, labels = _images_and_labels(train_set, info)
    if len(images) != len(labels) or (len(images) and images.shape[1:] != info.shape):
        raise InvalidValueError(
            f"train_set with images of shape {tuple(images.shape)} and {len(labels)} labels must "
            f"have one label an image, and images of shape {info.shape} as dataset_info says"
        )
    if not bool(torch.isfinite(images).all()):
        raise InvalidValueError("train_set must hold finite numbers; it holds NaN or infinity")
    return images.reshape(-1, *info.shape), labels


def _images_and_labels(train_set: Any, info: ImageInfo) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return images and labels of a train set in any of its forms."""
    if isinstance(train_set, tuple | list) and len(train_set) == 2 and _is_array(train_set[0]):
        return _as_images(train_set[0]), _as_labels(train_set[1])
    if _is_array(getattr(train_set, "images", None)) and hasattr(train_set, "targets"):
        return _as_images(train_set.images), _as_labels(train_set.targets)
    by_class = getattr(train_set, "indices_class", None)
    if _is_array(getattr(train_set, "images_all", None)) and isinstance(by_class, Mapping):
        return _of_classes(train_set.images_all, by_class)
    if isinstance(train_set, Sized) and hasattr(train_set, "__getitem__"):
        return _one_by_one(train_set, info.shape)
    raise InvalidValueError(
        f"train_set of type {type(train_set).__name__} must be a pair (images, labels), have "
        "images and targets, or images_all and indices_class, or have a length and "
        "[i] -> (tensor, int)"
    )


def _of_classes(images: Any, by_class: Mapping[Any, Any]) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Read a set that lists the places of its images by class, as `PerLabelDatasetNonIID` does."""
    places = {operator.index(label): _as_labels(list(at)) for label, at in by_class.items()}
    order = np.concatenate([np.zeros(0, dtype=np.int64), *places.values()])
    labels = np.repeat(list(places), [len(at) for at in places.values()]).astype(np.int64)
    return _as_images(images)[torch.from_numpy(order)], labels


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _as_images(images: Any) -> torch.Tensor:
    tensor = torch.as_tensor(images).detach()
    if tensor.is_complex():
        raise InvalidValueError(f"train_set of type {tensor.dtype} must hold real numbers")
    return tensor.to("cpu", torch.float32)


def _as_labels(labels: Any) -> NDArray[np.int64]:
    array = np.asarray(labels.cpu() if isinstance(labels, torch.Tensor) else labels)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidValueError(
            f"train_set labels of shape {array.shape} and type {array.dtype} must be one whole "
            "number an image"
        )
    return array.astype(np.int64)


def _one_by_one(samples: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, NDArray[np.int64]]:
    images = torch.empty(len(samples), *shape)
    labels = np.empty(len(samples), dtype=np.int64)
    for i in range(len(samples)):
        try:
            image, label = samples[i]
            labels[i] = operator.index(label)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise InvalidValueError(
                f"train_set[{i}] must be a pair (tensor, int): {error}"
            ) from error
        images[i] = _image_of_sample(image, i, shape)
    return images, labels


def _image_of_sample(image: object, i: int, shape: tuple[int, ...]) -> torch.Tensor:
    read = _as_images(image) if _is_array(image) else None
    if read is None or read.shape != shape:
        found = type(image).__name__ if read is None else f"shape {tuple(read.shape)}"
        raise InvalidValueError(
            f"train_set[{i}] of {found} must be a tensor of shape {shape}, as dataset_info says"
        )
    return read


class FedNumClient:
    """A client that never trains.

    Parameters
    ----------
    cid
        Name of the client, a number or a text.
    train_set
        Its samples: a pair (images, labels) of tensors or arrays, an object with
        `images` and `targets`, one with `images_all` and `indices_class` (the published
        `PerLabelDatasetNonIID`), or anything with `len` and `[i] -> (tensor, int)`; it is
        read once.  Images are [C, H, W] and normalised.
    classes
        The labels it holds, any whole numbers below `num_classes`.  A label without
        samples is never sent, samples of a label that is not listed are never used.
    dataset_info
        See `ImageInfo`.
    ipc, rho
        Accepted for compatibility with the published FedNum code; not used.
    avg_num, min_group, max_samples
        How samples are grouped, see `fedquilt.condense.statistics.make_groups`.
    device
        Where its images lie and its statistics are computed.
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
        self.ipc = checks.integer("ipc", ipc, at_least=1)
        self.rho = checks.number("rho", rho, at_least=0)
        self.avg_num = checks.integer("avg_num", avg_num, at_least=1)
        self.min_group = checks.integer("min_group", min_group, at_least=1)
        self.max_samples = checks.integer("max_samples", max_samples, at_least=0)
        self.seed = checks.integer("seed", seed, at_least=0)
        self.batch_size = checks.integer("batch_size", batch_size, at_least=1)
        self.device = checked_device(device)
        self.train_set = train_set
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
        """Return how many samples it uses."""
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
        """Set the number of the next call of `train`: equal numbers shuffle alike."""
        self._turn = checks.integer("turn", turn, at_least=0)

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

    def sent_classes(self) -> list[int]:
        """Return the classes that `train` sends: those with `min_group` samples or more."""
        return [int(label) for label in np.unique(self._groups().classes)]

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
