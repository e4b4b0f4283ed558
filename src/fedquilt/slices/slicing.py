"""The slice of every client in every round, and what it costs.

Who holds what is a function of the configuration, the round, the client and, for `fiarse`, the
released model: never of data, so it is public, and a resumed run cuts as an uninterrupted one.

| method | slice of a client of width w in round t |
|---|---|
| heterofl | the first w of every axis, with scaler and masked loss |
| fedrolex | the window of w that starts at unit t and wraps around |
| dropout | a random w of every axis, drawn for each client and round |
| fjord | the first w; narrower widths are trained inside it by ordered dropout |
| mfl | one of the fixed structures that keep one of p = ceil(1/w) pieces of every axis |
| fiarse | the w of every axis that the largest weights of the released model make |
| depthfl | the first w of the blocks, at full width |
| scalefl | the first w^(2/3) of the blocks, and of every axis in them |
| smallest | everybody trains, and the run is about, the model of the smallest width |
| largest | everybody holds the whole model |
| largest_only | whoever holds the whole model trains, the others sit out |
| hetlora, flexlora, fedsb | the first w of the ranks of adapters, see below |

Where ranks are unequal, adapters are cut along their rank alone (`RankSlicer`).  A client of width
w trains the first floor(w r) ranks of every adapter and all else that is trainable; the rest of the
model is frozen, and all ranks share its memory.

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
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.common.trees import Tree
from fedquilt.config import RunConfig
from fedquilt.config.choices import OWN_LOSS_METHODS, RANK_METHODS
from fedquilt.models.adapters import partner, rank_dims
from fedquilt.slices.model_slice import ModelSlice, Rows, SliceMap, attach, tensors_of
from fedquilt.slices.selection import (
    Axis,
    Bound,
    Prefix,
    Selection,
    as_selection,
    client_widths,
    federated_dropout,
    fedrolex,
    important,
    mfl,
)
from fedquilt.slices.slicer import Blocks, DepthSlicer, Scaled, ScaleSlicer, Slicer
from fedquilt.slices.static_norm import statistics_of
from fedquilt.slices.tensor_map import TensorMap
from fedquilt.training import FlatModel
from fedquilt.training.hardware import OperationCount

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


COSTS = ("parameters", "bytes_up", "bytes_down", "multiply_adds")
"""What is counted for a client."""


def multiply_adds(model: nn.Module, sample: Tree) -> int:
    """Return the multiply-adds of one forward pass of one example.

    Matrix products, convolutions and attention count; element-wise work does not.
    A training step takes about three times as many.
    """
    was_training = model.training
    model.eval()
    counter = OperationCount()
    with counter:
        trees.call_with(model, sample)
    model.train(was_training)
    return counter.total // (2 * trees.length(sample))


def cost_table(slicing: Slicing) -> dict[str, Any]:
    """Return what a client of each width sends, receives and computes, and the means.

    Bytes are those of the travelling values in a round in which the client takes part.
    Slices are those of round 0; other rounds differ only where pieces of an axis do.
    """
    tiers = []
    for width, client in slicing.first_of_each_width().items():
        cut = slicing.cut(client, 0)
        size, model = slicing.place_of(cut).size, slicing.sub_model(cut)
        cost = _cost(size, slicing.element_size, model, slicing.sample)
        tiers.append({"width": str(width), "clients": slicing.widths.count(width), **cost})
    return _with_means(slicing.method, tiers)


def cost_of_everybody(
    method: str, width: str, clients: int, vector: Tensor, model: nn.Module, sample: Tree
) -> dict[str, Any]:
    """Return the same table where all clients train one model, whose values are `vector`."""
    cost = _cost(vector.numel(), vector.element_size(), model, sample)
    return _with_means(method, [{"width": width, "clients": clients, **cost}])


def _cost(size: int, element_size: int, model: nn.Module, sample: Tree) -> dict[str, Any]:
    return {
        "parameters": size,
        "bytes_up": size * element_size,
        "bytes_down": size * element_size,
        "multiply_adds": multiply_adds(model, trees.take(sample, slice(1))),
    }


def _with_means(method: str, tiers: list[dict[str, Any]]) -> dict[str, Any]:
    count = sum(tier["clients"] for tier in tiers)
    means = {key: sum(t["clients"] * t[key] for t in tiers) / count for key in COSTS}
    return {"method": method, "tiers": tiers, "mean": means}


_REMEMBERED = 512
# MFL takes turns through its structures; more than these would not come round in a run.
_STRUCTURES = 64


@dataclass(frozen=True)
class SliceOptions:
    """What the methods can be told, by the names that the options have."""

    whole: tuple[str, ...] = ()
    fjord_alpha: float = 0.5
    fjord_temperature: float = 1.0
    depthfl_rampup: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> SliceOptions:
        """Return those of a configuration."""
        return cls(
            config.patterns("whole"),
            config.fjord_alpha,
            config.fjord_temperature,
            config.depthfl_rampup,
        )


Cut = Selection | Blocks | Scaled
"""What a client holds: a rule for every axis, or blocks, or both."""


class SlicerLike(Protocol):
    """How a model is cut, by width or by depth."""

    def slice(self, cut: Any, /) -> ModelSlice:
        """Return what a slice holds of every tensor."""

    def build(self, cut: Any, /, *, scaled: bool = False) -> nn.Module:
        """Return the small model of a slice."""


class Slicing:
    """Which part of a model each client holds in each round.

    Parameters
    ----------
    method : str
        A method of the table above, but for `smallest`.
    widths : sequence of Fraction
        The width of every client.
    seed : int
        Decides the random slices.
    model : nn.Module
        The whole model; its frozen values are cut from it.
    buffers : sequence of str
        The names of the buffers that travel with the parameters.
    sample : tensor
        A small batch of inputs.
    options : SliceOptions, optional
        What else the methods can be told.
    """

    def __init__(
        self,
        method: str,
        widths: Sequence[Fraction],
        seed: int,
        model: nn.Module,
        buffers: Sequence[str],
        sample: Tree,
        options: SliceOptions | None = None,
    ) -> None:
        self.options = options or SliceOptions()
        self.method = method
        self.widths = tuple(widths)
        self.seed = seed
        self.model = model
        self.sample = sample
        self._by_depth: DepthSlicer | ScaleSlicer | None = None
        if method == "depthfl":
            self._by_depth = DepthSlicer(model)
        elif method == "scalefl":
            self._by_depth = ScaleSlicer(model, sample, self.options.whole)
        self.released: Callable[[], Tensor] | None = None
        self._ranked: tuple[int, list[NDArray[np.float64]]] | None = None
        self.free_units: tuple[int, ...] = ()
        self._plan: SlicerLike
        if self._by_depth is not None:
            self._plan = self._by_depth
        elif method in RANK_METHODS:
            self._plan = RankSlicer(method, model)
        else:
            plan = Slicer(model, sample, self.options.whole)
            self.free_units = tuple(axis.units for axis in plan.axes if not axis.pinned)
            self._plan = plan
        self.element_size = max(p.element_size() for p in model.parameters())
        self._buffers = tuple(buffers)
        self._travelling = {n for n, p in model.named_parameters() if p.requires_grad}
        self._travelling |= set(buffers) | set(statistics_of(model))  # or unused in training
        self._places: OrderedDict[Cut, SliceMap] = OrderedDict()
        self._models: OrderedDict[Hashable, nn.Module] = OrderedDict()
        for client in self.first_of_each_width().values():
            self.place(client, 0)  # a width that keeps nothing is an error now, not in a round

    def cut(self, client: int, round_index: int) -> Cut:
        """Return what a client holds in a round."""
        width = self.widths[client]
        if self._by_depth is not None:
            return self._by_depth.blocks(width)
        if self.method == "largest" or width == 1:
            return Prefix(1)
        if self.method == "fedrolex":
            return fedrolex(width, round_index)
        if self.method == "dropout":
            return federated_dropout(width, generator(self.seed, "slice", round_index, client))
        if self.method == "fiarse":
            return important(width, self._importance(round_index))
        if self.method == "mfl":
            return self._structure(client, round_index, width)
        if self.method not in ("heterofl", "fjord", *RANK_METHODS):
            raise InvalidValueError(f"method={self.method!r} has no rule for what a client holds")
        return Prefix(width)

    def follow(self, released: Callable[[], Tensor]) -> None:
        """Read the released model there; before, it is the one that the run begins with."""
        self.released, self._ranked = released, None

    def _importance(self, round_index: int) -> list[NDArray[np.float64]]:
        """Return the scores of the units of the model with which a round began."""
        if self._ranked is None or self._ranked[0] != round_index:
            values: dict[str, Tensor] = dict(self.model.named_parameters())
            start = 0
            if self.released is not None:
                weights = self.released()
                for name in [name for name, value in values.items() if value.requires_grad]:
                    stop = start + values[name].numel()
                    values[name], start = weights[start:stop].view(values[name].shape), stop
            self._ranked = round_index, cast(Slicer, self._plan).importance(values)
        return self._ranked[1]

    def _structure(self, client: int, round_index: int, width: Fraction) -> Selection:
        pieces = math.ceil(1 / width)
        turns = max(1, int(math.log(_STRUCTURES) / math.log(pieces) + 1e-9))
        return mfl(client, round_index, min(len(self.free_units), turns), pieces)

    def place(self, client: int, round_index: int) -> SliceMap:
        """Return where a client's vector lies in the whole one."""
        return self.place_of(self.cut(client, round_index))

    def place_of(self, cut: Cut) -> SliceMap:
        """Return where the vector of a slice lies in the whole one."""
        if cut not in self._places:
            small, held = self.sub_model(cut), self._plan.slice(cut)
            self._places[cut] = SliceMap.between(self.model, small, self._buffers, held)
            if len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)
        self._places.move_to_end(cut)
        return self._places[cut]

    def sub_model(self, cut: Cut) -> nn.Module:
        """Return a model of the structure of a slice; its trainable values mean nothing."""
        key = self.structure(cut)
        if key not in self._models:
            self._models[key] = self._plan.build(cut, scaled=self.method == "heterofl")
            if len(self._models) > _REMEMBERED:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        return self._models[key]

    def structure(self, cut: Cut) -> Hashable:
        """Return a key that slices share when one small model serves for both.

        Slices of the same shapes differ only in the values that a client is sent,
        unless values that never travel, because they are frozen, are cut as well.
        """
        held = self._plan.slice(cut)
        if isinstance(self._plan, Slicer) and self._plan.cuts_unsaved:
            return held
        if any(not m.is_full and name not in self._travelling for name, m in held.items):
            return held
        return tuple((name, tensor_map.packed_shape) for name, tensor_map in held.items)

    def output_rows(self, cut: Cut) -> tuple[Rows, ...]:
        """Return where the rows of the output layer lie in the vector of a slice.

        None where the model's outputs are not those of one linear layer.
        """
        name = None if self._by_depth is not None else cast(Slicer, self._plan).output_layer
        if name is None:
            return ()
        found, start = [], 0
        for tensor, parameter in self.sub_model(cut).named_parameters():
            if parameter.requires_grad:
                if tensor in (f"{name}.weight", f"{name}.bias"):
                    found.append(Rows(start, parameter[0].numel()))
                start += parameter.numel()
        return tuple(found)

    def groups(
        self, clients: Sequence[int] | NDArray[np.int64], round_index: int
    ) -> dict[Cut, list[int]]:
        """Return the clients by what they hold, in the order of their first ones."""
        groups: dict[Cut, list[int]] = {}
        for client in map(int, clients):
            groups.setdefault(self.cut(client, round_index), []).append(client)
        return groups

    def coverage(self, clients: NDArray[np.int64], round_index: int) -> torch.Tensor:
        """Return, for each element of the whole vector, the share of clients that hold it."""
        groups = self.groups(clients, round_index)
        size = self.place_of(next(iter(groups))).whole_size
        count = torch.zeros(size, dtype=torch.float64, device=trees.device_of(self.sample))
        for cut, members in groups.items():
            self.place_of(cut).cover_(count, float(len(members)))
        return count / len(clients)

    def first_of_each_width(self) -> dict[Fraction, int]:
        """Return one client of each width, widest first."""
        first: dict[Fraction, int] = {}
        for client, width in enumerate(self.widths):
            first.setdefault(width, client)
        return {width: first[width] for width in sorted(first, reverse=True)}


def make_slicing(config: RunConfig, flat: FlatModel, sample: Tree, num_clients: int) -> Slicing:
    """Return the slices that a configuration asks for."""
    if config.engine == "processes":
        raise InvalidValueError(
            f"engine='processes' must be 'auto', 'sequential' or 'batched' with "
            f"method={config.method!r}: every width would start processes of its own"
        )
    if config.engine == "batched" and config.method in OWN_LOSS_METHODS:
        raise InvalidValueError(
            f"engine='batched' must be 'auto' or 'sequential' with method={config.method!r}, "
            "whose clients have a loss of their own"
        )
    widths = tier_widths(config, flat.module, sample, num_clients)
    return Slicing(
        config.method,
        widths,
        config.seed,
        flat.module,
        flat.buffer_names,
        sample,
        SliceOptions.of(config),
    )


def smallest_model(
    config: RunConfig, model: nn.Module, sample: Tree, num_clients: int
) -> tuple[nn.Module, Fraction]:
    """Return the model that even the weakest client can hold, and its width."""
    width = min(tier_widths(config, model, sample, num_clients))
    return Slicer(model, sample, config.patterns("whole")).build(width), width


def tier_widths(
    config: RunConfig, model: nn.Module, sample: Tree, num_clients: int
) -> tuple[Fraction, ...]:
    """Return the width of every client."""
    plan: list[SlicerLike] = []

    def needs(width: Fraction) -> tuple[float, float]:
        """Count weights, gradient and update, and one forward pass; no activations."""
        if not plan and config.method in RANK_METHODS:
            plan.append(RankSlicer(config.method, model))
        elif not plan:
            plan.append(Slicer(model, sample, config.patterns("whole")))
        small = plan[0].build(width)
        held = [(3 if p.requires_grad else 1, p) for p in small.parameters()]
        megabytes = sum(times * p.numel() * p.element_size() for times, p in held) / 2**20
        device = next(small.parameters()).device
        one = trees.mapped(sample, lambda tensor: tensor[:1].to(device))
        return megabytes, 2.0 * multiply_adds(small, one)

    return client_widths(config.tiers, num_clients, generator(config.seed, "tiers"), needs)
