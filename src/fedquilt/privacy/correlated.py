"""Noise that is correlated over rounds, so that the sum over rounds has less of it.

Matrix mechanism (DP-FTRL): instead of fresh noise Z_t a round gets (C^-1 Z)_t with
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

from collections import deque

import numpy as np
from numpy.typing import NDArray

from fedquilt.privacy.noise import NoiseSource


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
