"""Independent computations: index lists and weighted means, element by element, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

Index = list[int]
Pairs = list[tuple[Fraction, Fraction]]


def held_index(pairs: Sequence[tuple[object, object]], size: int) -> Index:
    """Return the positions that intervals hold on an axis, in packed order."""
    index: Index = []
    for start, end in pairs:
        first, last = (math.floor(size * Fraction(str(bound))) for bound in (start, end))
        index.extend(range(first, last))
    return index


def mean_over_holders(
    previous: np.ndarray, parts: Sequence[tuple[Sequence[Index], np.ndarray, float]]
) -> np.ndarray:
    """Return the weighted mean of each element over the parts that hold it, by brute force."""
    total = np.zeros(previous.shape)
    weights = np.zeros(previous.shape)
    for index, values, weight in parts:
        for packed in np.ndindex(*values.shape):
            place = tuple(axis[position] for axis, position in zip(index, packed, strict=True))
            total[place] += weight * float(values[packed])
            weights[place] += weight
    result = previous.astype(np.float64)
    np.divide(total, weights, out=result, where=weights > 0)
    return result


@st.composite
def unions(draw: st.DrawFn, parts: int = 12) -> Pairs:
    """Draw disjoint intervals in any order, some adjacent, with bounds in parts of the axis."""
    bounds = draw(st.lists(st.integers(0, parts), min_size=2, max_size=6, unique=True))
    bounds.sort()
    cells = list(pairwise(bounds))
    kept = draw(st.lists(st.sampled_from(cells), min_size=1, max_size=len(cells), unique=True))
    return [(Fraction(start, parts), Fraction(end, parts)) for start, end in kept]


def fill(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter and buffer of a model values of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.dtype.is_floating_point:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
            else:
                tensor.fill_(seed)


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's state."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
