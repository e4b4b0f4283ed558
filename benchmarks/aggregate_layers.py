"""Time one package's `aggregate_layer` on the layers of ResNet-18 (called by aggregate.py).

    python benchmarks/aggregate_layers.py fedquilt|heflwr CLIENTS REPEATS

Prints seconds for each layer as JSON, null for a layer on which the package fails.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

WIDTHS = ("1", "1/2", "1/4", "1/8")

Make = Callable[[Any, str], torch.nn.Module]


def convolution(channels: int, kernel: int, bias: bool) -> Make:
    """Return how to build a convolution of a width."""

    def make(layers: Any, width: str) -> torch.nn.Module:
        ranges = {"in_channels_ranges": ("0", width), "out_channels_ranges": ("0", width)}
        layer: torch.nn.Module = layers.SSConv2d(channels, channels, kernel, bias=bias, **ranges)
        return layer

    return make


def linear(layers: Any, width: str) -> torch.nn.Module:
    """Build the classifier of a width."""
    layer: torch.nn.Module = layers.SSLinear(512, 10, in_features_ranges=("0", width))
    return layer


def batch_norm(layers: Any, width: str) -> torch.nn.Module:
    """Build a normalisation of a width."""
    layer: torch.nn.Module = layers.SSBatchNorm2d(512, features_ranges=("0", width))
    return layer


LAYERS: dict[str, Make] = {
    "conv 64, 3 x 3": convolution(64, 3, True),
    "conv 128, 3 x 3": convolution(128, 3, True),
    "conv 256, 3 x 3": convolution(256, 3, True),
    "conv 512, 3 x 3": convolution(512, 3, True),
    "conv 512, 1 x 1": convolution(512, 1, True),
    "conv 512, 3 x 3, no bias": convolution(512, 3, False),
    "linear 512 to 10": linear,
    "batch norm 512": batch_norm,
}


def seconds(package: str, make: Make, clients: int, repeats: int) -> float | None:
    """Return the fastest of some aggregations, or None when the package cannot."""
    layers = importlib.import_module(f"{package}.nn")
    aggregate = importlib.import_module(f"{package}.fed").aggregate_layer
    target = make(layers, "1")
    subset = [make(layers, WIDTHS[client % len(WIDTHS)]) for client in range(clients)]
    weights = [1 + client % 7 for client in range(clients)]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        try:
            aggregate(target, subset, weights)
        except (TypeError, RuntimeError):
            return None
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the seconds."""
    package, clients, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    found = {name: seconds(package, make, clients, repeats) for name, make in LAYERS.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
