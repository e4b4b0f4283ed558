"""Clipping: one function that bounds a vector's norm, and the rules that choose the bound.

`QuantileClipper` is the class of the QuAP-FL API document.  Its bound is this round's
raw percentile, a statistic of the data (QuAP-FL paper, Algorithm 1): whatever uses it has
no guarantee, and the statement of the run says so.

`PrivateQuantile` follows a quantile of the update norms privately (Andrew, Thakkar, McMahan
and Ramaswamy 2021, arXiv:1905.03871).  Each client of a round adds the bit
b_i = [||u_i|| <= C_t], 1 when it was not clipped:

    fraction = (sum (b_i - 1/2) + N(0, sigma_b^2)) / m + 1/2
    C_(t+1)  = C_t exp(-eta (fraction - gamma))

The shifted bit is +-1/2, and 0 for a zero update, so its sum has sensitivity 1/2
under zero-out adjacency and costs a client 1 / (4 sigma_b^2) in squared GDP units.  Under
replace-one it may turn from -1/2 to 1/2, and costs four times that, like everything else.
The bound of a round depends on earlier rounds only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, NotReadyError
from fedquilt.common.vectors import norm
from fedquilt.privacy.noise import NoiseStream

Vector = TypeVar("Vector", NDArray[Any], torch.Tensor)


# Scaled vectors end this much inside the bound, or twice the spacing of their type.
_HAIR = 1e-12


def clip(vector: Vector, bound: float) -> Vector:
    """Return the vector scaled to norm <= bound: g * min(1, C / ||g||) (paper, eq. 6).

    A vector inside the bound is returned as it is; one with a NaN or Inf entry
    becomes zero, so that it can do no harm and still counts.  Scaling stops a
    hair short of the bound: a noise level that is calibrated to the bound must
    not meet a vector that rounding has carried beyond it.
    """
    size = norm(vector)
    if not np.isfinite(size):
        if isinstance(vector, torch.Tensor):
            return torch.zeros_like(vector)
        return np.zeros_like(vector)
    if size <= bound:
        return vector
    factor = bound / size
    if isinstance(vector, torch.Tensor):
        kind = vector.dtype if vector.is_floating_point() else torch.get_default_dtype()
        # In float64: a factor below the smallest normal float32 would be rounded by far more.
        return (vector.double() * (factor * _shrink(torch.finfo(kind).eps))).to(kind)
    exact = vector.dtype if vector.dtype.kind == "f" else np.dtype(np.float64)
    scaled = vector.astype(np.float64) * np.float64(factor * _shrink(float(np.finfo(exact).eps)))
    return scaled.astype(exact, copy=False)


def _shrink(spacing: float) -> float:
    """Return the factor that outdoes the rounding of numbers with this relative spacing."""
    return 1.0 - max(_HAIR, 2.0 * spacing)


class QuantileClipper:
    """Follow a quantile of the update norms with momentum (paper, Algorithm 1).

        target = Percentile(norms, q), limited to [min_clip, max_clip]
        C_t    = target                               in the first round
        C_t    = momentum * C_(t-1) + (1 - momentum) * target   afterwards

    Parameters
    ----------
    quantile, momentum, min_clip, max_clip : float
        q in (0, 1), momentum in [0, 1), 0 < min_clip < max_clip.
    initial_clip : float, optional
        Value before the first round, in [min_clip, max_clip]; absent takes the
        first target.
    """

    def __init__(
        self,
        quantile: float = 0.9,
        momentum: float = 0.95,
        min_clip: float = 0.1,
        max_clip: float = 10.0,
        initial_clip: float | None = None,
    ) -> None:
        self.quantile = checks.number("quantile", quantile, above=0, below=1)
        self.momentum = checks.number("momentum", momentum, at_least=0, below=1)
        self.min_clip = checks.number("min_clip", min_clip, above=0)
        self.max_clip = checks.number("max_clip", max_clip, above=self.min_clip)
        self.initial_clip: float | None = None
        if initial_clip is not None:
            self.initial_clip = checks.number(
                "initial_clip", initial_clip, at_least=self.min_clip, at_most=self.max_clip
            )
        self.reset()

    def reset(self) -> None:
        """Forget all rounds and go back to the initial value."""
        self.clip_value: float | None = self.initial_clip
        self.clip_history: list[float] = []

    def compute_gradient_norms(self, gradients_list: Sequence[Any]) -> NDArray[np.float64]:
        """Return the L2 norm of every update."""
        return np.asarray([norm(gradient) for gradient in gradients_list], dtype=np.float64)

    def update_clip_value(self, gradients_list: Sequence[Any]) -> float:
        """Update the clip bound from one round's updates and return it.

        Norms that are NaN or Inf are left out; when none is left, the current
        value (or min_clip) is returned and nothing is recorded.
        """
        if len(gradients_list) == 0:
            raise InvalidValueError("gradients_list=[] must hold at least one update")
        norms = self.compute_gradient_norms(gradients_list)
        norms = norms[np.isfinite(norms)]
        if norms.size == 0:
            return self.min_clip if self.clip_value is None else self.clip_value
        percentile = np.percentile(norms, 100 * self.quantile)
        target = float(np.clip(percentile, self.min_clip, self.max_clip))
        if self.clip_value is None:
            self.clip_value = target
        else:
            self.clip_value = self.momentum * self.clip_value + (1 - self.momentum) * target
        self.clip_history.append(self.clip_value)
        return self.clip_value

    def clip_gradient(self, gradient: Vector) -> Vector:
        """Return one update clipped to the current bound; zero when it is not finite."""
        return clip(gradient, self._bound())

    def clip_gradients(self, gradients_list: Sequence[Vector]) -> list[Vector]:
        """Return all updates clipped to the current bound."""
        return [self.clip_gradient(gradient) for gradient in gradients_list]

    def get_current_clip_value(self) -> float | None:
        """Return the current bound, None before there is one."""
        return self.clip_value

    def get_statistics(self) -> dict[str, Any]:
        """Summarise the bounds so far; the first two keys only before any update."""
        summary: dict[str, Any] = {
            "current_clip": self.clip_value,
            "num_updates": len(self.clip_history),
        }
        if self.clip_history:
            history = np.asarray(self.clip_history)
            summary |= {
                "mean_clip": float(history.mean()),
                "std_clip": float(history.std()),
                "min_clip_observed": float(history.min()),
                "max_clip_observed": float(history.max()),
            }
        return summary

    def state(self) -> dict[str, NDArray[Any]]:
        """Return value and history as arrays, for a checkpoint."""
        value = np.nan if self.clip_value is None else self.clip_value
        return {
            "clip_value": np.asarray([value], dtype=np.float64),
            "clip_history": np.asarray(self.clip_history, dtype=np.float64),
        }

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        value = float(state["clip_value"][0])
        self.clip_value = None if np.isnan(value) else value
        self.clip_history = [float(item) for item in state["clip_history"]]

    def _bound(self) -> float:
        if self.clip_value is None:
            raise NotReadyError(
                "the clip value is not set yet: call update_clip_value first or give initial_clip"
            )
        return self.clip_value


class FixedClipper:
    """A clip bound that is chosen in advance and never moves."""

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = checks.number("clip_norm", clip_norm, above=0)

    def update_clip_value(self, gradients_list: Sequence[Any]) -> float:
        """Return the fixed bound, whatever the updates are."""
        return self.clip_norm

    def clip_gradient(self, gradient: Vector) -> Vector:
        """Return one update clipped to the bound; zero when it is not finite."""
        return clip(gradient, self.clip_norm)

    def clip_gradients(self, gradients_list: Sequence[Vector]) -> list[Vector]:
        """Return all updates clipped to the bound."""
        return [self.clip_gradient(gradient) for gradient in gradients_list]

    def get_current_clip_value(self) -> float:
        """Return the bound."""
        return self.clip_norm

    def state(self) -> dict[str, NDArray[Any]]:
        """Return nothing: a fixed bound has no state."""
        return {}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Accept the empty state."""


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

    @property
    def cost(self) -> float:
        """What one client's bit costs it."""
        return 1.0 / (4.0 * self.bit_noise_std**2)

    def bit(self, update_norm: float) -> float:
        """Return the bit of an update of this norm, less 1/2; of nothing, nothing.

        A zero update is what a client with no data would send.  Were it to add a
        bit, taking a client's data away could move the sum by 1 instead of 1/2.
        """
        if not update_norm > 0:
            return 0.0
        return 0.5 if update_norm <= self.bound else -0.5

    def close_round(self, bits: float, noise: NoiseStream) -> float:
        """Noise the sum of bits, move the bound for the next round, return the noised fraction."""
        noised = bits + self.bit_noise_std * float(noise.normal(1)[0])
        fraction = noised / self.expected_cohort + 0.5
        step = -self.learning_rate * (fraction - self.target)
        limit = math.log(_LARGEST_STEP)
        self.bound *= math.exp(min(limit, max(-limit, step)))
        return fraction

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the bound, which is a released value."""
        return {"quantile_bound": np.asarray([self.bound])}

    def load_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        self.bound = float(state["quantile_bound"][0])
