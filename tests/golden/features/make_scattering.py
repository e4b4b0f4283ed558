"""How scattering.npz was made: scattering coefficients by kymatio.

    pip install kymatio==0.3.0 "scipy<1.15" "numpy<2" && python make_scattering.py

kymatio 0.3.0 writes 3.1415 for pi where it normalises its filters, so each of its
convolutions is too large by pi / 3.1415; the tests take that out.
"""

from pathlib import Path

import numpy as np
from kymatio.numpy import Scattering2D

# name: (image size, J, L, max_order)
CASES = {
    "one_scale": ((8, 8), 1, 4, 2),
    "usual": ((16, 16), 2, 8, 2),
    "odd_angles": ((20, 26), 2, 5, 2),
    "three_scales": ((28, 28), 3, 3, 2),
    "first_order": ((15, 17), 2, 6, 1),
}


def main() -> None:
    """Write inputs and expected outputs beside this file."""
    rng = np.random.default_rng(20240502)
    arrays = {}
    for case, (size, J, L, max_order) in CASES.items():
        noise = rng.random((2, *size))
        images = ((np.roll(noise, 1, 1) + noise + np.roll(noise, 1, 2)) / 3).astype(np.float32)
        arrays[f"images_{case}"] = images
        arrays[case] = Scattering2D(J=J, L=L, shape=size, max_order=max_order)(images)
    np.savez_compressed(Path(__file__).with_name("scattering.npz"), **arrays)


if __name__ == "__main__":
    main()
