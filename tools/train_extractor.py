"""Train a feature extractor on pictures drawn by programme: nobody's data have a part in it.

    python tools/train_extractor.py --seconds 170 --device cuda --kind all --out DIR [--seed 0]

Needs torch and numpy alone.  Draws a pool of pictures on the device (colour: spectral noise,
coordinate networks and dead leaves of textured shapes; strokes: pen lines as in handwriting; grey:
symmetric silhouettes and leaves without colour), then trains a residual network of 2.8 million
weights by instance discrimination: two views of a picture are to be nearer to one another than to
the views of other pictures of its kind (Chen et al. 2020, temperature 0.1, AdamW, cosine).

Writes into DIR, the first every 20 seconds and at the end:

extractor.safetensors
    The network in float16, every BatchNorm folded into the convolution before it, so that what it
    says of a picture depends on no other.
statistics.safetensors
    For each kind, of features of pictures drawn afresh: mean, covariance over pictures (`total`)
    and covariance over views of one picture (`jitter`), float32.  Directions are ordered by them.
extractor.json
    Digests (SHA-256), seed, seconds, steps, device.

    python tools/train_extractor.py --grey --out DIR [--described 10000]

trains nothing: it writes drawn_grey.safetensors, mean and whitening, float16, of what the network
that fedquilt ships says of so many pen drawings and as many grey things.  Two minutes on one core.

    python tools/train_extractor.py --patches --device cpu --out DIR [--described 8000]

trains nothing either: it writes drawn_patches.safetensors, float16, whitened patches of 4,000 drawn
colour pictures, and the directions of their responses to so many others that views of one picture
change least (a linear discriminant of pictures).  206 seconds (seed 0, half of one busy core).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

CANVAS, SIDE = 40, 32
KINDS = ("colour", "strokes", "grey")
SHARE = {"colour": 0.6, "strokes": 0.2, "grey": 0.2}
BLOCKS = ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2),
          (256, 256, 1))  # fmt: skip
TEMPERATURE, RATE, DECAY, WARMUP = 0.1, 2e-3, 0.05, 200
LINE, SAVE = 10.0, 20.0  # seconds between lines and between checkpoints
DEVICE = torch.device("cpu")


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Return uniform numbers on the device."""
    return torch.rand(*shape, device=DEVICE) * (high - low) + low


def grid(low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the coordinates (down, right) of the canvas."""
    line = torch.linspace(low, high, CANVAS, device=DEVICE)
    return torch.meshgrid(line, line, indexing="ij")


def tinted(x: torch.Tensor) -> torch.Tensor:
    """Mix three planes of unit variance into correlated colours in [0, 1]."""
    n = len(x)
    mix = torch.randn(n, 3, 3, device=DEVICE) * uniform(n, 1, 1, low=0.05, high=0.6)
    mix = mix + uniform(n, 1, 1, low=0.2, high=1.4) / 3
    y = torch.einsum("bij,bjhw->bihw", mix, x) * uniform(n, 1, 1, 1, low=0.08, high=0.35)
    return (y + uniform(n, 3, 1, 1, low=0.15, high=0.85)).clamp(0, 1)


def spectral(n: int) -> torch.Tensor:
    """Draw Gaussian fields whose spectrum falls as a power of an elliptic frequency."""
    down = torch.fft.fftfreq(CANVAS, device=DEVICE)[:, None]
    right = torch.fft.rfftfreq(CANVAS, device=DEVICE)[None]
    angle, flat = uniform(n, 1, 1, 1, high=math.pi), uniform(n, 1, 1, 1, low=-1.6, high=1.6).exp()
    u = (right * angle.cos() + down * angle.sin()) * flat
    v = (down * angle.cos() - right * angle.sin()) / flat
    radius = (u * u + v * v).sqrt().clamp_min(1 / CANVAS)
    wave = torch.randn(n, 3, CANVAS, CANVAS // 2 + 1, device=DEVICE, dtype=torch.complex64)
    x = torch.fft.irfft2(
        wave / radius ** uniform(n, 1, 1, 1, low=0.6, high=2.6), s=(CANVAS, CANVAS)
    )
    return tinted(x / (x.std((2, 3), keepdim=True) + 1e-6))


def coordinates(n: int) -> torch.Tensor:
    """Draw random small networks of the two coordinates."""
    down, right = grid(-1, 1)
    at = torch.stack([right, down], -1).reshape(1, -1, 2)
    turn = uniform(n, 1, high=2 * math.pi)
    rows = torch.cat([turn.cos(), -turn.sin()], 1), torch.cat([turn.sin(), turn.cos()], 1)
    at = at @ (torch.stack(rows, 1) * uniform(n, 1, 1, low=0.4, high=2.0))
    at = at + 0.4 * torch.randn(n, 1, 2, device=DEVICE)
    h = torch.cat([at, at.norm(dim=-1, keepdim=True), torch.ones_like(at[..., :1])], -1)
    h = torch.cat([h, torch.where(uniform(n, 1, 1) < 0.5, h, h.abs())], -1)
    for layer, width in enumerate((20, 20, 3)):
        scale = uniform(n, 1, 1, low=0.8, high=3.0) * (1.6 if layer == 0 else 1.2)
        weight = torch.randn(n, h.shape[-1], width, device=DEVICE) * scale / math.sqrt(h.shape[-1])
        h = h @ weight + 0.5 * torch.randn(n, 1, width, device=DEVICE)
        if layer < 2:
            which = torch.randint(0, 4, (n, 1, width), device=DEVICE)
            kinds = torch.stack([torch.sin(2 * h), torch.tanh(2 * h), h.abs(), torch.exp(-h * h)])
            h = kinds.gather(0, which.expand_as(h)[None])[0]
    x = h.transpose(1, 2).reshape(n, 3, CANVAS, CANVAS)
    return tinted((x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-4))


def shape_mask(
    n: int, x: torch.Tensor | float, y: torch.Tensor | float, radius: torch.Tensor,
    turn: torch.Tensor, flat: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the masks [n, S, S] of superellipses, stars and rings, and the light on them."""
    down, right = grid(0, CANVAS - 1)
    u = ((right - x) * turn.cos() + (down - y) * turn.sin()) * flat
    v = ((down - y) * turn.cos() - (right - x) * turn.sin()) / flat
    powers = torch.tensor([0.8, 1.0, 2.0, 2.0, 4.0, 8.0], device=DEVICE)
    q = powers[torch.randint(0, 6, (n, 1, 1), device=DEVICE)]
    rho = ((u.abs() + 1e-3) ** q + (v.abs() + 1e-3) ** q) ** (1 / q)
    petals = torch.randint(2, 8, (n, 1, 1), device=DEVICE)
    depth = uniform(n, 1, 1, high=0.6) * (uniform(n, 1, 1) < 0.4)
    rho = rho / (1 + depth * torch.cos(petals * torch.atan2(v, u) + uniform(n, 1, 1, high=6.28)))
    hole = uniform(n, 1, 1, low=0.3, high=0.8) * (uniform(n, 1, 1) < 0.12)
    mask = torch.sigmoid((radius - rho) * uniform(n, 1, 1, low=1.5, high=6))
    mask = mask * torch.sigmoid((rho - hole * radius) * 4 + 4 * (hole == 0))
    light = 1 + uniform(n, 1, 1, low=-0.5, high=0.5) * (u / (radius + 1)).clamp(-1.5, 1.5)
    return mask, light


def textures(n: int) -> torch.Tensor:
    """Return n fields of noise and n of coordinate networks."""
    return torch.cat([spectral(n), coordinates(n)])


def leaves(n: int, count: int) -> torch.Tensor:
    """Cover a texture with shapes, the last two large and near the middle: objects."""
    texture = textures(n)
    x = texture[torch.randperm(2 * n, device=DEVICE)[:n]]
    small = uniform(n, 1, 1)
    for i in range(count):
        cx, cy = (uniform(n, 1, 1, low=-4, high=CANVAS + 4) for _ in range(2))
        radius = uniform(n, 1, 1) ** 2 * 14 * (0.3 + small) + 1.5
        if i >= count - 2:
            cx, cy = (CANVAS / 2 + 0.35 * (c - CANVAS / 2) for c in (cx, cy))
            radius = uniform(n, 1, 1, low=5, high=16)
        turn, flat = uniform(n, 1, 1, high=math.pi), uniform(n, 1, 1, low=-0.9, high=0.9).exp()
        mask, light = shape_mask(n, cx, cy, radius, turn, flat)
        share = uniform(n, 1, 1, 1) * (uniform(n, 1, 1, 1) < 0.6)
        fill = texture[torch.randint(0, 2 * n, (n,), device=DEVICE)]
        flat_fill = uniform(n, 1, 1, 1) + uniform(n, 1, 1, 1) * (uniform(n, 3, 1, 1) - 0.5)
        fill = (fill * share + flat_fill * (1 - share)) * light[:, None]
        x = x + mask[:, None] * (fill.clamp(0, 1) - x)
    return x.clamp(0, 1)


def silhouettes(n: int) -> torch.Tensor:
    """Draw grey things on black: parts symmetric about the middle, cut out, with a texture."""
    body = torch.zeros(n, CANVAS, CANVAS, device=DEVICE)
    fill = textures(n)[torch.randperm(2 * n, device=DEVICE)[:n]].mean(1)
    share = uniform(n, 1, 1) * (uniform(n, 1, 1) < 0.7)
    fill = fill * share + uniform(n, 1, 1, low=0.2) * (1 - share)
    parts = torch.randint(1, 6, (n, 1, 1), device=DEVICE)
    mirrored = uniform(n, 1, 1) < 0.7
    for part in range(5):
        far = uniform(n, 1, 1, high=9) * (part > 0)
        cy = CANVAS / 2 + uniform(n, 1, 1, low=-9, high=9) * (1.0 if part else 0.3)
        radius = uniform(n, 1, 1, low=2.5, high=8) + uniform(n, 1, 1, high=7) * (part == 0)
        turn = uniform(n, 1, 1, low=-0.5, high=0.5) * (part > 0)
        flat = uniform(n, 1, 1, low=-0.9, high=0.9).exp()
        mask, light = shape_mask(n, CANVAS / 2 + far, cy, radius, turn, flat)
        mask = torch.where(mirrored, torch.maximum(mask, mask.flip(2)), mask)
        shade = uniform(n, 1, 1, low=0.5, high=1.3) if part else torch.ones(n, 1, 1, device=DEVICE)
        fill = torch.where(mask > 0.5, fill * shade * light, fill)
        cut = (uniform(n, 1, 1) < 0.2) if part else torch.zeros_like(mirrored)
        changed = torch.where(cut, body * (1 - mask), torch.maximum(body, mask))
        body = torch.where(part < parts, changed, body)
    return (body * fill).clamp(0, 1)[:, None].expand(-1, 3, -1, -1)


def strokes(n: int) -> torch.Tensor:
    """Draw one to four pen lines, curved or straight, often joined; a few dark on bright."""
    lines, points = 4, 32
    control = uniform(n, lines, 4, 2)
    straight = (uniform(n, lines, 1, 1) < 0.25).float()
    joined = uniform(n, lines, 1) < 0.6
    t = torch.linspace(0, 1, points, device=DEVICE)
    even = torch.linspace(0, 1, 4, device=DEVICE)[None, :, None]
    for k in range(lines):
        if k:
            before = control[:, k - 1, torch.randint(0, 4, (1,)).item()]
            control[:, k, 0] = torch.where(joined[:, k], before, control[:, k, 0])
        chord = control[:, k, :1] + even * (control[:, k, 3:] - control[:, k, :1])
        control[:, k] = control[:, k] + straight[:, k] * (chord - control[:, k])
    basis = torch.stack([math.comb(3, k) * t**k * (1 - t) ** (3 - k) for k in range(4)], 1)
    line = torch.einsum("pk,nskd->nspd", basis, control).flatten(1, 2)
    used = torch.randint(1, lines + 1, (n, 1), device=DEVICE)
    hidden = torch.arange(lines, device=DEVICE).repeat_interleave(points) >= used
    line = torch.where(hidden[..., None], line[:, :1], line)
    low, high = line.amin(1, keepdim=True), line.amax(1, keepdim=True)
    extent = uniform(n, 1, 1, low=0.4, high=0.65) * CANVAS
    line = (line - (low + high) / 2) * extent / (high - low).amax(2, keepdim=True).clamp_min(0.2)
    line = line + (CANVAS - 1) / 2
    down, right = grid(0, CANVAS - 1)
    near = torch.cdist(torch.stack([down, right], -1).reshape(1, -1, 2).expand(n, -1, -1), line)
    pen = uniform(n, 1, low=0.4, high=2.2)
    x = (pen + 0.5 - near.amin(2)).clamp(0, 1).reshape(n, 1, CANVAS, CANVAS)
    x = torch.where(uniform(n, 1, 1, 1) < 0.1, 1 - x, x)
    return x.expand(-1, 3, -1, -1)


@torch.no_grad()
def draw(kind: str, count: int, batch: int = 2000) -> torch.Tensor:
    """Return a pool of pictures, [count, 3, CANVAS, CANVAS], uint8."""
    pool = torch.empty(count, 3, CANVAS, CANVAS, device=DEVICE, dtype=torch.uint8)
    for number, start in enumerate(range(0, count, batch)):
        n = min(batch, count - start)
        if kind == "strokes":
            x = strokes(n)
        elif kind == "grey":
            shapes = (4, 8, 16)[number // 3 % 3]
            x = silhouettes(n) if number % 3 else leaves(n, shapes).mean(1, keepdim=True)
        else:
            turn = number % 8
            x = spectral(n) if turn == 0 else coordinates(n) if turn == 1 else leaves(
                n, (4, 8, 12, 20, 30, 45)[turn - 2])  # fmt: skip
        pool[start : start + n] = (x * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)
    return pool


# How far a view may differ: least share of the area, turn and shear (radians), shift (of the side),
# warp (of the side), mirrored, colours and contrast.
VIEWS = {
    "colour": (0.12, 0.0, 0.0, 0.0, 0.0, True, 1.0),
    "strokes": (None, 0.25, 0.3, 0.08, 0.06, False, 0.3),
    "grey": (0.4, 0.1, 0.1, 0.04, 0.02, True, 0.8),
}


def view(kind: str, pictures: torch.Tensor, still: bool = False) -> torch.Tensor:
    """Return a random view of each picture, [n, 3, SIDE, SIDE]; `still`: its middle, as it is."""
    n, x = len(pictures), pictures.float() / 255
    if still:
        edge = (CANVAS - SIDE) // 2
        return x[:, :, edge : edge + SIDE, edge : edge + SIDE]
    least, turn, shear, shift, warp, mirror, colour = VIEWS[kind]
    ratio = uniform(n, low=-0.29, high=0.29).exp()
    if least is None:  # a drawing stays whole: about its own size
        ratio = ratio.sqrt()
        size = SIDE / CANVAS * uniform(n, low=-0.28, high=0.28).exp()
        sx, sy = size * ratio, size / ratio
        tx, ty = (uniform(n, low=-shift, high=shift) * 2 for _ in range(2))
    else:
        size = uniform(n, low=least, high=1.0).sqrt()
        sx, sy = (size * ratio).clamp(max=1), (size / ratio).clamp(max=1)
        tx, ty = (uniform(n, low=-1, high=1) * (1 - s) for s in (sx, sy))
    a, k = uniform(n, low=-turn, high=turn), uniform(n, low=-shear, high=shear)
    side = torch.where(uniform(n) < 0.5, -1.0, 1.0) if mirror else 1.0
    theta = torch.stack(
        [torch.stack([sx * side * a.cos(), sy * (k - a.sin()), tx], 1),
         torch.stack([sx * side * a.sin(), sy * a.cos(), ty], 1)], 1)  # fmt: skip
    at = functional.affine_grid(theta, [n, 3, SIDE, SIDE], align_corners=False)
    if warp:
        bend = torch.randn(n, 2, 5, 5, device=DEVICE) * warp
        at = at + functional.interpolate(bend, SIDE, mode="bicubic").permute(0, 2, 3, 1)
    x = functional.grid_sample(x, at, padding_mode="reflection", align_corners=False)
    if kind == "strokes":  # a thicker or thinner pen
        wide, thin = functional.max_pool2d(x, 3, 1, 1), -functional.max_pool2d(-x, 3, 1, 1)
        pen = uniform(n, 1, 1, 1, low=-0.7, high=0.7)
        x = x + pen.clamp_min(0) * (wide - x) + (-pen).clamp_min(0) * 0.6 * (thin - x)
    on = (uniform(n, 1, 1, 1) < 0.8).float()
    y = x * (1 + colour * uniform(n, 1, 1, 1, low=-0.4, high=0.4))
    middle = y.mean((1, 2, 3), keepdim=True)
    y = (y - middle) * (1 + colour * uniform(n, 1, 1, 1, low=-0.4, high=0.4)) + middle
    if kind == "colour":
        plain = y.mean(1, keepdim=True)
        y = plain + (y - plain) * uniform(n, 1, 1, 1, low=0.4, high=1.6)
        hue = torch.eye(3, device=DEVICE) + 0.08 * torch.randn(n, 3, 3, device=DEVICE)
        y = torch.einsum("bij,bjhw->bihw", hue, y)
    x = x + on * (y - x)
    if kind == "colour":
        x = x + (uniform(n, 1, 1, 1) < 0.2).float() * (x.mean(1, keepdim=True) - x)
    soft = functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 1)
    return (x + (uniform(n, 1, 1, 1) < 0.3).float() * (soft - x)).clamp(0, 1)


def standardised(x: torch.Tensor) -> torch.Tensor:
    """Return each picture minus its mean over its deviation: blind to how data were scaled."""
    x = x - x.mean((1, 2, 3), keepdim=True)
    return x / x.square().mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-3)


class Unit(nn.Module):
    """A convolution and a BatchNorm, which `folded` makes one."""

    def __init__(self, before: int, after: int, size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))

    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight and bias of the one convolution that does the same in evaluation."""
        norm = self.norm
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        return self.conv.weight * factor[
            :, None, None, None
        ], norm.bias - norm.running_mean * factor


class Block(nn.Module):
    """Two units and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Unit(before, after, 3, stride), Unit(after, after, 3, 1)
        self.around = Unit(before, after, 1, stride) if before != after or stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(functional.relu(self.first(x)))
        return functional.relu(y + (x if self.around is None else self.around(x)))


class Network(nn.Module):
    """The extractor in training: a stem, the blocks, and the mean over the last map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Unit(3, BLOCKS[0][0], 3, 1)
        self.blocks = nn.Sequential(*(Block(*block) for block in BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(functional.relu(self.stem(x))).mean((2, 3))


@torch.no_grad()
def folded(network: Network) -> dict[str, np.ndarray]:
    """Return the weights of the network without BatchNorm, float16, by name."""
    out = {}
    for name, module in network.named_modules():
        if isinstance(module, Unit):
            for part, value in zip(("weight", "bias"), module.folded(), strict=True):
                out[f"{name}.{part}"] = value.half().cpu().contiguous().numpy()
    return out


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> str:
    """Write safetensors (eight bytes of length, a JSON header, the bytes); return the digest."""
    kinds, at = {"float16": "F16", "float32": "F32"}, 0
    header: dict[str, object] = {}
    for name, value in tensors.items():
        header[name] = {"dtype": kinds[str(value.dtype)], "shape": list(value.shape),
                        "data_offsets": [at, at + value.nbytes]}  # fmt: skip
        at += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = b"".join([struct.pack("<Q", len(text)), text, *(v.tobytes() for v in tensors.values())])
    beside = path.with_suffix(".part")
    beside.write_bytes(raw)
    os.replace(beside, path)
    return hashlib.sha256(raw).hexdigest()


def contrast(z: torch.Tensor) -> torch.Tensor:
    """Return the loss of two views a picture, the second half beside the first."""
    n = len(z) // 2
    z = functional.normalize(z.float(), dim=1)
    alike = z @ z.T / TEMPERATURE
    alike.fill_diagonal_(-1e4)
    partner = torch.arange(2 * n, device=z.device).roll(n)
    return functional.cross_entropy(alike, partner)


@torch.no_grad()
def statistics(network: Network, kind: str, count: int) -> dict[str, np.ndarray]:
    """Return mean, covariance over pictures and covariance over views of a picture."""
    network.eval()
    sums: dict[str, torch.Tensor | float] = {"mean": 0.0, "total": 0.0, "jitter": 0.0}
    pictures = draw(kind, count)
    for batch in pictures.split(1000):
        plain, one, two = (
            network(standardised(x).to(memory_format=torch.channels_last)).double()
            for x in (view(kind, batch, still=True), view(kind, batch), view(kind, batch))
        )
        sums["mean"] += plain.sum(0) / count
        sums["total"] += plain.T @ plain / count
        sums["jitter"] += (one - two).T @ (one - two) / (2 * count)
    sums["total"] -= torch.outer(sums["mean"], sums["mean"])
    return {f"{kind}.{name}": value.float().cpu().numpy() for name, value in sums.items()}


@torch.no_grad()
def describe_grey(out: Path, count: int) -> str:
    """Write mean and whitening of strokes and grey things by the shipped network."""
    from fedquilt.models.features.drawn import FEATURES, DrawnFeatures
    from fedquilt.models.features.frozen import mean_and_whitening

    front = DrawnFeatures((1, SIDE, SIDE), FEATURES)
    front.mean.zero_()
    front.directions.copy_(torch.eye(FEATURES))  # the network's features as they are
    pictures = [view(kind, draw(kind, count), still=True)[:, :1] for kind in KINDS[1:]]
    rows = torch.cat([front.describe(part) for part in torch.cat(pictures).split(500)])
    mean, whitening = mean_and_whitening(rows, shrink=1.0)
    tensors = {"grey.mean": mean, "grey.directions": whitening}
    halves = {name: value.half().contiguous().numpy() for name, value in tensors.items()}
    return save(out / "drawn_grey.safetensors", halves)


PATCH, FLAT, ABOVE, SHRINK = 6, 0.04, 1.0, 0.3


@torch.no_grad()
def whitened_patches(count: int, pictures: int = 4000, each: int = 25) -> list[torch.Tensor]:
    """Return kernels and thresholds that answer with unit vectors times a whitened patch."""
    found = []
    for part in standardised(view("colour", draw("colour", pictures), still=True)).split(200):
        rows = functional.unfold(part, PATCH).transpose(1, 2)
        chosen = torch.randint(0, rows.shape[1], (len(part), each))
        rows = rows[torch.arange(len(part))[:, None], chosen].flatten(0, 1)
        rows = rows - rows.mean(1, keepdim=True)
        found.append(rows / (rows.square().mean(1, keepdim=True) + FLAT).sqrt())
    patches = torch.cat(found).double()
    patches = patches[patches.square().sum(1) > 20]  # the others are nearly flat
    mean = patches.mean(0)
    values, vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
    whitening = (vectors * (values + 0.1).rsqrt()) @ vectors.T
    some = (patches - mean)[torch.randperm(len(patches))[:count]] @ whitening
    kernels = functional.normalize(some, dim=1) @ whitening
    thresholds = kernels @ mean + ABOVE
    kernels = kernels - kernels.mean(1, keepdim=True)  # a patch is seen without its mean
    return [kernels.reshape(count, 3, PATCH, PATCH), thresholds[:, None, None]]


@torch.no_grad()
def describe_patches(out: Path, count: int, dictionary: int = 640, kept: int = 256) -> str:
    """Write patches, and the directions in which pictures differ more than their views."""
    from scipy.linalg import eigh

    from fedquilt.models.features.drawn import patch_responses

    kernels, thresholds = (x.half().float() for x in whitened_patches(dictionary))
    pictures = draw("colour", count)[torch.randperm(count)]
    mean, total, jitter = 0.0, 0.0, 0.0
    for batch in pictures.split(1000):
        one, two = (
            torch.cat([patch_responses(x, kernels, thresholds) for x in seen.split(32)]).double()
            for seen in (standardised(view("colour", batch)) for _ in range(2))
        )
        mean = mean + (one + two).sum(0) / (2 * count)
        total = total + (one.T @ one + two.T @ two) / (2 * count)
        jitter = jitter + (one - two).T @ (one - two) / (2 * count)
    total = total - torch.outer(mean, mean)
    size = len(mean)
    jitter = jitter + SHRINK * total.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    _, vectors = eigh(total.numpy(), jitter.numpy(), subset_by_index=[size - kept, size - 1])
    directions = torch.from_numpy(vectors[:, ::-1].copy())
    tensors = {"kernels": kernels, "thresholds": thresholds, "mean": mean, "directions": directions}
    halves = {name: value.half().contiguous().numpy() for name, value in tensors.items()}
    return save(out / "drawn_patches.safetensors", halves)


def main() -> None:
    """Train until the time is over, then describe what came of it."""
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=170.0, help="all of it, pictures included")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", default="all", choices=("all", *KINDS))
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1280, help="pictures a step, two views each")
    parser.add_argument("--pool", type=int, default=800_000)
    parser.add_argument("--described", type=int, default=20_000, help="pictures of statistics")
    parser.add_argument("--grey", action="store_true", help="only describe grey pictures")
    parser.add_argument("--patches", action="store_true", help="only patches of colour pictures")
    given = parser.parse_args()
    began, out = time.monotonic(), Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    DEVICE = torch.device(given.device)
    torch.manual_seed(given.seed)
    if given.grey:
        print(describe_grey(out, given.described))
        return
    if given.patches:
        digest = describe_patches(out, given.described)
        print(f"{digest} in {time.monotonic() - began:.0f} s")
        return
    fast = DEVICE.type == "cuda"
    torch.backends.cudnn.benchmark = fast
    if fast:
        torch.set_float32_matmul_precision("high")

    def elapsed() -> float:
        return time.monotonic() - began

    shares = SHARE if given.kind == "all" else {given.kind: 1.0}
    pools = {kind: draw(kind, int(given.pool * share)) for kind, share in shares.items()}
    if fast:
        torch.cuda.synchronize()
    print(f"{sum(map(len, pools.values()))} pictures drawn in {elapsed():.0f} s", flush=True)
    network = Network().to(DEVICE).to(memory_format=torch.channels_last)
    head = nn.Sequential(
        nn.Linear(BLOCKS[-1][1], 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128)
    ).to(DEVICE)
    weights = [*network.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, fused=fast)
    sizes = [2 * max(2, int(given.batch * share)) for share in shares.values()]
    first, reserve = elapsed(), 0.06 * given.seconds
    line = kept = first
    step, total = 0, torch.zeros((), device=DEVICE)
    while (now := elapsed()) < given.seconds - reserve:
        done = (now - first) / max(1e-9, given.seconds - reserve - first)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))
        views = []
        for (kind, pool), size in zip(pools.items(), sizes, strict=True):
            chosen = pool[torch.randint(0, len(pool), (size // 2,), device=DEVICE)]
            views += [view(kind, chosen), view(kind, chosen)]
        x = standardised(torch.cat(views)).to(memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=fast):
            z = head(network(x))
        parts = zip(z.split(sizes), sizes, strict=True)
        loss = sum(contrast(part) * size for part, size in parts) / sum(sizes)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step, total = step + 1, total + loss.detach()
        if elapsed() - line > LINE or step == 1:
            line = elapsed()
            print(f"{line:.0f} s: step {step}, mean loss {total.item() / step:.3f}, "
                  f"last {loss.item():.3f}", flush=True)  # fmt: skip
        if elapsed() - kept > SAVE:
            kept = elapsed()
            save(out / "extractor.safetensors", folded(network))
    digests = {"extractor": save(out / "extractor.safetensors", folded(network))}
    found: dict[str, np.ndarray] = {}
    for kind in KINDS:
        found |= statistics(network, kind, given.described)
    digests["statistics"] = save(out / "statistics.safetensors", found)
    name = torch.cuda.get_device_name(DEVICE) if fast else "CPU"
    facts = {"sha256": digests, "kind": given.kind, "seed": given.seed, "steps": step,
             "batch": given.batch, "pool": given.pool, "seconds": round(elapsed(), 1),
             "loss": round(loss.item(), 4), "device": name,
             "torch": torch.__version__}  # fmt: skip
    (out / "extractor.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
