"""Adapters of `peft`, as it makes them: where their rank lies, and a core between two frozen ones.

A layer of `peft.LoraConfig` computes W x + s B A x with A [rank, in] and B [out, rank].  What a
client of a smaller rank trains are the first rows of A and the first columns of B.

Fed-SB (Singhal et al. 2025, arXiv:2502.15436) freezes A and B and trains a core R [rank, rank]
between them, s B R A.  The change is linear in R, so the mean of clients' cores is the core of the
mean change, which the mean of A and the mean of B is not; and rank^2 numbers are trained instead of
rank (in + out).

`peft` is not imported: its layers are known by their names.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fedquilt.common.errors import InvalidValueError

_NAME = re.compile(
    r"(?:^|\.)(?:lora_(?P<side>[AB])\.[^.]+\.(?P<part>weight|base|core)"
    r"|lora_embedding_(?P<embedded>[AB])\.[^.]+)$"
)


def rank_dims(name: str) -> tuple[int, ...]:
    """Return the dimensions of a tensor that are as long as its adapter's rank; mostly none.

    >>> rank_dims("q_proj.lora_B.default.weight"), rank_dims("q_proj.lora_A.default.core")
    ((1,), (0, 1))
    """
    found = _NAME.search(name)
    if found is None:
        return ()
    if found["part"] == "core":
        return (0, 1)
    return (0,) if "A" in (found["side"], found["embedded"]) else (1,)


def partner(name: str) -> str | None:
    """Return the name of the A that belongs to a B; None for any other tensor."""
    if rank_dims(name) != (1,):
        return None
    return re.sub(r"(lora_|lora_embedding_)B(?=\.[^.]+(\.weight)?$)", r"\1A", name)


class Core(nn.Module):
    """R A in the place of an adapter's A: A is frozen and the core R is trained."""

    def __init__(self, base: torch.Tensor, core: torch.Tensor) -> None:
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.core = nn.Parameter(core)

    @property
    def weight(self) -> torch.Tensor:
        """R A, where `peft` looks for A."""
        return self.core @ self.base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return R (A x)."""
        return functional.linear(functional.linear(x, self.base), self.core)


def with_cores(model: nn.Module) -> nn.Module:
    """Return a copy of a `peft` model of which a core between each A and B is trained.

    A and B become frozen bases with orthonormal rows and columns: the first singular vectors of
    the layer's own weight W, strongest first, which is public as W is; R begins at zero.  An
    adapter that has been trained keeps its change: then they are the singular vectors of that, and
    R their singular values.  What else is trainable, such as a head, stays so.

    Examples
    --------
    >>> import peft
    >>> config = peft.LoraConfig(r=4, target_modules=["0"])
    >>> small = with_cores(peft.get_peft_model(nn.Sequential(nn.Linear(64, 64)), config))
    >>> [p.numel() for p in small.parameters() if p.requires_grad]
    [16]
    """
    model = copy.deepcopy(model)
    for name, layer, adapter in _adapters(model):
        a, b = layer.lora_A[adapter], layer.lora_B[adapter]
        if type(a) is not nn.Linear or type(b) is not nn.Linear or adapter in layer.lora_variant:
            raise InvalidValueError(
                f"layer {name!r} must be a linear one with a plain adapter to have a core between "
                f"A and B; its A is {type(a).__name__}"
            )
        with torch.no_grad():
            change = b.weight @ a.weight
            weight = layer.get_base_layer().weight.detach().to(change)
            trained = bool(change.any())
            wanted = change if trained else weight if weight.shape == change.shape else weight.T
            left, values, right = torch.linalg.svd(wanted, full_matrices=False)
            rank = a.weight.shape[0]
            if len(values) < rank:
                raise InvalidValueError(
                    f"layer {name!r}: r={rank} must be <= {len(values)}, the smaller side of its "
                    "weight"
                )
            core = torch.diag(values[:rank]) if trained else change.new_zeros(rank, rank)
            b.weight.copy_(left[:, :rank])
        b.weight.requires_grad_(False)
        layer.lora_A[adapter] = Core(right[:rank].contiguous(), core)
    return model


def merge_cores(model: nn.Module) -> nn.Module:
    """Return a copy in which every adapter is `peft`'s own again, with R A for A; it saves so."""
    model = copy.deepcopy(model)
    for _, layer, adapter in _adapters(model, with_core=True):
        weight = layer.lora_A[adapter].weight.detach()
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        plain.weight = nn.Parameter(weight.clone())
        layer.lora_A[adapter] = plain
        layer.lora_B[adapter].weight.requires_grad_(True)
    return model


def _adapters(model: nn.Module, with_core: bool = False) -> list[tuple[str, Any, str]]:
    """Return each layer with adapters, its name, and the name of one of them; not none."""
    found = [
        (name, layer, adapter)
        for name, layer in model.named_modules()
        if isinstance(held := getattr(layer, "lora_A", None), nn.ModuleDict)
        for adapter in held
        if isinstance(held[adapter], Core) == with_core
    ]
    if not found:
        kind = "of with_cores" if with_core else "of peft.LoraConfig"
        raise InvalidValueError(f"model={type(model).__name__} must have adapters {kind}")
    return found
