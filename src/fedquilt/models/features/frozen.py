"""Fixed features made fit for a linear head, without looking at any data.

The noise of a private release grows with the number of coordinates it covers, so a
whole-model guarantee among few clients needs a small trainable head.  A front that is
frozen and known to everybody costs nothing: noise on the head is then noise on everything
that was learned.  That holds only while the front is a public function, so its centring
and whitening may not come from the clients' data either.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import nn

from fedquilt import validate
from fedquilt.errors import InvalidValueError

_TINY = 1e-12


class Front(Protocol):
    """What `FrozenFront` needs of a description of images."""

    @property
    def num_features(self) -> int:
        """The number of values that describe an image."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Describe images, [N, channels, height, width], by [N, ...] values."""


class FrozenFront(nn.Module):
    """Features of length sqrt(k), centred and whitened by public images.

    With u(v) = v / ||v|| and features f(x), flattened,

        phi(x) = sqrt(k) * u( W (P u(f(x)) - m) )

    P is a random projection to k dimensions, or absent; m is the mean and C the covariance
    of P u(f) over `public` images, and W = (C + shrink * mean eigenvalue of C)^(-1/2).
    Without public images m = 0 and W = 1.  Everything is a fixed function of one sample.

    Why: with a common mean the features of all classes point the same way, and the updates
    of clients with unequal class mixtures mostly disagree about that one direction.
    Whitening lets few rounds reach directions that vary little.  The length makes the mean
    square of a feature 1, so usual learning rates fit.

    Parameters
    ----------
    front
        `OrientedGradients`, `Scattering` or another module without trainable parameters.
    public
        Images that are nobody's data, for m and W; see `draw`.  They should look somewhat
        like the inputs in structure; contrast and brightness matter only as far as `front`
        depends on them.
    projection
        k, or None to keep all features.
    seed
        Of the projection.
    shrink
        How far W stays from full whitening.
    """

    def __init__(
        self,
        front: nn.Module,
        public: torch.Tensor | None = None,
        projection: int | None = None,
        seed: int = 0,
        shrink: float = 1.0,
    ) -> None:
        super().__init__()
        self.front = front.requires_grad_(False)
        size = _num_features(front)
        self.num_features = size
        self.projection: torch.Tensor | None = None
        if projection is not None:
            self.num_features = validate.integer("projection", projection, at_least=1, at_most=size)
            matrix = random_projection(size, self.num_features, seed)
        else:
            matrix = None
        validate.number("shrink", shrink, above=0)
        self.register_buffer("projection", matrix, persistent=False)
        self.mean: torch.Tensor
        self.whitening: torch.Tensor
        self.register_buffer("mean", torch.zeros(self.num_features), persistent=False)
        self.register_buffer("whitening", torch.eye(self.num_features), persistent=False)
        if public is not None:
            rows = torch.cat([self._described(batch) for batch in public.split(_PUBLIC_BATCH)])
            self.mean, self.whitening = mean_and_whitening(rows, shrink)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return [N, num_features]."""
        whitened = (self._described(images) - self.mean) @ self.whitening
        return _unit(whitened) * self.num_features**0.5

    @torch.no_grad()
    def _described(self, images: torch.Tensor) -> torch.Tensor:
        features = _unit(self.front(images).flatten(1))
        return features if self.projection is None else features @ self.projection


_PUBLIC_BATCH = 256


def random_projection(size: int, dimension: int, seed: int) -> torch.Tensor:
    """Return a [size, dimension] matrix of N(0, 1 / dimension) entries drawn from a seed.

    It keeps inner products in expectation (Johnson and Lindenstrauss 1984).
    """
    generator = torch.Generator().manual_seed(validate.integer("seed", seed, at_least=0))
    return torch.randn(size, dimension, generator=generator) / dimension**0.5


def mean_and_whitening(rows: torch.Tensor, shrink: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean m of rows and (C + shrink * mean eigenvalue)^(-1/2), C their covariance.

    Of all matrices that whiten, this one is symmetric: unlike a basis of principal
    components it does not depend on how a solver picks signs and orders equal eigenvalues,
    so every machine computes the same one up to rounding.
    """
    wide = rows.double()
    mean = wide.mean(0)
    covariance = torch.cov(wide.T, correction=0).reshape(len(mean), len(mean))
    level = covariance.diagonal().mean().clamp(min=_TINY)
    values, vectors = torch.linalg.eigh(covariance / level)
    whitening = (vectors * (values.clamp(min=0) + shrink).rsqrt()) @ vectors.T
    return mean.float(), whitening.float()


class SampleStandard(nn.Module):
    """Each image minus its mean, over its standard deviation, then `front`.

    Makes a front blind to the brightness and contrast of an image, and so to how a data
    set was normalised.
    """

    def __init__(self, front: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.num_features = _num_features(front)

    @torch.no_grad()
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return what the front makes of the standardised images."""
        axes = (1, 2, 3)
        centred = images - images.mean(axes, keepdim=True)
        spread = centred.square().mean(axes, keepdim=True).sqrt().clamp(min=_TINY)
        features: torch.Tensor = self.front(centred / spread)
        return features


def _num_features(front: nn.Module) -> int:
    """Return the number of features a front announces, or raise."""
    if isinstance(front, Front) and isinstance(front.num_features, int):
        return front.num_features
    raise InvalidValueError(
        f"front={type(front).__name__} must tell its num_features, a whole number"
    )


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Scale each row to length 1; a row of zeros stays."""
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=_TINY)
