"""How hog.npz was made: histograms of oriented gradients by scikit-image.

    pip install scikit-image==0.26.0 "numpy<2" && python make_hog.py

Images are smooth random fields, described in float64, so that no gradient lies exactly on the edge
between two bins, where the answer would depend on rounding.
"""

from pathlib import Path

import numpy as np
from skimage.feature import hog

# name: (image, orientations, cell, block, block_norm)
CASES = {
    "cells": ("grey", 8, 4, 1, "L2"),
    "blocks": ("grey", 9, 4, 2, "L2"),
    "hysteresis": ("grey", 9, 5, 3, "L2-Hys"),
    "absolute": ("grey", 6, 6, 2, "L1"),
    "colour": ("colour", 8, 8, 2, "L2-Hys"),
    "small": ("small", 4, 2, 1, "L2"),
}
SHAPES = {"grey": (2, 1, 28, 28), "colour": (1, 3, 32, 24), "small": (2, 1, 8, 8)}


def smooth_field(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return white noise averaged over neighbours."""
    noise = rng.random(shape)
    for axis in (2, 3):
        noise = (np.roll(noise, 1, axis) + 2 * noise + np.roll(noise, -1, axis)) / 4
    return noise.astype(np.float32)


def main() -> None:
    """Write inputs and expected outputs beside this file."""
    rng = np.random.default_rng(20240501)
    images = {name: smooth_field(rng, shape) for name, shape in SHAPES.items()}
    arrays = {f"images_{name}": values for name, values in images.items()}
    for case, (name, orientations, cell, block, norm) in CASES.items():
        expected = np.stack(
            [
                hog(
                    image.astype(np.float64),
                    orientations=orientations,
                    pixels_per_cell=(cell, cell),
                    cells_per_block=(block, block),
                    block_norm=norm,
                    channel_axis=0,
                )
                for image in images[name]
            ]
        )
        arrays[case] = expected.astype(np.float32)
    np.savez_compressed(Path(__file__).with_name("hog.npz"), **arrays)


if __name__ == "__main__":
    main()
