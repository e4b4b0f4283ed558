"""A client of the FedNum document: it looks at its samples and sends means over groups."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt import validate
from fedquilt.condense.augment import Transform
from fedquilt.condense.embeds import embedding_model, frozen_copy
from fedquilt.condense.groups import Groups, make_groups
from fedquilt.condense.statistics import BATCH, group_means
from fedquilt.condense.table import StatisticsTable
from fedquilt.errors import InvalidValueError, NotReadyError
from fedquilt.randomness import generator


@dataclass(frozen=True)
class ImageInfo:
    """What is taken from the document's `dataset_info`.

    Read are "channel", "img_size" (a side, or height and width) and "num_classes", the
    number of the model's outputs; labels lie below it.  "name" is optional.  All other
    keys ("mean", "std", ...) are left alone: images come normalised.
    """

    shape: tuple[int, int, int]
    num_classes: int
    name: str

    @classmethod
    def read(cls, dataset_info: object) -> ImageInfo:
        """Check the dictionary and take from it what is needed."""
        if not isinstance(dataset_info, Mapping):
            raise InvalidValueError(
                f"dataset_info of type {type(dataset_info).__name__} must be a dictionary with "
                "'channel', 'img_size' and 'num_classes'"
            )
        for key in ("channel", "img_size", "num_classes"):
            if key not in dataset_info:
                raise InvalidValueError(
                    f"dataset_info must have the key {key!r}; it has "
                    f"{sorted(map(str, dataset_info))}"
                )
        size = dataset_info["img_size"]
        sides = tuple(size) if isinstance(size, Sequence) else (size, size)
        if len(sides) != 2:
            raise InvalidValueError(
                f"dataset_info['img_size']={size!r} must be a side or (height, width)"
            )
        height, width = (
            validate.integer("dataset_info['img_size']", side, at_least=1) for side in sides
        )
        channel = validate.integer("dataset_info['channel']", dataset_info["channel"], at_least=1)
        classes = validate.integer(
            "dataset_info['num_classes']", dataset_info["num_classes"], at_least=1
        )
        return cls((channel, height, width), classes, str(dataset_info.get("name", "custom")))


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
        self.classes = _checked_classes(classes, self.info.num_classes)
        images, labels = _read_samples(train_set, self.info)
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


def checked_device(device: torch.device | str) -> torch.device:
    """Return a device that is there, or raise."""
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidValueError(
            f"device={device!r} must be a device that torch finds here: {reason}"
        ) from error
    if chosen.type == "meta":
        raise InvalidValueError(f"device={device!r} must be a device that holds numbers")
    return chosen


def _checked_classes(classes: object, num_classes: int) -> list[int]:
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise InvalidValueError(f"classes={classes!r} must be a list of labels")
    labels = {
        validate.integer("classes", label, at_least=0, at_most=num_classes - 1) for label in classes
    }
    return sorted(labels)


def _read_samples(train_set: Any, info: ImageInfo) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Return all images as one float32 tensor, and their labels; none at all is allowed."""
    if isinstance(train_set, tuple | list) and len(train_set) == 2 and _is_array(train_set[0]):
        images, labels = _as_images(train_set[0]), _as_labels(train_set[1])
    elif _is_array(getattr(train_set, "images", None)) and hasattr(train_set, "targets"):
        images, labels = _as_images(train_set.images), _as_labels(train_set.targets)
    elif isinstance(train_set, Sized) and hasattr(train_set, "__getitem__"):
        images, labels = _one_by_one(train_set, info.shape)
    else:
        raise InvalidValueError(
            f"train_set of type {type(train_set).__name__} must be a pair (images, labels), have "
            "images and targets, or have a length and [i] -> (tensor, int)"
        )
    if len(images) != len(labels) or (len(images) and images.shape[1:] != info.shape):
        raise InvalidValueError(
            f"train_set with images of shape {tuple(images.shape)} and {len(labels)} labels must "
            f"have one label an image, and images of shape {info.shape} as dataset_info says"
        )
    if not bool(torch.isfinite(images).all()):
        raise InvalidValueError("train_set must hold finite numbers; it holds NaN or infinity")
    return images.reshape(-1, *info.shape), labels


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
        read = _as_images(image) if _is_array(image) else None
        if read is None or read.shape != shape:
            found = type(image).__name__ if read is None else f"shape {tuple(read.shape)}"
            raise InvalidValueError(
                f"train_set[{i}] of {found} must be a tensor of shape {shape}, as dataset_info says"
            )
        images[i] = read
    return images, labels


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
    empty = torch.zeros(0)
    labels, counts = [empty], [empty]
    features, logits = [empty.view(0, num_features)], [empty.view(0, num_logits)]
    for label in message["classes"]:
        if label not in classes:
            raise InvalidValueError(f"{who}: class {label!r} must be one of {tuple(classes)}")
        rows = _part(message, "avg_features", label, who, (-1, num_features))
        groups = len(rows)
        features.append(rows)
        labels.append(torch.full((groups,), float(label)))
        scores, sizes = torch.zeros(groups, 0), torch.ones(groups)
        if num_logits:
            scores = _part(message, "avg_logits", label, who, (groups, num_logits))
        if "counts" in message:
            sizes = _part(message, "counts", label, who, (groups,))
        if not bool((sizes >= 1).all()):
            raise InvalidValueError(f"{who}: 'counts'[{label}]={sizes.tolist()} must be >= 1")
        logits.append(scores)
        counts.append(sizes)
    classes_of = torch.cat(labels).to(torch.int64)
    return StatisticsTable(
        torch.full_like(classes_of, number),
        classes_of,
        torch.cat(counts).to(torch.int64),
        torch.cat(features),
        torch.cat(logits),
    )


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
