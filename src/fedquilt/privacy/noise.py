"""Gaussian noise, from the operating system's generator unless asked otherwise.

Whoever can reproduce the noise can subtract it.  So the default draws every
number from `os.urandom`; a seeded source exists for reproducible experiments
and says of itself that it protects nobody.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedquilt import validate


class NoiseStream(Protocol):
    """Something that yields standard normal numbers."""

    def normal(self, size: int) -> NDArray[np.float64]:
        """Return `size` independent standard normal numbers in float64."""


class NoiseSource(Protocol):
    """Where the noise of a run comes from."""

    @property
    def description(self) -> str:
        """What the statement says about the source."""

    @property
    def reproducible(self) -> bool:
        """Whether somebody could draw the same noise again."""

    def stream(self, *keys: int) -> NoiseStream:
        """Return the noise of one purpose, for example of one round."""


class SecretNoise:
    """Noise from the operating system; source and stream in one, without state.

    Box and Muller 1958: with U1 in (0, 1] and U2 in [0, 1) uniform on a grid of
    2^-53, sqrt(-2 ln U1) times the cosine and the sine of 2 pi U2 are two
    independent standard normal numbers.
    """

    description = "operating system generator"
    reproducible = False

    def stream(self, *keys: int) -> SecretNoise:
        """Return itself: secret noise is never drawn twice, so keys do not matter."""
        return self

    def normal(self, size: int) -> NDArray[np.float64]:
        """Return `size` independent standard normal numbers in float64."""
        pairs = (size + 1) // 2
        bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64) >> np.uint64(11)
        uniform = bits.astype(np.float64)
        radius = np.sqrt(-2.0 * np.log((uniform[:pairs] + 1.0) * 2.0**-53))
        angle = uniform[pairs:] * (2.0 * np.pi * 2.0**-53)
        result = np.empty(2 * pairs)
        np.multiply(radius, np.cos(angle), out=result[:pairs])
        np.multiply(radius, np.sin(angle), out=result[pairs:])
        return result[:size]


class SeededNoise:
    """Reproducible noise for experiments; it protects nobody."""

    reproducible = True

    def __init__(self, seed: int) -> None:
        self.seed = validate.integer("noise_seed", seed, at_least=0)

    @property
    def description(self) -> str:
        """What the statement says about the source."""
        return f"reproducible noise (seed {self.seed}): no privacy"

    def stream(self, *keys: int) -> _SeededStream:
        """Return the stream of these keys; the same keys give the same noise."""
        return _SeededStream(np.random.SeedSequence(self.seed, spawn_key=keys))


class _SeededStream:
    def __init__(self, sequence: np.random.SeedSequence) -> None:
        self._generator = np.random.Generator(np.random.Philox(sequence))

    def normal(self, size: int) -> NDArray[np.float64]:
        return self._generator.standard_normal(size)


def noise_source(seed: int | None) -> NoiseSource:
    """Return secret noise, or the seeded source when a seed is given."""
    return SecretNoise() if seed is None else SeededNoise(seed)
