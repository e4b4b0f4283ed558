"""The seed documents' privacy budget: epsilon that follows participation.

    epsilon(p) = epsilon_base * (1 + alpha * exp(-beta * p))      (paper, eq. 5)
    sigma      = C * sqrt(2 ln(1.25 / delta)) / epsilon            (classic Gaussian)

The budget is nominal: what it guarantees depends on what is clipped and noised,
and a run's statement says so.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.privacy.noise import NoiseStream, SecretNoise

Vector = TypeVar("Vector", NDArray[Any], torch.Tensor)


class AdaptivePrivacyAllocator:
    """Give each participation rate its budget, and each budget its noise.

    Parameters
    ----------
    epsilon_base : float
        Budget of a round at full participation, epsilon_total / num_rounds.
    alpha : float
        Strength of the adaptation, any number >= 0.
    beta : float
        How fast the extra budget falls with the participation rate, > 0.
    delta : float
        Delta of each release, in (0, 1).
    noise : NoiseStream, optional
        Where noise comes from; the operating system's generator by default.
    """

    def __init__(
        self,
        epsilon_base: float = 0.015,
        alpha: float = 0.5,
        beta: float = 2.0,
        delta: float = 1e-5,
        noise: NoiseStream | None = None,
    ) -> None:
        self.epsilon_base = validate.number("epsilon_base", epsilon_base, above=0)
        self.alpha = validate.number("alpha", alpha, at_least=0)
        self.beta = validate.number("beta", beta, above=0)
        self.delta = validate.number("delta", delta, above=0, below=1)
        self.noise: NoiseStream = noise if noise is not None else SecretNoise()

    def compute_privacy_budget(self, participation_rate: float) -> float:
        """Return epsilon_base * (1 + alpha * exp(-beta * p)) for a rate p in [0, 1]."""
        rate = validate.number(
            "participation_rate", _scalar(participation_rate), at_least=0, at_most=1
        )
        return self.epsilon_base * (1.0 + self.alpha * math.exp(-self.beta * rate))

    def compute_noise_multiplier(
        self, epsilon: float, clip_norm: float, delta: float | None = None
    ) -> float:
        """Return the noise standard deviation C * sqrt(2 ln(1.25 / delta)) / epsilon.

        The document calls it a multiplier; it is a standard deviation.
        """
        epsilon = validate.number("epsilon", _scalar(epsilon), above=0)
        clip_norm = validate.number("clip_norm", _scalar(clip_norm), above=0)
        delta = self.delta if delta is None else _scalar(delta)
        delta = validate.number("delta", delta, above=0, below=1)
        return clip_norm * math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon

    def add_gaussian_noise(self, data: Vector, epsilon: float, clip_norm: float) -> Vector:
        """Return already clipped data plus noise of the standard deviation above."""
        noise_std = self.compute_noise_multiplier(epsilon, clip_norm)
        return add_noise(data, noise_std, self.noise)

    def compute_cumulative_privacy_loss(
        self, participation_rates: ArrayLike, participation_counts: ArrayLike
    ) -> NDArray[np.float64]:
        """Return budget(rate_i) * count_i for every client (basic composition)."""
        rates = np.asarray(participation_rates, dtype=np.float64)
        counts = np.asarray(participation_counts, dtype=np.float64)
        if rates.shape != counts.shape:
            raise InvalidValueError(
                f"participation_rates of shape {rates.shape} must have the shape of "
                f"participation_counts, {counts.shape}"
            )
        if not np.all(np.isfinite(counts) & (counts >= 0)):
            raise InvalidValueError("participation_counts must be finite and >= 0")
        budgets = np.asarray([self.compute_privacy_budget(rate) for rate in rates.ravel()])
        return np.asarray(budgets.reshape(rates.shape) * counts)

    def get_privacy_analysis(
        self, participation_rates: ArrayLike, participation_counts: ArrayLike
    ) -> dict[str, float]:
        """Compare the cumulative losses with their bound count * base * (1 + alpha)."""
        losses = self.compute_cumulative_privacy_loss(participation_rates, participation_counts)
        if losses.size == 0:
            raise InvalidValueError("participation_counts=[] must hold at least one client")
        bounds = np.asarray(participation_counts, dtype=np.float64)
        bounds = bounds * self.epsilon_base * (1.0 + self.alpha)
        mean_bound = float(bounds.mean())
        return {
            "mean_cumulative_loss": float(losses.mean()),
            "max_cumulative_loss": float(losses.max()),
            "min_cumulative_loss": float(losses.min()),
            "theoretical_upper_bound": float(bounds.max()),
            "privacy_efficiency": float(losses.mean()) / mean_bound if mean_bound else 0.0,
        }

    def get_accounting_method(self) -> str:
        """Name the composition rule of the seed documents."""
        return "Basic Composition (Conservative Upper Bound)"


def add_noise(data: Vector, noise_std: float, noise: NoiseStream) -> Vector:
    """Return data plus noise_std * N(0, 1), added in float64.

    The result has the data's own type; whole numbers, which could not hold the
    noise, become float64.
    """
    if isinstance(data, torch.Tensor):
        drawn = torch.from_numpy(noise.normal(data.numel()).reshape(tuple(data.shape)))
        noised = data.to(torch.float64) + noise_std * drawn.to(data.device)
        return noised.to(data.dtype) if data.is_floating_point() else noised
    array = np.asarray(data)
    kind = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
    noised_array = array.astype(np.float64) + noise_std * noise.normal(array.size).reshape(
        array.shape
    )
    return noised_array.astype(kind)


def _scalar(value: Any) -> Any:
    """Unwrap one-element numpy and torch values into Python numbers."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, np.generic | np.ndarray):
        return value.item() if value.size == 1 else value
    return value
