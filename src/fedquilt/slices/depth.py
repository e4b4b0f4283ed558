"""Slices by depth: the first blocks of a model that can stop after any of them.

DepthFL (Kim et al. 2023) gives every block a classifier of its own; a client trains the
first d blocks with their classifiers.  A model takes part in it when it has two lists
of modules of one length, `blocks` and `heads`, and a method `exits(x)` that returns the
outputs of all heads it has; `fedquilt.models.ExitNet` is one.

ScaleFL (Ilhan et al. 2023) cuts such a model in both directions: the first blocks, and of each the
first units.  A client of width w keeps the share r = w^(2/3) of either, so that r^3 = w^2 of the
weights are left, about as many as in HeteroFL's slice of width w.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.trees import Tree
from fedquilt.slices.model_slice import ModelSlice, attach, tensors_of
from fedquilt.slices.selection import Prefix
from fedquilt.slices.slicer import Slicer
from fedquilt.slices.tensor_map import TensorMap


class DepthSlicer:
    """How a model with early exits is cut; it answers like a `Slicer`."""

    def __init__(self, model: nn.Module) -> None:
        parts = [getattr(model, name, None) for name in ("blocks", "heads")]
        sizes = {len(part) for part in parts if isinstance(part, nn.ModuleList)}
        listed = all(isinstance(part, nn.ModuleList) for part in parts)
        if not listed or len(sizes) != 1 or not callable(getattr(model, "exits", None)):
            raise InvalidValueError(
                f"method='depthfl' or 'scalefl' must be used with a model that has `blocks`, "
                f"`heads` and `exits`, such as model='exits'; {type(model).__name__} has not"
            )
        self.model = model
        self.depth = sizes.pop()
        self._parts = [(f"blocks.{i}", f"heads.{i}") for i in range(self.depth)]

    def blocks(self, width: Fraction) -> Blocks:
        """Return the first floor(width x depth) blocks; no model has less than one."""
        return Blocks(tuple(range(max(1, math.floor(width * self.depth)))), self.depth)

    def slice(self, held: Blocks) -> ModelSlice:
        """Return what a client with these blocks holds."""
        return depth_slice(self.model, self._parts, held)

    def build(self, held: Blocks, *, scaled: bool = False) -> nn.Module:
        """Return the model that ends after the last held block."""
        small: Any = copy.deepcopy(self.model)
        small.blocks = small.blocks[: len(held.held)]
        small.heads = small.heads[: len(held.held)]
        attach(small, self.slice(held))
        return small  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scaled:
    """The first blocks, and the first units of their axes."""

    blocks: Blocks
    width: Prefix


class ScaleSlicer:
    """How a model with early exits is cut in both directions; it answers like a `Slicer`."""

    def __init__(self, model: nn.Module, sample: Tree, whole: Sequence[str] = ()) -> None:
        self._depth, self._sample, self._whole = DepthSlicer(model), sample, whole
        self._plans: dict[Blocks, Slicer] = {}

    def blocks(self, width: Fraction) -> Scaled:
        """Return the share w^(2/3) of the blocks, at least one, and of the units of each."""
        share = Fraction(float(width) ** (2 / 3)).limit_denominator(64)
        return Scaled(self._depth.blocks(share), Prefix(min(share, Fraction(1))))

    def slice(self, held: Scaled) -> ModelSlice:
        """Return what a client holds."""
        return self._plan(held).slice(held.width)

    def build(self, held: Scaled, *, scaled: bool = False) -> nn.Module:
        """Return the narrow model that ends after the last held block."""
        return self._plan(held).build(held.width, scaled=scaled)

    def _plan(self, held: Scaled) -> Slicer:
        if held.blocks not in self._plans:
            model = self._depth.build(held.blocks)
            self._plans[held.blocks] = Slicer(model, self._sample, self._whole)
        return self._plans[held.blocks]


def ramp(round_index: int, rampup: int) -> float:
    """Return the weight of the distillation in round t: exp(-5 (1 - t/T)^2), 1 from round T on.

    Early exits have little to teach at first (Kim et al. 2023; the sigmoid ramp-up of Laine and
    Aila 2017, T = 300 in the authors' code).  T = 0 starts at 1.
    """
    if round_index >= rampup:
        return 1.0
    return math.exp(-5.0 * (1.0 - round_index / rampup) ** 2)


def exits_loss(
    module: nn.Module, inputs: Tree, targets: Tensor, distillation: float = 1.0
) -> Tensor:
    """Return DepthFL's loss over the exits z_1 .. z_d of a client's model.

        sum_i CE(z_i, y) + r/(d - 1) sum_i sum_(j != i) KL(p_j || p_i)

    The exits teach one another; no gradient goes through a teacher (Kim et al. 2023, eq. 2).
    r is `distillation`, see `ramp`.
    """
    exits: Any = module.exits
    outputs: Sequence[Tensor] = trees.call_with(exits, inputs)
    logs = [functional.log_softmax(z, dim=-1) for z in outputs]
    loss = sum((functional.nll_loss(log, targets) for log in logs), start=logs[0].new_zeros(()))
    for mine in logs if len(logs) > 1 else ():
        for other in (log for log in logs if log is not mine):
            apart = functional.kl_div(mine, other.detach(), reduction="batchmean", log_target=True)
            loss = loss + distillation * apart / (len(logs) - 1)
    return loss


@dataclass(frozen=True)
class Blocks:
    """Which of a model's blocks, numbered from 0, a client holds."""

    held: tuple[int, ...]
    total: int

    def __post_init__(self) -> None:
        if not self.held or any(not 0 <= block < self.total for block in self.held):
            raise InvalidValueError(f"held={self.held} must be blocks of 0..{self.total - 1}")


def depth_slice(model: nn.Module, blocks: Sequence[Sequence[str]], held: Blocks) -> ModelSlice:
    """Return the slice of a client that holds only some blocks.

    Parameters
    ----------
    model : nn.Module
        The whole model.
    blocks : sequence of sequences of str
        For each depth, the names of the modules that belong to it: the block
        and, as in DepthFL, its own classifier.  What is named in none is held
        by everyone.
    held : Blocks
        The depths that the client holds.
    """
    if len(blocks) != held.total:
        raise InvalidValueError(f"blocks={len(blocks)} of them must be the {held.total} of held")
    modules = {name for name, _ in model.named_modules()}
    for name in (name for names in blocks for name in names):
        if name not in modules:
            raise InvalidValueError(f"blocks: {name!r} must be a module of the model")
    absent = tuple(
        f"{name}."
        for number, names in enumerate(blocks)
        for name in names
        if number not in held.held
    )
    return ModelSlice(
        tuple(
            (name, TensorMap.full(tensor.shape))
            for name, tensor in tensors_of(model).items()
            if not absent or not name.startswith(absent)
        )
    )
