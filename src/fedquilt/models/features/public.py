"""Statistics of public images: what may be known about features without any data."""

from __future__ import annotations

import math

import torch

_TINY = 1e-12


def random_projection(size: int, dimension: int, seed: int) -> torch.Tensor:
    """Return a [size, dimension] matrix of N(0, 1 / dimension) entries drawn from a seed.

    It keeps inner products in expectation (Johnson and Lindenstrauss 1984).
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, dimension, generator=generator)
    return matrix.div_(math.sqrt(dimension))


def turned_towards(projection: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span C P, C the covariance of `rows`, P a projection.

    One step of the randomised range finder (Halko, Martinsson and Tropp 2011): random
    directions, turned towards those in which the rows vary most.  The columns are
    Q = Y (Y^T Y)^(-1/2) with Y = C P.  Unlike principal components Q does not depend on how
    a solver picks signs and orders equal eigenvalues: machines agree up to rounding.
    """
    centred = (rows - rows.mean(0)).double()
    turned = centred.T @ (centred @ projection.double())
    turned = turned / torch.linalg.matrix_norm(turned).clamp(min=_TINY)
    values, vectors = torch.linalg.eigh(turned.T @ turned)
    # Directions the rows do not span have length zero up to rounding and stay near zero.
    lengths = values.clamp(min=_TINY * max(1.0, float(values.max()))).sqrt()
    columns: torch.Tensor = turned @ (vectors / lengths) @ vectors.T
    return columns.to(projection.dtype)


def mean_and_whitening(rows: torch.Tensor, shrink: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of rows and W = (C / c + shrink)^(-1/2).

    C is the covariance and c its mean eigenvalue.  Of all matrices that whiten, W is the
    symmetric one, which machines agree on up to rounding.
    """
    wide = rows.double()
    mean = wide.mean(0)
    covariance = (wide - mean).T @ (wide - mean) / len(wide)
    level = covariance.diagonal().mean().clamp(min=_TINY)
    values, vectors = torch.linalg.eigh(covariance / level)
    whitening = (vectors * (values.clamp(min=0) + shrink).rsqrt()) @ vectors.T
    return mean.to(rows.dtype), whitening.to(rows.dtype)
