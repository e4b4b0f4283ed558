"""Samples of any form, read once into tensors that all clients share.

What is understood as data:

| given | read as |
|---|---|
| a pair (inputs, targets) | tensors, arrays, or tuples or dictionaries of them |
| a dictionary of tensors with `labels` (or `label`) | those are the targets, the rest inputs |
| a map-style `Dataset`, a list of samples | each sample such a pair or dictionary |
| a `DataLoader` | its data set's samples in their order, through its `collate_fn` |
| an `ImageDataset` | as it is |

Types are kept where they mean something: whole numbers stay whole (token ids), truth values
stay masks, real numbers become float32.  `uint8` stands for pixels: they are scaled from
0..255 to 0..1, and `Samples.notes` says so.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedquilt.common import checks, trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree

IndexArray = npt.NDArray[np.int64]


def as_labels(labels: object, what: str = "labels") -> IndexArray:
    """Return `labels` (tensor, array or list) as int64 [N], or raise."""
    if isinstance(labels, torch.Tensor):
        labels = labels.detach().cpu()
        # NumPy has no name for some of torch's floating types.
        labels = labels.double().numpy() if labels.is_floating_point() else labels.numpy()
    try:
        array = np.asarray(labels)
    except ValueError as error:
        raise InvalidValueError(f"{what} must be integer labels of shape [N]: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise InvalidValueError(
            f"{what} must be integer labels of shape [N], "
            f"got dtype {array.dtype} of shape {list(array.shape)}"
        )
    result: IndexArray = array.astype(np.int64)
    if len(result) and result.min() < 0:
        first = int(np.argmax(result < 0))
        raise InvalidValueError(f"{what}[{first}]={result[first]} must be >= 0")
    return result


def check_num_clients(num_clients: object, num_samples: int) -> int:
    """Return `num_clients` when each client can have a sample, or raise."""
    count = checks.integer("num_clients", num_clients, at_least=1)
    if count > num_samples:
        raise InvalidValueError(
            f"num_clients={count} must be at most the number of samples, {num_samples}"
        )
    return count


def group_by_owner(
    owner: IndexArray, num_clients: int, rng: np.random.Generator
) -> list[IndexArray]:
    """Return each client's samples, in random order, where sample i belongs to `owner[i]`.

    The arrays are views of one array.
    """
    shuffled = rng.permutation(len(owner)).astype(np.int64, copy=False)
    order = shuffled[np.argsort(owner[shuffled], kind="stable")]
    sizes = np.bincount(owner, minlength=num_clients)
    return np.split(order, np.cumsum(sizes)[:-1])


def samples_by_class(
    labels: IndexArray, rng: np.random.Generator
) -> Sequence[tuple[int, IndexArray]]:
    """Return each class that occurs with its samples in random order, smallest class first."""
    classes, counts = np.unique(labels, return_counts=True)
    order = np.argsort(labels, kind="stable").astype(np.int64, copy=False)
    members = np.split(order, np.cumsum(counts)[:-1])
    return [(int(k), rng.permutation(part)) for k, part in zip(classes, members, strict=True)]


@dataclass(frozen=True, eq=False, repr=False)
class ImageDataset(Dataset[tuple[torch.Tensor, int]]):
    """Samples and labels as two tensors that all clients share; a client is an index array.

    Parameters
    ----------
    images
        float32 [N, C, H, W] and normalised; other data may have any shape [N, ...], and texts
        are int64: the number of each letter.
    targets
        int64 [N], each at least 0 and below `num_classes`.
    name
        The name under which the data set was loaded.
    num_classes
        Number of classes, also of those that no sample has.
    groups
        Who made each sample (the writer of a digit), or None where that is not known.
    group_names
        What these people are called, by their number; None: by the number itself.
    notes
        What the record of a run should say of the data, whatever is in them.
    """

    images: torch.Tensor
    targets: torch.Tensor
    name: str
    num_classes: int
    groups: npt.NDArray[np.int64] | None = None
    group_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        images, targets = self.images, self.targets
        if images.dtype not in (torch.float32, torch.int64) or images.ndim < 1:
            raise InvalidValueError(
                f"images of {self.name!r} must be float32 [N, ...], or int64 where they are texts, "
                f"got {images.dtype} {list(images.shape)}"
            )
        if targets.dtype != torch.int64 or targets.shape != images.shape[:1]:
            raise InvalidValueError(
                f"targets of {self.name!r} must be int64 [{len(images)}], "
                f"got {targets.dtype} {list(targets.shape)}"
            )
        if len(targets) == 0:
            raise InvalidValueError(f"data set {self.name!r} must hold at least one sample")
        _check_range(targets, checks.integer("num_classes", self.num_classes, at_least=1))
        if self.groups is not None and self.groups.shape != (len(images),):
            raise InvalidValueError(
                f"groups of {self.name!r} must have shape [{len(images)}], "
                f"got {list(self.groups.shape)}"
            )
        object.__setattr__(self, "images", images.contiguous())

    def person(self, number: int) -> str:
        """Return what the maker of a sample is called, given the number in `groups`."""
        return str(number) if self.group_names is None else self.group_names[number]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: SupportsIndex) -> tuple[torch.Tensor, int]:
        """Return sample `index` (a view, not a copy) and its label."""
        i = operator.index(index)
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {self.name!r} is out of range, it has {len(self)}")
        return self.images[i], int(self.targets[i])

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.images.shape[1:])
        return (
            f"ImageDataset({self.name!r}, {len(self)} samples {shape}, {self.num_classes} classes)"
        )


def _check_range(targets: torch.Tensor, num_classes: int) -> None:
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= num_classes:
        raise InvalidValueError(
            f"labels must be >= 0 and < num_classes={num_classes}, got {low} to {high}"
        )


LABEL_KEYS = ("labels", "label")
"""The keys under which a dictionary has its targets, as in Hugging Face."""
_PARTS = ("inputs", "targets")
_SCALED = "uint8 {what} are taken for pixels and scaled from 0..255 to 0..1"


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of all samples: trees of tensors, samples first.

    Attributes
    ----------
    inputs, targets
        Tensors, or tuples or dictionaries of them.
    what
        `train` or `test`, for errors.
    num_classes
        How many classes there are, where that is known without looking at labels.
    notes
        What was done to the values.
    """

    inputs: Any
    targets: Any
    what: str
    num_classes: int | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return trees.length(self.targets)


def as_samples(data: object, what: str, *, finite: bool = True) -> Samples:
    """Return data of any understood form as samples.

    Parameters
    ----------
    data
        See the table above.
    what : str
        `train` or `test`: named in every error.
    finite
        Refuse samples with NaN or infinity, naming the first.  Off where a refusal would
        say something about a client whose data are protected.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, ImageDataset):
        return Samples(data.images, data.targets, what, data.num_classes, data.notes)
    inputs, targets = _read(data, what)
    notes: list[str] = []
    inputs = _tensors(inputs, f"{what} inputs", notes)
    targets = _tensors(targets, f"{what} targets", None)
    _check_lengths(inputs, targets, what)
    if finite:
        _check_finite(inputs, targets, what)
    return Samples(inputs, targets, what, notes=tuple(dict.fromkeys(notes)))


def as_dataset(
    data: object, *, name: str = "custom", num_classes: int | None = None, finite: bool = True
) -> ImageDataset:
    """Return data of classes as an `ImageDataset`; an `ImageDataset` as it is.

    Parameters
    ----------
    data
        See the table above: inputs of one tensor, which become float32, and integer labels.
    name
        Name of the result.
    num_classes
        Number of classes; the largest label plus one when None.
    finite
        As for `as_samples`.
    """
    if isinstance(data, ImageDataset):
        return data
    read = as_samples(data, "data", finite=finite)
    if not isinstance(read.inputs, torch.Tensor) or not isinstance(read.targets, torch.Tensor):
        raise InvalidValueError("data must have inputs and labels of one tensor each")
    labels = torch.from_numpy(as_labels(read.targets, "y"))
    classes = int(labels.max()) + 1 if num_classes is None else num_classes
    return ImageDataset(read.inputs.to(torch.float32), labels, name, classes)


def clients_data(
    data: Sequence[object] | Mapping[str, object],
    *,
    finite: bool = True,
    around: Callable[[int], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[Samples, list[list[int]]]:
    """Return all clients' samples in one, and whose are which, from one data set a client.

    A client may have none: an empty data set of any form.  Each is read within `around(number)`,
    where what its transformations draw has a beginning of its own.
    """
    named = list(data.items()) if isinstance(data, Mapping) else list(enumerate(data))
    parts: list[list[int]] = []
    read: list[Samples] = []
    total = 0
    for number, (name, own) in enumerate(named):
        what = f"train[{name!r}]"
        if is_empty(own):
            parts.append([])
            continue
        with around(number):
            samples = as_samples(own, what, finite=finite)
        if read:
            _check_alike(read[0], samples)
        read.append(samples)
        parts.append(list(range(total, total + len(samples))))
        total += len(samples)
    if not read:
        raise InvalidValueError("train must hold at least one client with samples")
    inputs = trees.concatenated([part.inputs for part in read])
    targets = trees.concatenated([part.targets for part in read])
    notes = tuple(dict.fromkeys(note for part in read for note in part.notes))
    known = {part.num_classes for part in read}
    classes = known.pop() if len(known) == 1 else None
    return Samples(inputs, targets, "train", classes, notes), parts


def is_empty(own: object) -> bool:
    """Tell whether a client's data set, or both parts of its pair, hold nothing."""
    if not isinstance(own, Sized):
        return False
    if isinstance(own, tuple | list) and len(own) == 2 and _is_array(own[0]):
        return len(own[0]) == 0
    return len(own) == 0


def _check_alike(first: Samples, other: Samples) -> None:
    for name in ("inputs", "targets"):
        ours, theirs = (trees.structure(getattr(part, name)) for part in (first, other))
        if ours != theirs:
            raise InvalidValueError(
                f"{name} of {other.what} are {_in_words(theirs)}, those of {first.what} "
                f"{_in_words(ours)}: all clients' samples must have one form"
            )


def _in_words(structure: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    parts = [f"{name} {dtype} {shape}".strip() for name, (dtype, shape) in structure.items()]
    return ", ".join(parts).replace("torch.", "")


def _read(data: Any, what: str) -> tuple[Any, Any]:
    """Return inputs and targets of all samples, in whatever form they came."""
    if isinstance(data, Mapping) and any(_is_array(value) for value in data.values()):
        return _parted(data, what)
    if isinstance(data, tuple | list) and len(data) == 2 and _is_batch(data):
        return data[0], data[1]
    if isinstance(data, DataLoader):
        return _read_loader(data, what)
    if isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str):
        return _read_dataset(data, what)
    raise InvalidValueError(
        f"{what} data of type {type(data).__name__} must be a pair (inputs, targets) of tensors, "
        "a Dataset with a length and [i] -> (input, target), a DataLoader, or an ImageDataset"
    )


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _is_batch(pair: Sequence[Any]) -> bool:
    """Tell whether two things are inputs and targets, and not two samples of a list."""
    first = pair[0]
    if isinstance(first, Mapping):
        return not any(key in first for key in LABEL_KEYS)
    if isinstance(first, tuple | list):
        arrays = bool(first) and all(_is_array(part) and part.ndim > 0 for part in first)
        if not isinstance(first, tuple) or not arrays:
            return False
        # Two samples of arrays look like this too, but not with targets of the inputs' length.
        return _is_array(pair[1]) or _has_length(pair[1], len(first[0]))
    return _is_array(first)


def _has_length(targets: Any, length: int) -> bool:
    if isinstance(targets, Mapping):
        return all(_has_length(part, length) for part in targets.values())
    if isinstance(targets, tuple | list) and targets and _is_array(targets[0]):
        return all(_has_length(part, length) for part in targets)
    return isinstance(targets, Sized) and len(targets) == length


def _parted(sample: Mapping[str, Any], what: str) -> tuple[Any, Any]:
    """Part a dictionary into inputs and the targets under `labels` or `label`."""
    for key in LABEL_KEYS:
        if key in sample:
            rest = {str(name): value for name, value in sample.items() if name != key}
            return rest, sample[key]
    raise InvalidValueError(
        f"{what}: a dictionary with the keys {', '.join(map(repr, sample))} must have its targets "
        "under 'labels' or 'label'; otherwise give a pair (inputs, targets)"
    )


def _read_loader(loader: DataLoader[Any], what: str) -> tuple[Any, Any]:
    """Read a loader's samples in the order of its data set, so that sample numbers hold."""
    if isinstance(loader.dataset, IterableDataset):
        batches: Iterator[Any] = iter(loader)
    elif loader.collate_fn is default_collate:
        return _read(loader.dataset, what)
    else:
        size = loader.batch_size or 1
        batches = iter(DataLoader(loader.dataset, batch_size=size, collate_fn=loader.collate_fn))
    pairs = [_pair(batch, what, f"batch {number}") for number, batch in enumerate(batches)]
    if not pairs:
        raise InvalidValueError(f"{what} data must hold at least one sample")
    return _joined(pairs, what)


def _read_dataset(data: Any, what: str) -> tuple[Any, Any]:
    """Read every sample of a map-style data set once."""
    count = len(data)
    if count == 0:
        raise InvalidValueError(f"{what} data must hold at least one sample")
    whole: dict[str, torch.Tensor] = {}
    form: Any = None
    for i in range(count):
        try:
            sample = data[i]
        except (IndexError, KeyError) as error:
            raise InvalidValueError(
                f"{what}[{i}] is missing although the data have length {count}"
            ) from error
        pair = tuple(
            _leafy(part, f"{what}[{i}] {name}")
            for part, name in zip(_pair(sample, what, f"{what}[{i}]"), _PARTS, strict=True)
        )
        if form is None:
            form = pair
            whole = {n: t.new_empty((count, *t.shape)) for n, t in trees.named_leaves(pair)}
        _check_same_form(pair, form, what, i)
        for name, leaf in trees.named_leaves(pair):
            whole[name][i] = leaf
    inputs, targets = trees.mapped_by_name(form, lambda name, _: whole[name])
    return inputs, targets


def _check_same_form(pair: Any, first: Any, what: str, i: int) -> None:
    """Raise for a sample whose tensors differ in name, type or shape from the first one's."""
    for name, ours, theirs in zip(_PARTS, pair, first, strict=True):
        one, other = (_shapes(tree) for tree in (ours, theirs))
        if one != other:
            raise InvalidValueError(
                f"{what}[{i}] has {name} of shape {_plain(one)}, {what}[0] has {_plain(other)}: "
                "all samples must have one shape (pad sequences to one length; a target of -100, "
                "or ignore_index, does not count)"
            )
        kinds = [[leaf.dtype for leaf in trees.leaves(tree)] for tree in (ours, theirs)]
        if kinds[0] != kinds[1]:
            raise InvalidValueError(
                f"{what}[{i}] has {name} of type {kinds[0]}, {what}[0] of {kinds[1]}: all samples "
                "must have one type"
            )


def _pair(sample: Any, what: str, where: str) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        return _parted(sample, what)
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    raise InvalidValueError(
        f"{where} must be a pair (input, target), or a dictionary with 'labels', "
        f"got {type(sample).__name__}"
        + (f" of {len(sample)} parts" if isinstance(sample, tuple | list) else "")
    )


def _joined(pairs: list[tuple[Any, Any]], what: str) -> tuple[Any, Any]:
    """Return the samples of all batches in one tree each for inputs and targets."""
    batches = [tuple(_leafy(part, f"{what} batch {i}") for part in p) for i, p in enumerate(pairs)]
    for i, batch in enumerate(batches):
        for name, ours, theirs in zip(_PARTS, batch, batches[0], strict=True):
            one, other = (trees.structure(tree) for tree in (ours, theirs))
            if one != other:
                raise InvalidValueError(
                    f"batch {i} of the {what} loader has {name} {_in_words(one)}, batch 0 has "
                    f"{_in_words(other)}: all samples must have one form (pad to one length)"
                )
    inputs, targets = trees.concatenated(batches)
    return inputs, targets


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in trees.named_leaves(tree)}


def _plain(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}".strip() for name, shape in shapes.items())


def _leafy(value: Any, where: str) -> Any:
    """Return one sample's part as a tree of tensors."""
    if isinstance(value, Mapping):
        return {str(key): _leafy(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_leafy(part, where) for part in value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, str):
        raise InvalidValueError(f"{where} must be a tensor or numbers, got {value!r:.60}")
    try:
        return torch.as_tensor(np.asarray(value).copy())
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{where} must be a tensor or numbers, got {type(value).__name__}: {error}"
        ) from error


def _tensors(value: Any, where: str, notes: list[str] | None) -> Any:
    """Return a tree of tensors in the types that a model takes; `notes` None: targets."""
    if isinstance(value, Mapping):
        return {str(key): _tensors(v, f"{where}[{key!r}]", notes) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_tensors(part, where, notes) for part in value)
    if isinstance(value, list):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise InvalidValueError(f"{where} must be numbers of one shape: {error}") from error
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiub":
            raise InvalidValueError(f"{where} must hold real numbers, got dtype {value.dtype}")
        if value.dtype.kind == "f" and value.dtype != np.float32:
            with np.errstate(over="ignore"):
                value = value.astype(np.float32)
        elif value.dtype.kind == "u" and value.dtype != np.uint8:
            value = value.astype(np.int64)
        # A copy where the array is read-only or has negative strides, which torch refuses.
        value = torch.from_numpy(np.require(value, requirements=("C", "W")))
    if not isinstance(value, torch.Tensor):
        raise InvalidValueError(f"{where} must be a tensor or array, got {type(value).__name__}")
    if value.is_complex():
        raise InvalidValueError(f"{where} must hold real numbers, got dtype {value.dtype}")
    if value.dim() == 0:
        raise InvalidValueError(f"{where} must have the samples as their first dimension")
    value = value.detach().cpu()
    if value.is_floating_point():
        return value.to(torch.float32).contiguous()
    if value.dtype == torch.uint8 and notes is not None:
        notes.append(_SCALED.format(what="inputs"))
        return value.to(torch.float32) / 255.0
    if notes is None and value.dtype != torch.bool:
        return value.to(torch.int64).contiguous()  # classes, as torch's losses want them
    return value.contiguous()


def _check_lengths(inputs: Tree, targets: Tree, what: str) -> None:
    named = [*trees.named_leaves(inputs, "inputs"), *trees.named_leaves(targets, "targets")]
    if len({len(leaf) for _, leaf in named}) > 1:
        shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in named)
        raise InvalidValueError(
            f"{what} inputs and targets must have the same length, got shapes {shapes}"
        )
    if len(named[0][1]) == 0:
        raise InvalidValueError(f"{what} data must hold at least one sample")


def _check_finite(inputs: Tree, targets: Tree, what: str) -> None:
    named = [*trees.named_leaves(inputs, "inputs"), *trees.named_leaves(targets, "targets")]
    for name, leaf in named:
        if not leaf.is_floating_point():
            continue
        rows = leaf.flatten(1) if leaf.ndim > 1 else leaf[:, None]
        finite = torch.isfinite(rows).all(dim=1)
        if not bool(finite.all()):
            first = int(torch.nonzero(~finite)[0])
            raise InvalidValueError(
                f"{what} sample {first} holds a value that is not a finite float32 (in {name})"
            )
