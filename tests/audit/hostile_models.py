"""The models and the neighbouring data sets of the audit of whole runs.

The models are small and have what a model may have: randomness, state, a frozen part.
Some of them carry state from one batch to the next; an engine that trains one client
after the other on one module leaks it from client to client, unless it is restored.

The data sets differ from one another in what one client, the victim, holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

from fedquilt.audit.canary import CLASSES, HIDDEN, SIDE, Net, audit_samples, drawn_model
from fedquilt.common.randomness import generator
from fedquilt.data import ImageDataset
from fedquilt.models import FeatureModel, lora, with_cores
from fedquilt.models.features import make_feature_model
from fedquilt.models.networks import ExitNet

CLIENTS = 6
RECIPE_HEADS = ("hog-drawn-linear", "drawn-linear-16")
CONDENSED_SIDE = 8  # of one that gradients can be taken of
WIDE = 33  # no multiple of what a processor adds at once


class FunctionalDropout(Net):
    """Dropout that no layer tells of."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drop half of the values."""
        return functional.dropout(hidden, 0.5, self.training)


class SmoothDropout(Net):
    """Dropout behind a smooth layer, which no steps by hand take: a stack of clients does."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drop half of the values."""
        return functional.dropout(functional.gelu(hidden), 0.5, self.training)


class WidthSeen(Net):
    """Computes otherwise in a program of another width, as kernels do in their last bits.

    And only where weights are small: a trial on weights that it draws need not meet it.
    """

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Let the number of rows show."""
        seen = torch.where(self.last.weight.abs().amax() < 1.0, 1.0 + 1e-3 * len(hidden), 1.0)
        return functional.gelu(hidden) * seen


class MovingCentre(Net):
    """A frozen parameter that every forward pass moves, as a momentum teacher's are."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Move the centre and subtract it."""
        if self.training:
            self.centre.data.lerp_(batch_mean(hidden), 0.5)
        return hidden - self.centre


class PlainAttribute(Net):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(HIDDEN)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Remember a mean of all batches and subtract it."""
        if self.training:
            self.memory = 0.5 * self.memory.to(hidden.device) + 0.5 * batch_mean(hidden)
        return hidden - self.memory.to(hidden.device)


class LateBuffer(Net):
    """A buffer that stays as it is for the first two calls."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(HIDDEN))
        self.calls = 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Move the centre from the third call on, and subtract it."""
        self.calls += self.training
        if self.training and self.calls > 2:
            self.centre.lerp_(batch_mean(hidden), 0.5)
        return hidden - self.centre


class GradientBuffer(Net):
    """A buffer that moves only where gradients are recorded."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(HIDDEN))

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Move the centre in training steps, and subtract it."""
        if torch.is_grad_enabled():
            self.centre.lerp_(batch_mean(hidden), 0.5)
        return hidden - self.centre


class AlwaysDrops(Net):
    """Drops out when it is evaluated, too."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Drop half of the values, by everybody's generator."""
        return functional.dropout(hidden, 0.5, True)


class NormedPixels(nn.Module):
    """A frozen front whose BatchNorm would look at whole batches in training."""

    num_features = SIDE**2

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one row an image."""
        out: torch.Tensor = self.norm(images)
        return out.flatten(1)


class PixelMeans(nn.Module):
    """A frozen front: means of neighbouring pixels."""

    num_features = SIDE**2 // 4

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one row an image."""
        return functional.avg_pool2d(images, 2).flatten(1)


def batch_mean(hidden: torch.Tensor) -> torch.Tensor:
    """Return the mean of a batch of hidden values, as state that a pass may leave."""
    # A value that is not finite would spoil the memory for good, and show at once.
    return torch.nan_to_num(hidden.detach().mean(0), 0.0, 9.0, -9.0).clamp(-9.0, 9.0)


def _dropout_layer() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.Linear(HIDDEN, 3)
    )


def _log_softmax() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3), nn.LogSoftmax(1)
    )


def _normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return a network that no steps by hand take."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE**2, WIDE), norm(WIDE), nn.GELU(), nn.Linear(WIDE, CLASSES)
    )


def _ranks() -> nn.Module:
    import peft

    layers = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["1"], modules_to_save=["4"])
    return peft.get_peft_model(_normed(nn.LayerNorm), layers)


def _on_condensed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(CONDENSED_SIDE**2, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "spare scores": lambda: Net(CLASSES + 2),
    "dropout layer": _dropout_layer,
    "dropout call": FunctionalDropout,
    "smooth dropout": SmoothDropout,
    "width seen": WidthSeen,
    "frozen parameter": MovingCentre,
    "attribute": PlainAttribute,
    "late buffer": LateBuffer,
    "gradient buffer": GradientBuffer,
    "log-softmax": _log_softmax,
    "frozen front": lambda: FeatureModel(PixelMeans(), CLASSES),
    "normed front": lambda: FeatureModel(NormedPixels(), CLASSES),
    "always drops": AlwaysDrops,
    **{name: partial(make_feature_model, name, (1, SIDE, SIDE), CLASSES) for name in RECIPE_HEADS},
    "adapters": lambda: lora(_normed(nn.LayerNorm), rank=2, train="2.*"),
    "ranks": _ranks,
    "cores": lambda: with_cores(_ranks()),
    "layer norm": lambda: _normed(nn.LayerNorm),
    "exits": lambda: ExitNet(CLASSES, 1, (4, 4)),
    "condensed": _on_condensed,
}


def audit_model(
    name: str, seed: int, more: Mapping[str, Callable[[], nn.Module]] = MappingProxyType({})
) -> nn.Module:
    """Return one of `MODELS`, or of `more`, with weights drawn from a seed."""
    return drawn_model({**MODELS, **more}[name], seed)


_MANY = 20
IGNORED = -100  # the label that torch's losses leave out
_HUGE = 3e38  # a finite float32 whose sums are not


@dataclass(frozen=True, eq=False)
class Data:
    """Training data and who holds which samples.

    `forms` is of use where every client brings a data set: in which form, if not as a pair.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    clients: list[list[int]]
    forms: Mapping[int, Callable[[torch.Tensor, torch.Tensor], object]] = field(
        default_factory=dict
    )


def audit_data(seed: int, side: int = SIDE) -> Data:
    """Return the data of all clients in the base world; everybody together has every class."""
    return Data(*audit_samples(seed, side))


def nothing(data: Data, victim: int) -> Data:
    """The victim holds no sample; what it held lies there and is nobody's."""
    return Data(data.inputs, data.labels, _with(data, victim, []))


def removed(data: Data, victim: int) -> Data:
    """The victim holds no sample, and its samples are gone from the tensors."""
    gone = set(data.clients[victim])
    left = [i for i in range(len(data.labels)) if i not in gone]
    place = {old: new for new, old in enumerate(left)}
    clients = [[place[i] for i in held if i not in gone] for held in data.clients]
    return Data(data.inputs[left], data.labels[left], clients)


def one_less(data: Data, victim: int) -> Data:
    """The victim has lost its last sample."""
    return Data(data.inputs, data.labels, _with(data, victim, data.clients[victim][:-1]))


def twice(data: Data, victim: int) -> Data:
    """The victim holds every sample twice."""
    held = data.clients[victim]
    return _given(data, victim, data.inputs[held].repeat(2, 1, 1, 1), data.labels[held].repeat(2))


def last_huge(data: Data, victim: int) -> Data:
    """The victim's last sample is huge, the others are as they were."""
    inputs = data.inputs.clone()
    inputs[data.clients[victim][-1]] = _HUGE
    return Data(inputs, data.labels, data.clients)


def one_class(data: Data, victim: int) -> Data:
    """All labels of the victim are the first class."""
    return _relabelled(data, victim, lambda labels: torch.zeros_like(labels))


def relabelled(data: Data, victim: int) -> Data:
    """Every label of the victim is another one."""
    return _relabelled(data, victim, lambda labels: (labels + 1) % CLASSES)


def ignored(data: Data, victim: int) -> Data:
    """No label of the victim counts in a loss."""
    return _relabelled(data, victim, lambda labels: torch.full_like(labels, IGNORED))


def one_ignored(data: Data, victim: int) -> Data:
    """The victim's first label counts in no loss."""
    others = data.clients[victim][1:]
    return _relabelled(data, victim, lambda _: torch.cat([labels_of(IGNORED), data.labels[others]]))


def labels_of(*values: int) -> torch.Tensor:
    """Return labels."""
    return torch.tensor(values, dtype=torch.int64)


def replaced(data: Data, victim: int) -> Data:
    """The victim holds other samples, larger ones, and another number of them."""
    count = 2 * len(data.clients[victim]) + 1
    random = generator(count, "audit replacement")
    shape = (count, *data.inputs.shape[1:])
    inputs = torch.from_numpy(random.standard_normal(shape)).float() * 3.0
    return _given(data, victim, inputs, torch.from_numpy(random.integers(0, CLASSES, count)))


def filled(value: float, count: int | None = None) -> Callable[[Data, int], Data]:
    """Return the neighbour whose samples have this value everywhere; `count` of them."""

    def neighbour(data: Data, victim: int) -> Data:
        number = len(data.clients[victim]) if count is None else count
        if count is None:
            inputs = data.inputs.clone()
            inputs[data.clients[victim]] = value
            return Data(inputs, data.labels, data.clients)
        inputs = torch.full((number, *data.inputs.shape[1:]), value)
        return _given(data, victim, inputs, torch.arange(number) % CLASSES)

    return neighbour


def _brought(form: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[Data, int], Data]:
    return lambda data, victim: replace(data, forms={victim: form})


NOTHING: dict[str, Callable[[Data, int], Data]] = {
    "nothing": nothing,
    "removed": removed,
    "NaN": filled(float("nan")),
    "one NaN": filled(float("nan"), 1),
    "many NaN": filled(float("nan"), _MANY),
}
"""Worlds in which the victim contributes nothing; nobody must be able to tell them apart.

An update that is not finite counts as zero, and data that are not a number make one.
"""

OTHERS: dict[str, Callable[[Data, int], Data]] = {
    "one less": one_less,
    "twice": twice,
    "infinite": filled(float("inf")),
    "3e38": filled(_HUGE),
    "one 3e38": filled(_HUGE, 1),
    "last 3e38": last_huge,
    "one class": one_class,
    "relabelled": relabelled,
    "replaced": replaced,
    "ignored": ignored,
    "one ignored": one_ignored,
}
"""Worlds in which the victim holds something else."""

KINDS = {**NOTHING, **OTHERS}
FORMS_OF_ONE: dict[str, Callable[[Data, int], Data]] = {
    "bytes": _brought(lambda x, y: ((x * 30.0).abs().clamp(0, 255).to(torch.uint8), y)),
    "more classes": _brought(lambda x, y: ImageDataset(x, y, "own", CLASSES + 1)),
}
"""Worlds in which the victim's data set has another form than everybody's."""

SHORT = ("nothing", "many NaN", "one less", "3e38")
"""The kinds of neighbour of a quick audit."""


def _with(data: Data, victim: int, held: list[int]) -> list[list[int]]:
    return [held if client == victim else list(own) for client, own in enumerate(data.clients)]


def _given(data: Data, victim: int, inputs: torch.Tensor, labels: torch.Tensor) -> Data:
    """Give the victim new samples in the place of its own, so that it stands where it stood."""
    gone = set(data.clients[victim])
    first = min(gone)
    before = [i for i in range(len(data.labels)) if i not in gone and i < first]
    after = [i for i in range(len(data.labels)) if i not in gone and i > first]
    count = len(labels)
    place = {old: new for new, old in enumerate(before)}
    place |= {old: len(before) + count + new for new, old in enumerate(after)}
    clients = [[place[i] for i in held if i not in gone] for held in data.clients]
    clients[victim] = list(range(len(before), len(before) + count))
    return Data(
        torch.cat([data.inputs[before], inputs, data.inputs[after]]),
        torch.cat([data.labels[before], labels.to(data.labels.dtype), data.labels[after]]),
        clients,
    )


def _relabelled(data: Data, victim: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Data:
    labels = data.labels.clone()
    held = data.clients[victim]
    labels[held] = change(labels[held])
    return Data(data.inputs, labels, data.clients)
