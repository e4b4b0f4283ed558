"""How far apart the colours of series are: python tools/color_distances.py

Distances in OKLab (Ottosson 2020, lightness 0 to 100) for full colour vision and for the three
kinds of dichromacy (Machado, Oliveira, Fernandes 2009, severity 1), and the contrast of every
colour with its background.  About 2 is just noticeable side by side.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.colors import DARK, LIGHT

Array = NDArray[np.float64]

BACKGROUNDS = {"light": "#ffffff", "dark": "#14171b"}
PALETTES = {"light": LIGHT, "dark": DARK}
VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(color: str) -> Array:
    """Return a colour, #rrggbb, as linear red, green and blue."""
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def seen(color: str, vision: str) -> Array:
    """Return where a colour lies in OKLab for somebody with this vision."""
    cones = _TO_CONES @ np.clip(VISION[vision] @ linear(color), 0, 1)
    return 100 * _TO_LAB @ np.cbrt(np.clip(cones, 0, None))


def distance(first: str, second: str, vision: str) -> float:
    """Return how far apart two colours are."""
    return float(np.linalg.norm(seen(first, vision) - seen(second, vision)))


def contrast(first: str, second: str) -> float:
    """Return the ratio of WCAG, 1 to 21."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (first, second))
    return light[1] / light[0]


def main() -> None:
    """Print the closest pair for each vision, and the contrasts."""
    for name, palette in PALETTES.items():
        print(f"{name} background")
        for vision in VISION:
            pairs = [
                (distance(palette[a], palette[b], vision), a, b)
                for a, b in combinations(palette, 2)
            ]
            nearest = ", ".join(f"{a}/{b} {d:.1f}" for d, a, b in sorted(pairs)[:3])
            print(f"  {vision:<13} nearest: {nearest}")
        shown = (f"{c} {contrast(v, BACKGROUNDS[name]):.1f}" for c, v in palette.items())
        print(f"  contrast      {', '.join(shown)}")


if __name__ == "__main__":
    main()
