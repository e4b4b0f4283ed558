"""A federation on slices in plain NumPy: forward passes by hand, gradients by differences.

The network is tanh, tanh, linear.  A client holds the units `first` and `second` of the
two hidden layers; what it holds of every tensor follows from them, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Array = np.ndarray
INPUTS, HIDDEN, CLASSES = 3, 4, 3
SHAPES = ((HIDDEN, INPUTS), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
SIZE = sum(math.prod(shape) for shape in SHAPES)

Loss = Callable[[Array, Array], float]
"""The loss at a vector, given the one at which the step began: teachers do not move with it."""


@dataclass
class Held:
    """The units of each hidden layer that a client holds."""

    first: list[int]
    second: list[int]

    def mask(self) -> Array:
        """Return which elements of the flat vector are held."""
        masks = [np.zeros(shape, bool) for shape in SHAPES]
        masks[0][self.first] = True
        masks[1][self.first] = True
        masks[2][np.ix_(self.second, self.first)] = True
        masks[3][self.second] = True
        masks[4][:, self.second] = True
        masks[5][:] = True
        return np.concatenate([mask.ravel() for mask in masks])


def split(vector: Array) -> list[Array]:
    """Return the six tensors of a flat vector."""
    parts, start = [], 0
    for shape in SHAPES:
        parts.append(vector[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    return parts


def logits(vector: Array, x: Array, held: Held, scale: tuple[float, float] = (1, 1)) -> Array:
    """Return the outputs of a slice; `scale` divides the hidden layers' sums."""
    w1, b1, w2, b2, w3, b3 = split(vector)
    first, second = held.first, held.second
    a1 = np.tanh((x @ w1[first].T + b1[first]) / scale[0])
    a2 = np.tanh((a1 @ w2[np.ix_(second, first)].T + b2[second]) / scale[1])
    return a2 @ w3[:, second].T + b3


def log_softmax(z: Array) -> Array:
    """Return log-probabilities."""
    shifted = z - z.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def cross_entropy(z: Array, y: Array) -> float:
    """Return the mean cross-entropy."""
    return float(-log_softmax(z)[np.arange(len(y)), y].mean())


def divergence(teacher: Array, student: Array) -> float:
    """Return the mean of KL(teacher || student)."""
    p, q = log_softmax(teacher), log_softmax(student)
    return float((np.exp(p) * (p - q)).sum(1).mean())


def gradient(loss: Loss, vector: Array, step: float = 1e-6) -> Array:
    """Return the gradient by central differences."""
    slopes = np.zeros_like(vector)
    for place in range(len(vector)):
        ahead, behind = vector.copy(), vector.copy()
        ahead[place] += step
        behind[place] -= step
        slopes[place] = (loss(ahead, vector) - loss(behind, vector)) / (2 * step)
    return slopes


def trained(losses: Sequence[Loss], start: Array, rate: float) -> Array:
    """Return what gradient descent adds to `start`, one step for each loss."""
    vector = start.copy()
    for loss in losses:
        vector -= rate * gradient(loss, vector)
    return vector - start


def mean_over_holders(updates: list[tuple[Array, Array, float]]) -> Array:
    """Return the weighted mean of (update, mask, weight) over holders; zero without any."""
    total = sum(weight * update * mask for update, mask, weight in updates)
    weights = sum(weight * mask for _, mask, weight in updates)
    return np.divide(total, weights, out=np.zeros(len(weights)), where=weights > 0)


def kept(width: Fraction, units: int = HIDDEN) -> int:
    """Return how many units a width keeps."""
    return math.floor(width * units)
