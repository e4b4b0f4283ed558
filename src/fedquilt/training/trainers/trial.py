"""Whether a faster way to train computes what autograd does, to rounding.

How far rounding alone takes two ways apart depends on the network: a rectifier near zero, the
larger of two near values, a softmax of large scores.  So it is measured.  A gradient computed with
rounding is the exact one of weights and inputs nearby (backward error analysis); autograd's own
gradient is therefore computed again with both moved by some units of rounding, and another way is
believed where it is no further from autograd than a few times that.

On inputs of ordinary size and on large ones: what clamps or scales its inputs shows on the second.
A rectifier that happens to flip in one way and not in the other is a matter of the draw; what
computes something else does so in every draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedquilt.common import trees
from fedquilt.common.trees import Tree
from fedquilt.training.draws import ClientDraws, bits_of, own_draws
from fedquilt.training.flat import FlatModel
from fedquilt.training.state import ModuleState
from fedquilt.training.task import public_inputs

FLOAT32, TF32, BFLOAT16 = 2.0**-18, 2.0**-9, 2.0**-7
"""How far weights and inputs are moved: 64 units of rounding, which tiled sums (Winograd) need some
of; of products on a GPU, whose factors are rounded once, 4."""
_TIMES = 4
# Near one a relative distance says nothing.
_FURTHEST = 0.5
SCALES = (1.0, 100.0)
"""The sizes of inputs that are tried."""
_DRAWS = 3
_SPREAD = 0.05

Gradient = Callable[[torch.Tensor, Any], torch.Tensor]
"""The gradient, or the update, at some weights [size of the model] for a batch of inputs."""


def disagreement(
    way: Gradient,
    autograd: Gradient,
    start: torch.Tensor,
    like: Tree,
    count: int,
    unit: float,
    *,
    vocabulary: int | None = None,
    scales: Sequence[float] = SCALES,
) -> str | None:
    """Return how a way to compute gradients differs from autograd, None where it does not.

    On `count` made-up samples like those of `like`, of a known `vocabulary` where they are tokens;
    at weights near `start`: layers that begin at zero would hide the ones before them.
    """
    weights = start + _SPREAD * _noise(start, seed=1)
    floating = any(leaf.is_floating_point() for leaf in trees.leaves(like))
    for scale in scales if floating else scales[:1]:
        words = ""
        for seed in range(_DRAWS):
            samples = _samples(like, count, scale, seed, vocabulary)
            exact = autograd(weights, samples)
            near = autograd(_moved(weights, unit), trees.mapped(samples, lambda t: _moved(t, unit)))
            allowed = min(_TIMES * max(_distance(near, exact), unit), _FURTHEST)
            far = _distance(way(weights, samples), exact)
            if far <= allowed:  # false for NaN
                break
            words = words or (
                f"{far:.2g} away from autograd's on inputs of size {scale:g}, where rounding "
                f"explains {allowed:.2g}"
            )
        else:
            return words
    return None


def moved_by_a_pass(flat: FlatModel, inputs: Tree, draws: ClientDraws | None) -> list[str]:
    """Return what a pass in training changes beside weights: another way would leave it alone."""
    flat.restore()
    flat.module.train()
    state = ModuleState(flat.module, flat.parameters)
    with own_draws(draws):
        if draws is not None:
            draws.begin(bits_of(0, 0))
        trees.call_with(flat.module, inputs)
    moved = state.moved()
    flat.restore()
    return moved


def _samples(like: Tree, count: int, scale: float, seed: int, vocabulary: int | None) -> Any:
    samples = public_inputs(like, count, seed)
    if vocabulary is not None:
        return drawn_tokens(samples, vocabulary, seed)
    return trees.mapped(samples, lambda t: t * scale if t.is_floating_point() else t)


def drawn_tokens(like: torch.Tensor, vocabulary: int, seed: int) -> torch.Tensor:
    """Return tokens of the whole vocabulary, another at every place."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, like.shape, generator=drawn).to(like)


def _moved(tensor: torch.Tensor, unit: float) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + unit * _noise(tensor, seed=2))


def _noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=drawn).to(tensor)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance relative to the length of the second; 0 where both are zero."""
    apart, length = float((one - other).norm()), float(other.norm())
    return apart / length if length > 0 else apart
