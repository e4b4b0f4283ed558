"""The slice of every client in every round.

Who holds what is a function of the configuration, the round and the client alone:
never of data, so it is public, and a resumed run cuts as the uninterrupted one did.

| method | slice of a client of width w in round t |
|---|---|
| heterofl | the first w of every axis, with scaler and masked loss |
| fedrolex | the window of w that starts at unit t and wraps around |
| dropout | a random w of every axis, drawn for each client and round |
| fjord | the first w; narrower widths are trained inside it by ordered dropout |
| mfl | one of the fixed structures that keep one of p = ceil(1/w) pieces of every axis |
| depthfl | the first w of the blocks, at full width |
| smallest | everybody trains, and the run is about, the model of the smallest width |
| largest | everybody holds the whole model |
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.config import RunConfig
from fedquilt.errors import InvalidValueError
from fedquilt.learning import FlatModel
from fedquilt.randomness import generator
from fedquilt.slicing.costs import multiply_adds
from fedquilt.slicing.depth import DepthPlan
from fedquilt.slicing.tiers import client_widths
from fedquilt.subnet import Blocks, ModelSlice, Prefix, Selection, SliceMap, SlicePlan
from fedquilt.subnet.schedules import federated_dropout, fedrolex, mfl

_REMEMBERED = 512
# MFL takes turns through its structures; more than these would not come round in a run.
_STRUCTURES = 64

OWN_LOSS = ("fjord", "depthfl")
"""Methods whose local loss only the sequential engine can train."""

Cut = Selection | Blocks
"""What a client holds: a rule for every axis, or blocks."""


class Plan(Protocol):
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
    """

    def __init__(
        self,
        method: str,
        widths: Sequence[Fraction],
        seed: int,
        model: nn.Module,
        buffers: Sequence[str],
        sample: torch.Tensor,
    ) -> None:
        self.method = method
        self.widths = tuple(widths)
        self.seed = seed
        self.model = model
        self.sample = sample
        self._by_depth = DepthPlan(model) if method == "depthfl" else None
        self._free_axes = 0
        self._plan: Plan
        if self._by_depth is not None:
            self._plan = self._by_depth
        else:
            plan = SlicePlan(model, sample)
            self._free_axes = sum(not axis.pinned for axis in plan.axes)
            self._plan = plan
        self.element_size = max(p.element_size() for p in model.parameters())
        self._buffers = tuple(buffers)
        self._travelling = {n for n, p in model.named_parameters() if p.requires_grad}
        self._travelling |= set(buffers)
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
        if self.method == "mfl":
            return self._structure(client, round_index, width)
        return Prefix(width)

    def _structure(self, client: int, round_index: int, width: Fraction) -> Selection:
        pieces = math.ceil(1 / width)
        turns = max(1, int(math.log(_STRUCTURES) / math.log(pieces) + 1e-9))
        return mfl(client, round_index, min(self._free_axes, turns), pieces)

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
        if any(not m.is_full and name not in self._travelling for name, m in held.items):
            return held
        return tuple((name, tensor_map.packed_shape) for name, tensor_map in held.items)

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
        count = torch.zeros(size, dtype=torch.float64, device=self.sample.device)
        for cut, members in groups.items():
            self.place_of(cut).cover_(count, float(len(members)))
        return count / len(clients)

    def first_of_each_width(self) -> dict[Fraction, int]:
        """Return one client of each width, widest first."""
        first: dict[Fraction, int] = {}
        for client, width in enumerate(self.widths):
            first.setdefault(width, client)
        return {width: first[width] for width in sorted(first, reverse=True)}


def make_slicing(
    config: RunConfig, flat: FlatModel, sample: torch.Tensor, num_clients: int
) -> Slicing | None:
    """Return the slices that a configuration asks for, None where everybody holds everything."""
    if config.method in ("full", "smallest"):
        return None
    if config.engine == "processes":
        raise InvalidValueError(
            f"engine='processes' must be 'auto', 'sequential' or 'batched' with "
            f"method={config.method!r}: every width would start processes of its own"
        )
    if config.engine == "batched" and config.method in OWN_LOSS:
        raise InvalidValueError(
            f"engine='batched' must be 'auto' or 'sequential' with method={config.method!r}, "
            "whose clients have a loss of their own"
        )
    widths = tier_widths(config, flat.module, sample, num_clients)
    return Slicing(config.method, widths, config.seed, flat.module, flat.buffer_names, sample)


def smallest_model(
    config: RunConfig, model: nn.Module, sample: torch.Tensor, num_clients: int
) -> tuple[nn.Module, Fraction]:
    """Return the model that even the weakest client can hold, and its width."""
    width = min(tier_widths(config, model, sample, num_clients))
    return SlicePlan(model, sample).build(width), width


def tier_widths(
    config: RunConfig, model: nn.Module, sample: torch.Tensor, num_clients: int
) -> tuple[Fraction, ...]:
    """Return the width of every client."""
    plan: list[SlicePlan] = []

    def needs(width: Fraction) -> tuple[float, float]:
        """Count weights, gradient and update, and one forward pass; no activations."""
        if not plan:
            plan.append(SlicePlan(model, sample))
        small = plan[0].build(width)
        megabytes = sum(3 * p.numel() * p.element_size() for p in small.parameters()) / 2**20
        device = next(small.parameters()).device
        return megabytes, 2.0 * multiply_adds(small, sample[:1].to(device))

    return client_widths(config.tiers, num_clients, generator(config.seed, "tiers"), needs)
