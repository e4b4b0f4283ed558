"""Gaussian noise: where it comes from, and noise correlated over rounds.

Whoever can reproduce the noise can subtract it.  So the default draws every
number from the operating system; a seeded source exists for reproducible experiments
and says of itself that it protects nobody.

That generator gives some 300 MB a second to one thread, and a number takes 16 bytes: 50 million
parameters wait three seconds for their noise.  So a release on a GPU asks the operating system
for a fresh 256-bit key and expands it there with ChaCha20 (Bernstein 2008; RFC 8439), the cipher
that Linux' own generator expands its keys with.  A key serves one vector and is then forgotten;
whoever cannot tell ChaCha20 from random bits cannot tell `DeviceNoise` from `SecretNoise`.

Noise may be correlated over rounds, so that the sum over rounds has less of it (matrix
mechanism, DP-FTRL): instead of fresh noise Z_t a round gets (C^-1 Z)_t with
a lower triangular Toeplitz C of b bands, the truncated square root of the prefix
sums: c_0 = 1, c_j = c_(j-1) (2j - 1) / (2j) for j < b.

If a client's joins are at least b rounds apart, the columns of C it touches do not
overlap, and a join clipped at c under noise s costs (c / s)^2 * sum_j c_j^2
(Choquette-Choo et al. 2023, arXiv:2306.08153).  The separation is enforced: who
joined in the last b - 1 rounds is not selected.

The recursion y_t = Z_t - sum_(j=1)^(b-1) c_j y_(t-j) needs the last b - 1 noise
vectors, which live in memory only.  After a restart they are gone and the sequence
begins anew: C is then block diagonal, whose columns are no longer, so every claim
stands and only the cancellation across the restart is lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.randomness import secret_bytes
from fedquilt.common.vectors import CHUNK, CHUNK_ON_GPU, chunks


class NoiseStream(Protocol):
    """Something that yields standard normal numbers."""

    def normal(self, size: int) -> NDArray[np.float64]:
        """Return `size` independent standard normal numbers in float64."""


@runtime_checkable
class DeviceStream(Protocol):
    """A stream that draws where a vector is (`DeviceNoise`)."""

    def normal_on(self, device: torch.device, size: int) -> torch.Tensor:
        """Return `size` independent standard normal numbers in float64, on the device."""


@runtime_checkable
class WordStream(Protocol):
    """A stream of fair bits, which discrete noise is made of."""

    def words(self, size: int) -> NDArray[np.uint64]:
        """Return `size` independent words of 64 fair bits."""


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

    def words(self, size: int) -> NDArray[np.uint64]:
        """Return `size` independent words of 64 fair bits."""
        return np.frombuffer(secret_bytes(8 * size), dtype=np.uint64)

    def normal(self, size: int) -> NDArray[np.float64]:
        """Return `size` independent standard normal numbers in float64."""
        pairs = (size + 1) // 2
        bits = np.frombuffer(secret_bytes(16 * pairs), dtype=np.uint64) >> np.uint64(11)
        uniform = bits.astype(np.float64)
        radius = np.sqrt(-2.0 * np.log((uniform[:pairs] + 1.0) * 2.0**-53))
        angle = uniform[pairs:] * (2.0 * np.pi * 2.0**-53)
        result = np.empty(2 * pairs)
        np.multiply(radius, np.cos(angle), out=result[:pairs])
        np.multiply(radius, np.sin(angle), out=result[pairs:])
        return result[:size]


_NUMBERS = 8  # of one block
_BLOCKS = 128  # of one program
_MOST_BLOCKS = 1 << 32  # the block's number has 32 bits


class DeviceNoise(SecretNoise):
    """Noise from the operating system, expanded on a GPU where the vector is on one.

    A block of 64 bytes, under the block's number, makes eight standard normal numbers as
    `SecretNoise` makes two of 16 bytes, in float64.
    """

    description = "operating system generator; for vectors on the GPU expanded there by ChaCha20"

    def normal_on(self, device: torch.device, size: int) -> torch.Tensor:
        """Return `size` independent standard normal numbers in float64, on a GPU."""
        return expand_key(secret_bytes(32), size, device)


def expand_key(key: bytes, size: int, device: torch.device) -> torch.Tensor:
    """Return the standard normal numbers of a key: never twice the same key for noise."""
    from fedquilt.privacy.noise_kernels import normal_kernel

    blocks = -(-size // _NUMBERS)
    if blocks >= _MOST_BLOCKS:
        raise ValueError(f"size={size} must be below {_NUMBERS * _MOST_BLOCKS}")
    words = torch.from_numpy(np.frombuffer(key, dtype=np.int32).copy()).to(device)
    # In a tensor: a kernel would take a Python number as float32.
    scales = torch.tensor([2.0**-53, 2.0 * math.pi * 2.0**-53], dtype=torch.float64, device=device)
    numbers = torch.empty(size, dtype=torch.float64, device=device)
    normal_kernel[(-(-blocks // _BLOCKS),)](words, scales, numbers, size, BLOCK=_BLOCKS)
    return numbers


class SeededNoise:
    """Reproducible noise for experiments; it protects nobody."""

    reproducible = True

    def __init__(self, seed: int) -> None:
        self.seed = checks.integer("noise_seed", seed, at_least=0)

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

    def words(self, size: int) -> NDArray[np.uint64]:
        return self._generator.integers(0, 2**64, size, dtype=np.uint64)


def noise_source(seed: int | None, device: torch.device | None = None) -> NoiseSource:
    """Return secret noise, or the seeded source when a seed is given.

    Secret noise for vectors on a GPU is drawn there, where Triton is installed.
    """
    if seed is not None:
        return SeededNoise(seed)
    if device is not None and device.type == "cuda" and find_spec("triton") is not None:
        return DeviceNoise()
    return SecretNoise()


def words_of(stream: NoiseStream) -> Callable[[int], NDArray[np.uint64]]:
    """Return what draws the fair bits of a stream."""
    if not isinstance(stream, WordStream):
        raise TypeError(f"{type(stream).__name__} must have words for discrete noise")
    return stream.words


def normal_where(device: torch.device, size: int, stream: NoiseStream) -> torch.Tensor:
    """Return standard normal numbers of a stream on a device; drawn there by one that can."""
    if device.type != "cpu" and isinstance(stream, DeviceStream):
        return stream.normal_on(device, size)
    return torch.from_numpy(stream.normal(size)).to(device)


def toeplitz_coefficients(bands: int) -> NDArray[np.float64]:
    """Return c_0 .. c_(b-1) of the truncated square root of the prefix-sum matrix."""
    steps = np.arange(1, bands, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])


class BandedNoise:
    """A sequence of standard noise vectors, correlated over `bands` rounds.

    With `bands=1` it is plain independent noise.
    """

    def __init__(self, source: NoiseSource, bands: int = 1) -> None:
        self.source = source
        self.coefficients = toeplitz_coefficients(bands)
        self._recent: deque[NDArray[np.float64]] = deque(maxlen=max(0, bands - 1))
        self._next_round: int | None = None

    @property
    def bands(self) -> int:
        """The number of rounds over which noise is correlated."""
        return len(self.coefficients)

    @property
    def cost_factor(self) -> float:
        """sum_j c_j^2: by how much a join costs more than under independent noise."""
        return float(np.sum(self.coefficients**2))

    def draw(self, round_index: int, size: int) -> NDArray[np.float64]:
        """Return the noise of a round; rounds must be asked for in order."""
        if self._next_round != round_index:
            self._restart(round_index, size)
        self._next_round = round_index + 1
        return self._advance(round_index, size)

    def draw_chunks(
        self, round_index: int, size: int, device: torch.device
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the noise that `draw` returns, a chunk at a time, on the device.

        Independent noise is drawn a chunk at a time too, from one stream, and is the same;
        a source that can draws it on the GPU.
        """
        stream = self.source.stream(round_index)
        if self.bands == 1 and device.type != "cpu" and isinstance(stream, DeviceStream):
            for chunk in chunks(size, CHUNK_ON_GPU):
                yield chunk, stream.normal_on(device, chunk.stop - chunk.start)
            return
        if self.bands == 1 and size > CHUNK:
            for chunk in chunks(size):
                drawn = stream.normal(chunk.stop - chunk.start)
                yield chunk, torch.from_numpy(drawn).to(device)
            return
        noise = self.draw(round_index, size)
        for chunk in chunks(size):
            yield chunk, torch.from_numpy(noise[chunk]).to(device)

    def _advance(self, round_index: int, size: int) -> NDArray[np.float64]:
        noise = self.source.stream(round_index).normal(size)
        for distance, earlier in enumerate(self._recent, start=1):
            noise -= self.coefficients[distance] * earlier
        if self.bands > 1:
            self._recent.appendleft(noise)
        return noise.copy() if self.bands > 1 else noise

    def _restart(self, round_index: int, size: int) -> None:
        """Begin anew; reproducible noise is recomputed from the first round instead."""
        self._recent.clear()
        if self.source.reproducible and self.bands > 1:
            for earlier in range(round_index):
                self._advance(earlier, size)
