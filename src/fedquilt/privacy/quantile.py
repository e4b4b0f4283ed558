"""A clip bound that follows a quantile of the update norms, privately.

Andrew, Thakkar, McMahan and Ramaswamy 2021 (arXiv:1905.03871).  Each client of a
round adds the bit b_i = [||u_i|| <= C_t], 1 when it was not clipped:

    fraction = (sum (b_i - 1/2) + N(0, sigma_b^2)) / m + 1/2
    C_(t+1)  = C_t exp(-eta (fraction - gamma))

The shifted bit is +-1/2, and 0 for a zero update, so its sum has sensitivity 1/2
under zero-out adjacency and costs a client 1 / (4 sigma_b^2) in squared GDP units.  Under
replace-one it may turn from -1/2 to 1/2, and costs four times that, like everything else.
The bound of a round depends on earlier rounds only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.privacy.noise import NoiseStream

# The bound may move by at most this factor a round, whatever the noise says.
_LARGEST_STEP = 4.0


@dataclass
class PrivateQuantile:
    """The private estimate of a quantile of the norms; `bound` is C_t.

    `bit_noise_std` is sigma_b.  Small cohorts need it far above the usual m / 20:
    twice the noise multiplier costs 1/16 of a join.
    """

    bound: float
    target: float
    learning_rate: float
    bit_noise_std: float
    expected_cohort: float
    _bits: float = 0.0

    @property
    def cost(self) -> float:
        """What one client's bit costs it."""
        return 1.0 / (4.0 * self.bit_noise_std**2)

    def open_round(self) -> None:
        """Forget the bits of the last round."""
        self._bits = 0.0

    def add(self, length: float) -> None:
        """Add the bit of an update of this norm; nothing adds nothing.

        A zero update is what a client with no data would send.  Were it to add a
        bit, taking a client's data away could move the sum by 1 instead of 1/2.
        """
        if length > 0:
            self._bits += 0.5 if length <= self.bound else -0.5

    def close_round(self, noise: NoiseStream) -> float:
        """Noise the bits, move the bound for the next round, return the noised fraction."""
        noised = self._bits + self.bit_noise_std * float(noise.normal(1)[0])
        fraction = noised / self.expected_cohort + 0.5
        step = -self.learning_rate * (fraction - self.target)
        limit = math.log(_LARGEST_STEP)
        self.bound *= math.exp(min(limit, max(-limit, step)))
        return fraction

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the bound, which is a released value."""
        return {"quantile_bound": np.asarray([self.bound])}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Take over what `state` returned."""
        self.bound = float(state["quantile_bound"][0])
