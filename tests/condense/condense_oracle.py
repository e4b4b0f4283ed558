"""Condensation a second time: plain NumPy in double precision, every derivative by hand.

Nothing here is imported from the package or from torch.  Classes are taken one after
another, groups are lists, and the network is written out layer by layer, so that what
is shared with the code under test is the mathematics alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPS = 1e-5


def conv(x: Array, weight: Array, bias: Array, padding: int) -> Array:
    """y[n,o,i,j] = b[o] + sum_{c,a,b} w[o,c,a,b] x[n,c,i+a-p,j+b-p], x = 0 outside."""
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    high, wide = padded.shape[2] - 2, padded.shape[3] - 2
    out = np.zeros((len(x), len(weight), high, wide)) + bias[:, None, None]
    for a in range(3):
        for b in range(3):
            window = padded[:, :, a : a + high, b : b + wide]
            out += np.einsum("oc,nchw->nohw", weight[:, :, a, b], window)
    return out


def conv_back(g: Array, weight: Array, padding: int) -> Array:
    """dL/dx of `conv`: every output hands its share back to the nine pixels it read."""
    high, wide = g.shape[2:]
    padded = np.zeros((len(g), weight.shape[1], high + 2, wide + 2))
    for a in range(3):
        for b in range(3):
            share = np.einsum("oc,nohw->nchw", weight[:, :, a, b], g)
            padded[:, :, a : a + high, b : b + wide] += share
    return padded[:, :, padding : high + 2 - padding, padding : wide + 2 - padding]


def norm(x: Array, scale: Array, shift: Array) -> tuple[Array, Array, Array]:
    """Instance norm: u = (x - mean) / sqrt(var + eps) over each image's channel; s u + t."""
    centred = x - x.mean(axis=(2, 3), keepdims=True)
    root = np.sqrt((centred**2).mean(axis=(2, 3), keepdims=True) + EPS)
    u = centred / root
    return scale[:, None, None] * u + shift[:, None, None], u, root


def norm_back(g: Array, scale: Array, u: Array, root: Array) -> Array:
    """dL/dx = (h - mean(h) - u mean(h u)) / sqrt(var + eps), h = s g."""
    h = scale[:, None, None] * g
    mean = h.mean(axis=(2, 3), keepdims=True)
    along = (h * u).mean(axis=(2, 3), keepdims=True)
    return (h - mean - u * along) / root


def pool(x: Array) -> Array:
    """Means of 2 x 2 pixels; an odd last row or column is left out."""
    high, wide = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    x = x[:, :, :high, :wide]
    corners = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return sum(corners) / 4


def pool_back(g: Array, shape: tuple[int, ...]) -> Array:
    """Each of the four pixels gets a quarter."""
    back = np.zeros(shape)
    for i in range(2 * g.shape[2]):
        for j in range(2 * g.shape[3]):
            back[:, :, i, j] = g[:, :, i // 2, j // 2] / 4
    return back


@dataclass
class Network:
    """Blocks of convolution, instance norm, ReLU and pooling, then a linear layer."""

    weights: Mapping[str, Array]
    channels: int
    trace: list[tuple[Array, Array, Array]] = field(default_factory=list)
    last_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.depth = sum(name.endswith("weight") for name in self.weights) // 2

    def block(self, number: int) -> tuple[Array, Array, Array, Array, int]:
        """Return kernel, its bias, scale, shift and the padding of a block."""
        names = [f"features.{4 * number + place}" for place in (0, 1)]
        parts = [self.weights[f"{name}.{part}"] for name in names for part in ("weight", "bias")]
        kernel, bias, scale, shift = parts
        padding = 3 if number == 0 and self.channels == 1 else 1
        return kernel, bias, scale, shift, padding

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return embeddings and logits, and remember what `backward` needs."""
        self.trace = []
        for number in range(self.depth):
            kernel, bias, scale, shift, padding = self.block(number)
            normed, u, root = norm(conv(x, kernel, bias, padding), scale, shift)
            self.trace.append((normed, u, root))
            x = pool(np.where(normed > 0, normed, 0.0))
        self.last_shape = x.shape
        embedded = x.reshape(len(x), -1)
        matrix, offset = self.weights["classifier.weight"], self.weights["classifier.bias"]
        return embedded, embedded @ matrix.T + offset

    def backward(self, g_embedded: Array, g_logits: Array) -> Array:
        """Return the gradient at the pixels of the last `forward`."""
        g = g_embedded + g_logits @ self.weights["classifier.weight"]
        g = g.reshape(self.last_shape)
        for number in reversed(range(self.depth)):
            kernel, _, scale, _, padding = self.block(number)
            normed, u, root = self.trace[number]
            g = pool_back(g, normed.shape) * (normed > 0)
            g = conv_back(norm_back(g, scale, u, root), kernel, padding)
        return g


def group_means(rows: Array, groups: Sequence[Sequence[int]]) -> Array:
    """Return the mean of the rows of each group."""
    return np.array([sum(rows[i] for i in group) / len(group) for group in groups])


def softmax(z: Array) -> Array:
    """Return exp(z) / sum exp(z) of one row."""
    raised = np.exp(z - z.max())
    return raised / raised.sum()


def through_softmax(p: Array, g: Array) -> Array:
    """dL/dz from dL/dp for p = softmax(z)."""
    return p * (g - (p * g).sum())


def distance(kind: str, z: Array, target: Array) -> tuple[float, Array]:
    """Return l(z, Z) of one row and its derivative in z."""
    if kind == "none":
        return 0.0, np.zeros_like(z)
    if kind == "l2":
        return float(((z - target) ** 2).sum()), 2 * (z - target)
    p, q = softmax(z), softmax(target)
    if kind == "kl":
        return float((q * np.log(q / p)).sum()), p - q
    if kind == "wasserstein":
        return float(np.abs(p - q).sum() / 2), through_softmax(p, np.sign(p - q) / 2)
    assert kind == "wasserstein_sorted"
    order = np.argsort(p)
    gap = np.cumsum(p[order]) - np.cumsum(np.sort(q))
    g = np.zeros_like(p)
    # The k-th smallest entry is in the cumulative sums k, k + 1, ...
    for k, place in enumerate(order):
        g[place] = np.sign(gap[k:]).sum()
    return float(np.abs(gap).sum()), through_softmax(p, g)


@dataclass(frozen=True)
class Group:
    """What a client says about some samples of a class."""

    count: int
    features: Array
    logits: Array


def class_loss(
    f: Array, z: Array, groups: Sequence[Group], kind: str, computation: str
) -> tuple[float, Array, Array]:
    """Return the loss of one class and its derivatives in f and z."""
    total = sum(group.count for group in groups)
    shares = [group.count / total for group in groups]
    if computation == "avg-loss":
        mean_f = sum(w * g.features for w, g in zip(shares, groups, strict=True))
        mean_z = sum(w * g.logits for w, g in zip(shares, groups, strict=True))
        shares, groups = [1.0], [Group(1, mean_f, mean_z)]
    value, g_f, g_z = 0.0, np.zeros_like(f), np.zeros_like(z)
    for share, group in zip(shares, groups, strict=True):
        apart, slope = distance(kind, z, group.logits)
        value += share * (((f - group.features) ** 2).sum() + apart)
        g_f += share * 2 * (f - group.features)
        g_z += share * slope
    return float(value), g_f, g_z


def image_gradient(
    network: Network, images: Array, groups: Sequence[Group], kind: str, computation: str
) -> tuple[float, Array]:
    """Return loss and pixel gradient of one class with images [ipc, C, H, W]."""
    embedded, logits = network.forward(images)
    f, z = embedded.mean(axis=0), logits.mean(axis=0)
    value, g_f, g_z = class_loss(f, z, groups, kind, computation)
    ipc = len(images)
    return value, network.backward(np.tile(g_f / ipc, (ipc, 1)), np.tile(g_z / ipc, (ipc, 1)))


@dataclass
class Descent:
    """v <- m v + gradient, images <- images - rate v, class after class."""

    network: Network
    images: dict[int, Array]
    rate: float
    momentum: float
    kind: str = "none"
    computation: str = "avg-loss"

    def __post_init__(self) -> None:
        self.velocity = {label: np.zeros_like(x) for label, x in self.images.items()}

    def step(self, statistics: Mapping[int, Sequence[Group]]) -> float:
        """Move the images of the classes that have statistics; return the loss before."""
        total = 0.0
        for label, groups in statistics.items():
            value, slope = image_gradient(
                self.network, self.images[label], groups, self.kind, self.computation
            )
            self.velocity[label] = self.momentum * self.velocity[label] + slope
            self.images[label] = self.images[label] - self.rate * self.velocity[label]
            total += value
        return total
