"""Features learned from pictures drawn by programme: a small network that saw nobody's data.

`tools/train_extractor.py` (seed 0, 173 seconds on one H200) trained the weights that lie beside
this file by instance discrimination on 800,000 drawn pictures: spectral noise, coordinate
networks, dead leaves of textured shapes, pen strokes, silhouettes.  No photograph, no
handwriting and no label had a part in them, so for every client they are public.

Directions are ordered by drawn pictures, too: the features' principal components there, the
widest first, each divided by its deviation, (λ + λ̄ / 100)^(1/2).

On colour pictures half of a row says where whitened patches of drawn pictures are found (Coates
and Ng 2011): 640 of 6 x 6, answers above 1, a mean over each quarter.  With T and J the covariance
of that over views of drawn pictures and within the views of one, T̄ the mean variance, its
directions and their scales are the first eigenvectors of T against J + 0.3 T̄: what neither crop
nor light changes.  `tools/train_extractor.py --patches` made them.

A head on k directions has k numbers a class; which k a bound affords is in `config.modes`.

On grey pictures all of them stand beside gradient features (`GradientsAndDrawn`), centred and
whitened by 10,000 pen drawings and as many grey things (`tools/train_extractor.py --grey`).

What this network, or fixed gradients, say of a public data set is kept in a file: `remembered`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquilt.common import checks, storage
from fedquilt.common.errors import DataError, FedquiltError, InvalidValueError
from fedquilt.common.untrusted import opened_tensors
from fedquilt.models.features.frozen import FrozenExtractor, image_shape

WEIGHTS = Path(__file__).with_name("drawn.safetensors")
SHA256 = "dda5a65bdb31a8144fd4bed9f494159b63b2de2a89f7d288dbe86773c01b7726"
GREY = Path(__file__).with_name("drawn_grey.safetensors")
GREY_SHA256 = "29dadef0229d9f162832d79019794aecb7845836c8720034621ff0b16e6e2a10"
PATCHES = Path(__file__).with_name("drawn_patches.safetensors")
PATCHES_SHA256 = "a7c4e954bb41b6d59a0d713ce4f7d46173602a988c3690f39d82b47db216ba6b"
FEATURES, LENGTH = 256, math.sqrt(128)
_STRIDES = (1, 2, 1, 2, 1, 2, 1)
_SIDE, _SMALLEST = 32, 24


@functools.cache
def _tensors(kind: str = "") -> dict[str, torch.Tensor]:
    """Read the weights in float32; refuse a file that is not the one that was shipped."""
    files = {"grey": (GREY, GREY_SHA256), "patches": (PATCHES, PATCHES_SHA256)}
    path, shipped = files.get(kind, (WEIGHTS, SHA256))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != shipped:
        raise DataError(f"{path} has the SHA-256 {found}, must have {shipped}: install it again")
    with opened_tensors(path, "holds no weights") as file:
        return {name: file.get(name).float() for name in file.specs}


class DrawnFeatures(nn.Module):
    """The first directions of the network's features, each picture scaled to one length.

    Of colour pictures half of them are directions of patches, and have half of the square.

    Every picture is standardised by itself and seen in 32 x 32: smaller ones are bordered by
    their darkest value, or enlarged below 24; larger ones are seen as they are.  One channel
    counts as three alike.  What it says of a picture depends on no other picture.

    Parameters
    ----------
    input_shape : sequence of int
        (channels, height, width), of one or three channels.
    width : int
        How many directions, 1 to 256; of colour pictures 2 to 512.
    kind : str, optional
        The drawn pictures that gave mean and directions: by default "strokes" for one channel and
        "colour" for three; "grey" are strokes and grey things, in no order.
    """

    def __init__(
        self, input_shape: tuple[int, int, int], width: int, kind: str | None = None
    ) -> None:
        super().__init__()
        channels, height, across = image_shape(input_shape)
        if channels not in (1, 3):
            raise InvalidValueError(f"channels of input_shape={channels} must be 1 or 3")
        parts = 1 if channels == 1 else 2
        most = self.num_described = parts * FEATURES
        self.num_features = checks.integer("width", width, at_least=parts, at_most=most)
        self._shape = (channels, height, across)
        kind = kind or ("strokes" if channels == 1 else "colour")
        for name, tensor in _tensors().items():
            if "." in name and name.split(".")[0] in ("stem", "blocks"):
                self.register_buffer(name.replace(".", "_"), _placed(tensor), persistent=False)
        self.mean: torch.Tensor
        self.directions: torch.Tensor
        fitted = _tensors("grey" if kind == "grey" else "")
        for name in ("mean", "directions"):
            self.register_buffer(name, fitted[f"{kind}.{name}"].clone(), persistent=False)

    keeps_from = 1

    @property
    def cache_name(self) -> str:
        """What `describe` says of a picture depends on, beside the picture."""
        files = SHA256[:16] + (f"-{PATCHES_SHA256[:8]}" if self._shape[0] > 1 else "")
        return f"drawn-{files}-{'x'.join(map(str, self._shape))}"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, width]."""
        return self.narrow(self.describe(images))

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the first directions of what `describe` says, each row of one length."""
        parts = torch.split(rows, FEATURES, dim=1)
        shares = [(self.num_features + i) // len(parts) for i in range(len(parts))]
        return _of_one_length([part[:, :n] for part, n in zip(parts, shares, strict=True)])

    def describe(self, images: torch.Tensor) -> torch.Tensor:
        """Return all directions of each picture, [N, 256]; of colours [N, 512]."""
        if tuple(images.shape[1:]) != self._shape:
            raise InvalidValueError(
                f"images of shape {tuple(images.shape)} must have shape (N, *{self._shape})"
            )
        seen = self._seen(images)
        rows = (self._network(seen) - self.mean) @ self.directions
        if self.num_described == FEATURES:
            return rows
        names = ("kernels", "thresholds", "mean", "directions")
        kernels, above, mean, directions = (_tensors("patches")[name].to(seen) for name in names)
        found = torch.cat([patch_responses(part, kernels, above) for part in torch.split(seen, 32)])
        return torch.cat([rows, (found - mean) @ directions], dim=1)

    def _seen(self, images: torch.Tensor) -> torch.Tensor:
        """Return pictures as the network takes them."""
        x = images.to(torch.float32)
        _, height, across = self._shape
        if min(height, across) < _SMALLEST:
            x = functional.interpolate(x, (_SIDE, _SIDE), mode="bilinear", align_corners=False)
        elif max(height, across) < _SIDE:
            least = x.amin((1, 2, 3), keepdim=True)
            down, right = _SIDE - height, _SIDE - across
            border = (right // 2, right - right // 2, down // 2, down - down // 2)
            x = functional.pad(x - least, border)
        x = x - x.mean((1, 2, 3), keepdim=True)
        x = x / x.square().mean((1, 2, 3), keepdim=True).sqrt().clamp(min=1e-3)
        return x.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)

    def _network(self, x: torch.Tensor) -> torch.Tensor:
        y = self._unit("stem", x, 1).relu_()
        for number, stride in enumerate(_STRIDES):
            name = f"blocks_{number}"
            inner = self._unit(f"{name}_second", self._unit(f"{name}_first", y, stride).relu_(), 1)
            around = f"{name}_around"
            if hasattr(self, f"{around}_bias"):
                y = self._unit(around, y, stride)
            y = (inner + y).relu_()
        return y.mean((2, 3))

    def _unit(self, name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        kernel: torch.Tensor = getattr(self, f"{name}_weight")
        bias: torch.Tensor = getattr(self, f"{name}_bias")
        return functional.conv2d(x, kernel, bias, stride, kernel.shape[-1] // 2)


def patch_responses(x: Tensor, kernels: Tensor, thresholds: Tensor) -> Tensor:
    """Return how far standardised patches answer above thresholds, the mean of each quarter."""
    size = kernels.shape[-1]
    mean, square = (
        functional.avg_pool2d(y, size, 1).mean(1, keepdim=True) for y in (x, x.square())
    )
    deviation = ((square - mean.square()).clamp(min=0) + 0.04).sqrt()
    y = functional.conv2d(x, kernels) / deviation - thresholds
    return functional.adaptive_avg_pool2d(y.relu_(), 2).flatten(1)


class GradientsAndDrawn(nn.Module):
    """Gradient features beside all drawn ones, for pictures of one channel.

    With u(v) = v / ||v||, gradient features g and the network's features h of a picture,

        phi(x) = sqrt(128) * u( [u(W_g (g - m_g)), u(W_h (h - m_h))] )

    Each part is centred and whitened by drawn pictures.  There is no width to choose: rows have
    one length, so the noise in a logit, sigma * ||phi(x)||, does not grow with it.

    Parameters
    ----------
    gradients : FrozenExtractor
        What describes gradients, for the same pictures.
    input_shape : sequence of int
        (1, height, width).
    """

    def __init__(self, gradients: FrozenExtractor, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        if input_shape[0] != 1:
            raise InvalidValueError(f"channels of input_shape={input_shape[0]} must be 1")
        self.gradients, self.drawn = gradients, DrawnFeatures(input_shape, FEATURES, "grey")
        self.num_features = gradients.num_features + FEATURES

    keeps_from = 1

    @property
    def num_described(self) -> int:
        """All features are kept."""
        return self.num_features

    @property
    def cache_name(self) -> str:
        """What `describe` says of a picture depends on, beside the picture."""
        return f"{self.gradients.cache_name}-{GREY_SHA256[:8]}-{self.drawn.cache_name}"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, num_features]."""
        return self.narrow(self.describe(images))

    def describe(self, images: torch.Tensor) -> torch.Tensor:
        """Return both parts of each picture, [N, num_features]."""
        return torch.cat([self.gradients(images), self.drawn.describe(images)], dim=1)

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of one length of which each part has half the square."""
        return _of_one_length(torch.split(rows, [self.gradients.num_features, FEATURES], dim=1))


def _of_one_length(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return parts side by side, each with its share of the square."""
    seen = [functional.normalize(part, eps=1e-6) for part in parts]
    return torch.cat(seen, dim=1) * (LENGTH / math.sqrt(len(parts)))


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies as convolutions on a CPU like it best."""
    if tensor.dim() == 4:
        return tensor.clone(memory_format=torch.channels_last)
    return tensor.clone()


@runtime_checkable
class Describes(Protocol):
    """A feature extractor whose slow part may be kept."""

    @property
    def cache_name(self) -> str:
        """What `describe` says of a picture depends on, beside the picture."""

    @property
    def num_described(self) -> int:
        """How many numbers `describe` says of a picture."""

    @property
    def keeps_from(self) -> int:
        """The number of pictures that take longer to describe than a file to be read."""

    def describe(self, images: torch.Tensor) -> torch.Tensor:
        """Return what is kept, one row a picture."""

    def narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the features that follow from rows."""


class _Described(nn.Module):
    """What `describe` says, as a feature extractor."""

    def __init__(self, front: Describes) -> None:
        super().__init__()
        self.front, self.num_features = front, front.num_described

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one row a picture."""
        return self.front.describe(images)


def remembered(
    front: Describes,
    images: torch.Tensor,
    compute: Callable[[nn.Module], torch.Tensor],
    found: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Return the features of a public data set's pictures, described once for all widths.

    The file lies in FEDQUILT_CACHE, usually ~/.cache/fedquilt, under a digest of the pictures;
    one that does not fit is computed anew, and a folder that cannot be written is no error.
    Both are their owner's alone: a data set with a name may be one's own, of real people.
    `found` is called where nothing is computed, and has to show the same steps as that would.
    """
    described = _Described(front)
    if len(images) < front.keeps_from:
        return front.narrow(compute(described))
    digest = hashlib.sha256(images.detach().cpu().contiguous().numpy().data).hexdigest()[:24]
    folder = Path(os.environ.get("FEDQUILT_CACHE", "~/.cache/fedquilt")).expanduser()
    path = folder / f"{front.cache_name}-{digest}.safetensors"
    wanted = ("F32", (len(images), front.num_described))
    if path.is_file():
        try:
            with opened_tensors(path, "holds no features") as file:
                spec = file.specs.get("features")
                if spec is not None and (spec.dtype, spec.shape) == wanted:
                    found()
                    return front.narrow(file.get("features").to(images.device))
        except DataError:
            pass  # computed anew, and written over
    rows = compute(described)
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        storage.write_file(path, storage.as_safetensors({"features": rows}, {}), 0o600)
    except (OSError, FedquiltError):
        pass  # nothing is lost but time
    return front.narrow(rows)
