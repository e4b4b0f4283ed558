"""Small trainable models on a frozen feature extractor that is computed without data.

>>> import torch
>>> from fedquilt.models.features import make_feature_model, precompute
>>> model = make_feature_model("hog-linear", (1, 8, 8), num_classes=10)
>>> [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
[('head.weight', (10, 128))]
>>> features = precompute(model.front, torch.rand(5, 1, 8, 8))
>>> tuple(features.shape)
(5, 128)
>>> torch.equal(model.on_features()(features), model(torch.zeros(5, 1, 8, 8)))  # untrained
True

A feature extractor is a fixed function of one image, but the size of its cells was tuned on
labelled images.  For clients who hold those very images the choice is a release that no noise
covers; for everybody else it is public.  `choice_note` is what a statement says of it.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.choices import BESIDE_MODEL, FEATURE_EXTRACTORS
from fedquilt.models.features.drawn import DrawnFeatures, GradientsAndDrawn
from fedquilt.models.features.frozen import (
    FrozenExtractor,
    SampleStandard,
    count_features,
    draw,
    image_shape,
)
from fedquilt.models.features.gradients import OrientedGradients
from fedquilt.models.features.scattering import Scattering

__all__ = [
    "CHOSEN_ON",
    "FEATURE_MODELS",
    "DrawnFeatures",
    "FeatureModel",
    "FrozenExtractor",
    "GivenFeatures",
    "GradientsAndDrawn",
    "OrientedGradients",
    "OwnFront",
    "SampleStandard",
    "Scattering",
    "choice_note",
    "draw",
    "make_feature_model",
    "precompute",
    "refuse_mixing",
    "tell_done",
]


CHOSEN_ON: dict[str, tuple[str, ...]] = {
    # cells, orientations, block norm, power and shrink of the whitening
    "hog-linear": ("mnist",),
    # scale, projection to 256, and the same power and shrink
    "scatter-linear": ("mnist",),
    # the width for clients and an epsilon; patches: threshold, shrinkage, share (held-out images)
    "drawn-linear": ("cifar10",),
    # which drawn pictures whiten the learned half, how far; its share (held-out training images)
    "hog-drawn-linear": ("mnist", "fashion-mnist"),
    # steps, penalties and schedule of a certified condensation (held-out training images)
    "condensation": ("mnist", "cifar10"),
}
"""The data sets whose labels decided on defaults, by what they are defaults of."""

_SAME_IMAGES = {"mnist": ("mnist", "mnist-writers")}
_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
# Whoever passes data instead of a name may hold anything.
_UNKNOWN = "custom"


def choice_note(what: str, chosen_on: tuple[str, ...], dataset: str) -> str | None:
    """Return the note of a statement about settings chosen on data; None: on no data.

    >>> choice_note("settings", ("mnist",), "mnist-writers")
    'settings were chosen on MNIST, which these clients hold: that choice is not covered'
    >>> choice_note("settings", ("mnist",), "digits")
    'settings were chosen on MNIST; none of it is data of a client here'
    """
    if not chosen_on:
        return None
    titles = " and ".join(_TITLES.get(name, name) for name in chosen_on)
    held = " and ".join(
        _TITLES.get(name, name) for name in chosen_on if dataset in _SAME_IMAGES.get(name, (name,))
    )
    if held:
        which = "which these clients hold" if held == titles else f"and these clients hold {held}"
        return f"{what} were chosen on {titles}, {which}: that choice is not covered"
    if dataset == _UNKNOWN or not set(chosen_on) <= set(_TITLES):
        return (
            f"{what} were chosen on {titles}: if clients hold any of it, that choice is not covered"
        )
    return f"{what} were chosen on {titles}; none of it is data of a client here"


_STEPS = 20  # in which progress is told
_PUBLIC_IMAGES = {"hog-linear": 2000, "scatter-linear": 1000}  # scattering takes long
FEATURE_MODELS = FEATURE_EXTRACTORS

_CELLS_PER_SIDE = 28 / 6  # the grid that served best on MNIST, see CHOSEN_ON
_SCATTERING_DIMENSION = 256


def __getattr__(name: str) -> Any:
    if name != "FrozenFront":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("FrozenFront is called FrozenExtractor now", DeprecationWarning, stacklevel=2)
    return FrozenExtractor


class FeatureModel(nn.Module):
    """A frozen feature extractor and a trainable linear head; ends in logits.

    The trainable parameters are `head.weight` and, with `bias`, `head.bias`; the feature
    extractor has none and nothing of it is in the state dict.  The head starts at zero: the
    problem is convex, and a random start would be noise in the result.

    A bias is off by default.  What a client with few classes says about it is mostly which
    classes it has, and that takes its share of the bounded update.

    Parameters
    ----------
    front
        Usually a `FrozenExtractor`, or `OwnFront` for a network of one's own; anything with
        `num_features` that trains nothing.
    num_classes
        Number of logits.
    bias
        Whether the head has a bias.
    chosen_on
        The data sets on which the feature extractor's settings were chosen (`CHOSEN_ON`), or it was
        trained; the statement of a run says so.

    `made_as` is the name that `make_feature_model` made it by, None for another one.
    """

    def __init__(
        self,
        front: nn.Module,
        num_classes: int,
        bias: bool = False,
        chosen_on: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.chosen_on = chosen_on
        self.made_as: str | None = None
        self.front = front.requires_grad_(False).eval()
        self.head = _zero_head(count_features(front), num_classes, bias)

    def train(self, mode: bool = True) -> Self:
        """Train the head; the feature extractor stays in evaluation mode, and mixes no samples."""
        super().train(mode)
        self.front.eval()
        return self

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """Return what the feature extractor says of each image, one row an image."""
        return cast(torch.Tensor, self.front(images)).flatten(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return cast(torch.Tensor, self.head(self.embed(images)))

    def on_features(self) -> FeatureModel:
        """Return a model that shares this head and takes what `precompute` returns.

        It learns what this model would, and its state dict fits both.
        """
        given = GivenFeatures(self.head.in_features)
        other = FeatureModel(given, self.head.out_features, chosen_on=self.chosen_on)
        other.head, other.made_as = self.head, self.made_as
        return other

    def get_num_parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.head.parameters())


class GivenFeatures(nn.Module):
    """The feature extractor of a model whose inputs are features already."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = checks.integer("num_features", num_features, at_least=1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features."""
        is_given = isinstance(features, torch.Tensor)  # torch.fx follows with something else
        if is_given and (features.dim() != 2 or features.shape[1] != self.num_features):
            raise InvalidValueError(
                f"features of shape {tuple(features.shape)} must have shape "
                f"(N, {self.num_features})"
            )
        return features


def _zero_head(num_features: int, num_classes: int, bias: bool) -> nn.Linear:
    """Return a linear layer whose weights are zero."""
    checks.integer("num_classes", num_classes, at_least=1)
    with torch.random.fork_rng(devices=[]):  # the layer draws weights before they are cleared
        head = nn.Linear(num_features, num_classes, bias=bias)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


@torch.no_grad()
def precompute(
    front: nn.Module,
    images: torch.Tensor,
    batch_size: int = 256,
    working: Callable[[str, float], None] | None = None,
) -> torch.Tensor:
    """Return the features of all images, [N, num_features], on their common device.

    A frozen feature extractor says the same of an image in every round, so a run may say it
    once and train `model.on_features()` on the result.  All batches have one size, the last one
    filled up, so that an image's features do not depend on how many images there are.
    `working` is told the share that is done, in as many steps whatever the number of images: what
    clients hold does not show in it.
    """
    checks.integer("batch_size", batch_size, at_least=1)
    out = images.new_empty(len(images), count_features(front), dtype=torch.float32)
    told = 0
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        missing = batch_size - len(batch)
        filled = torch.cat([batch, batch[:1].expand(missing, *batch.shape[1:])])
        out[start : start + batch_size] = front(filled).flatten(1)[: len(batch)]
        done = min(len(images), start + batch_size) * _STEPS // len(images)
        while working is not None and told < done:
            told += 1
            working("features", told / _STEPS)
    return out


@torch.no_grad()
def refuse_mixing(front: nn.Module, samples: torch.Tensor, name: str) -> None:
    """Refuse a feature extractor that says another thing of a sample beside others, or again."""
    seen = front(samples)[:1]
    alone = front(torch.cat([samples[:1]] * len(samples)))[:1]
    if not torch.allclose(alone, seen, rtol=1e-3, atol=1e-5):
        raise InvalidValueError(
            f"front={name} must say the same of a sample whatever stands beside it; its output "
            "depends on the other samples of the batch, or on what it drew or saw before"
        )


def tell_done(working: Callable[[str, float], None] | None) -> None:
    """Tell the steps of features that are there: that they were not computed would say whose.

    Somebody's pictures have changed since the last run, or nobody's.
    """
    if working is not None:
        for step in range(1, _STEPS + 1):
            working("features", step / _STEPS)


def make_feature_model(
    name: str, input_shape: Sequence[int], num_classes: int, bias: bool = False
) -> FeatureModel:
    """Build a feature model by name.

    "hog-linear"
        `OrientedGradients` with cells of 6/28 of the shorter side and 8 signed
        orientations: 128 features for 8, 28 and 32 pixels.
    "scatter-linear"
        `Scattering` of two orders with 8 angles, averaged over about a quarter of the
        shorter side, projected to 256 dimensions if it has more.

    "drawn-linear-16", "-32", "-64", "-128", "-256", and "-512" for colour pictures
        So many directions of `DrawnFeatures`, a network that was trained on drawn pictures, half of
        them of colour pictures directions of patches.

    "hog-drawn-linear"
        `GradientsAndDrawn`: the features of hog-linear beside all 256 learned ones, for pictures
        of one channel; 384 features for 28 pixels.

    The first two are centred and whitened by images drawn from a fixed seed, strokes for one
    channel and leaves for several.  Equal arguments give equal models.  No data set has a part in
    a feature extractor, but its settings were chosen on one: see `CHOSEN_ON`.
    """
    kind, _, width = name.rpartition("-")
    if kind == "drawn-linear":
        front: nn.Module = DrawnFeatures(image_shape(input_shape), int(width))
    elif name == BESIDE_MODEL:
        shape, kind = image_shape(input_shape), name
        front = GradientsAndDrawn(copy.deepcopy(_front("hog-linear", shape)), shape)
    else:
        kind = checks.choice("model", name, FEATURE_MODELS)
        front = copy.deepcopy(_front(name, image_shape(input_shape)))
    made = FeatureModel(front, num_classes, bias, CHOSEN_ON[kind])
    made.made_as = None if bias else name
    return made


@functools.lru_cache(maxsize=8)
def _front(name: str, shape: tuple[int, int, int]) -> FrozenExtractor:
    """Build a feature extractor; remembered, because drawing and describing takes seconds."""
    side = min(shape[1:])
    public = draw("strokes" if shape[0] == 1 else "leaves", shape, _PUBLIC_IMAGES[name])
    if name == "hog-linear":
        return FrozenExtractor(
            OrientedGradients(shape, max(1, round(side / _CELLS_PER_SIDE))), public
        )
    scattering = Scattering(shape, J=max(1, round(math.log2(side / 4))))
    wide = scattering.num_features > _SCATTERING_DIMENSION
    return FrozenExtractor(
        SampleStandard(scattering), public, projection=_SCATTERING_DIMENSION if wide else None
    )


# What models of the usual libraries call the features of their output, the best one first.
_NAMED = ("pooler_output", "last_hidden_state", "image_embeds", "logits")


class OwnFront(nn.Module):
    """A frozen copy of a module, which says what a sample is like; for `FeatureModel`.

    It stays in evaluation mode, trains nothing, and nothing of it is in a state dict: a
    run's files hold the head alone, and whoever loads them brings the same module.

    The module must be public: no client's data may have had a part in it.  Name what it was
    trained on in `FeatureModel(..., chosen_on=("ImageNet-1k",))`, and the statement says it.

    Parameters
    ----------
    module : nn.Module
        For example `timm.create_model(..., num_classes=0)`, or a model of `transformers`
        loaded from a folder.
    input_shape : sequence of int
        Of one sample, without the batch.
    output : callable, optional
        Picks the features [N, ...] from what the module returns.  By default a tensor is
        taken as it is, of an output object `pooler_output` or the mean of
        `last_hidden_state`, and of a tuple its first entry.
    dtype : torch.dtype
        Of a sample: torch.int64 for token ids.
    """

    def __init__(
        self,
        module: nn.Module,
        input_shape: Sequence[int],
        *,
        output: Callable[[Any], torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        held = copy.deepcopy(module).eval().requires_grad_(False)
        self._held = (held,)  # in a tuple: torch registers no module there
        self._output = output
        self.num_features = 0
        sample = torch.zeros(3, *input_shape)
        if dtype.is_floating_point:
            sample = torch.randn(sample.shape, generator=torch.Generator().manual_seed(0))
        first = next(held.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self._try(sample.to(device=device, dtype=dtype))

    def _try(self, sample: torch.Tensor) -> None:
        """Count the features, and refuse a module that mixes the samples of a batch."""
        features = self(sample)
        if features.dim() != 2 or features.shape[0] != len(sample):
            raise InvalidValueError(
                f"front={type(self._held[0]).__name__} must return one row of features a sample; "
                f"for {len(sample)} samples it returns shape {tuple(features.shape)}"
            )
        refuse_mixing(self, sample, type(self._held[0]).__name__)
        self.num_features = int(features.shape[1])

    @torch.no_grad()
    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the features of each sample, [N, num_features], in float32."""
        found = self._held[0](samples)
        picked = self._output(found) if self._output is not None else _features(found)
        return picked.flatten(1).float()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the module along with this one, also to another device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._held[0]._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever is asked."""
        return super().train(False)


def _features(found: Any) -> torch.Tensor:
    """Return the features of what a model returned."""
    for name in _NAMED:
        value = getattr(found, name, None)
        if isinstance(value, torch.Tensor):
            return value.mean(dim=1) if name == "last_hidden_state" else value
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if not isinstance(found, torch.Tensor):
        raise InvalidValueError(
            f"front returns {type(found).__name__}, which must be a tensor of features: say which "
            "part of it is, output=lambda found: ..."
        )
    return found
