"""Clients of unequal ranks: slices of adapters, along their rank alone.

A client of width w trains the first floor(w r) ranks of every adapter and all else that is
trainable; the rest of the model is frozen, and all ranks share its memory.

| method | a client trains | the server |
|---|---|---|
| hetlora | the first rows of A, the first columns of B | zero-pads: divides by everybody |
| fedsb | the leading block of the core between A and B | averages each element over its holders |
| flexlora | as hetlora | averages changes of products B A, truncates (`slices/method.py`) |

HetLoRA is Cho et al. 2024 (arXiv:2401.06432), FlexLoRA Bai et al. 2024 (arXiv:2402.11505), Fed-SB
Singhal et al. 2025 (arXiv:2502.15436).  HetLoRA's weights by norm and its pruning of ranks are left
out: both follow a client's data, and here who holds what is public.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.models.adapters import partner, rank_dims
from fedquilt.slices.model_slice import ModelSlice, SliceMap, attach, tensors_of
from fedquilt.slices.ranges import Axis, Bound
from fedquilt.slices.selection import Selection, as_selection
from fedquilt.slices.tensor_map import TensorMap

NOTES = {
    "hetlora": "each client trains the first ranks of every adapter (A and B); ranks that it lacks "
    "count as zeros in the sum, whose divisor is the same for all",
    "fedsb": "each client trains the leading block of the core between frozen A and B, which come "
    "from the frozen weights",
    "flexlora": "what is clipped, summed and noised is each client's change of the products B A; "
    "their truncation to the adapters' rank only uses the noised sum",
}
"""What a statement says of each method."""


class RankSlicer:
    """How a model with adapters is cut along their rank.

    Parameters
    ----------
    method : str
        hetlora, flexlora or fedsb.
    model : nn.Module
        A `peft` model; for `fedsb` one of `fedquilt.models.with_cores`.
    """

    def __init__(self, method: str, model: nn.Module) -> None:
        names = [n for n, p in model.named_parameters() if p.requires_grad and rank_dims(n)]
        cores = [name for name in names if name.endswith(".core")]
        if method == "fedsb" and (not cores or len(cores) < len(names)):
            raise InvalidValueError(
                f"model={type(model).__name__} must train cores with method='fedsb': give "
                "fedquilt.models.with_cores(model) of a model with adapters of peft.LoraConfig"
            )
        if method != "fedsb" and (not names or cores):
            raise InvalidValueError(
                f"model={type(model).__name__} must have adapters of peft.LoraConfig with "
                f"method={method!r}" + (", without cores" if cores else "")
            )
        self.model = model

    def slice(self, width: Bound | Selection) -> ModelSlice:
        """Return what a client of a width, or of any selection of ranks, holds."""
        selection, items = as_selection(width), []
        for name, tensor in tensors_of(self.model).items():
            axes = [Axis.full(size) for size in tensor.shape]
            for dim in rank_dims(name):
                try:
                    axes[dim] = selection.choose(tensor.shape[dim], 0)
                except InvalidValueError as error:
                    raise InvalidValueError(f"adapter {name!r}: {error}") from error
            items.append((name, TensorMap(tuple(axes))))
        return ModelSlice(tuple(items))

    def build(self, width: Bound | Selection, *, scaled: bool = False) -> nn.Module:
        """Return the model with adapters of the smaller rank; its frozen tensors are this one's.

        The factor alpha / r stays that of the whole rank: what a client trains must mean the same
        in everybody's adapters.
        """
        held, tensors = self.slice(width), tensors_of(self.model)
        memo = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        for name, tensor_map in held.items:
            tensor = tensors[name]
            if not tensor_map.is_full:
                part = tensor_map.gather(tensor.detach()).clone()
                memo[id(tensor)] = nn.Parameter(part, tensor.requires_grad)
        small = copy.deepcopy(self.model, memo)
        for name, layer in small.named_modules():  # what layers say of themselves
            if isinstance(layer, nn.Linear) and rank_dims(f"{name}.weight"):
                layer.out_features, layer.in_features = layer.weight.shape
        attach(small, held)
        return small


@dataclass(frozen=True)
class ZeroPadded:
    """A place whose client counts everywhere: what it does not hold, it leaves as it is."""

    place: SliceMap

    @property
    def size(self) -> int:
        """The length of the client's vector."""
        return self.place.size

    def scatter_add_(self, total: Tensor, part: Tensor, alpha: float = 1.0) -> None:
        """Add alpha times the client's vector to the whole one."""
        self.place.scatter_add_(total, part, alpha)

    def cover_(self, coverage: Tensor, weight: float = 1.0) -> None:
        """Add a weight to every element."""
        coverage += weight

    def index(self) -> Tensor:
        """Return the positions on which the client counts: all of them."""
        return torch.arange(self.place.whole_size)


class Products:
    """The vector of a model's travelling tensors, with B A in the place of each A and B.

    Models that differ in rank alone have the same such vector, so changes at unequal ranks can be
    added up.

    Parameters
    ----------
    model : nn.Module
        With adapters of any rank.
    buffers : sequence of str
        The names of the buffers that travel.
    """

    def __init__(self, model: nn.Module, buffers: tuple[str, ...] = ()) -> None:
        tensors: dict[str, Tensor] = {}
        tensors |= {n: p for n, p in model.named_parameters() if p.requires_grad}
        tensors |= {n: b for n, b in model.named_buffers() if n in buffers}
        self._places: dict[str, tuple[int, torch.Size]] = {}
        start = 0
        for name, tensor in tensors.items():
            self._places[name] = (start, tensor.shape)
            start += tensor.numel()
        self.vector_size = start
        pairs = {name: partner(name) for name in tensors}
        self._pairs = {b: a for b, a in pairs.items() if a is not None}
        alone = {n for n in tensors if rank_dims(n)} ^ {*self._pairs, *self._pairs.values()}
        if alone or any("lora_magnitude" in name for name in tensors):
            raise InvalidValueError(
                "method='flexlora' must have plain adapters whose A and B are both trained: it "
                f"averages their products; see {min(alone, default='lora_magnitude_vector')!r}"
            )
        self._others = [n for n in tensors if not rank_dims(n)]

    def of(self, vector: Tensor) -> Tensor:
        """Return the products of a vector of the model, in float64."""
        parts = [self._tensor(vector, name).flatten().double() for name in self._others]
        for b, a in self._pairs.items():
            left, right = self._tensor(vector, b), self._tensor(vector, a)
            parts.append((left.flatten(1).double() @ right.flatten(1).double()).flatten())
        return torch.cat(parts)

    def factored_(self, vector: Tensor, products: Tensor) -> Tensor:
        """Write into a vector the model whose products are nearest to these at its rank.

        B = U S and A = V' of the singular value decomposition, largest first: the first k ranks are
        then the nearest of rank k.  A has unit rows, so that adapters whose B is zero still learn.
        """
        start = 0
        for name in self._others:
            own = self._tensor(vector, name)
            own.copy_(products[start : start + own.numel()].view(own.shape))
            start += own.numel()
        for b, a in self._pairs.items():
            left, right = self._tensor(vector, b), self._tensor(vector, a)
            rows, columns = left.flatten(1).shape[0], right.flatten(1).shape[1]
            product = products[start : start + rows * columns].view(rows, columns)
            start += rows * columns
            u, s, v = torch.linalg.svd(product, full_matrices=False)
            rank = min(right.shape[0], len(s))
            left.zero_(), right.zero_()
            left.flatten(1)[:, :rank].copy_(u[:, :rank] * s[:rank])
            right.flatten(1)[:rank].copy_(v[:rank])
        return vector

    def _tensor(self, vector: Tensor, name: str) -> Tensor:
        start, shape = self._places[name]
        return vector[start : start + shape.numel()].view(shape)
