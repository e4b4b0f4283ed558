"""Low-rank adapters: a large frozen model of which a few numbers are trained.

Hu et al. 2022, "LoRA" (arXiv:2106.09685): the weight W of a layer stays as it is, and

    W' = W + (alpha / rank) B A,   A [rank, in], B [out, rank], B = 0 at the start,

so that rank (in + out) numbers are trained instead of in x out.  Under a bound that is what
counts: noise has the same strength on every trained number, so its norm grows with the
root of how many there are.

For a convolution A is a convolution of `rank` channels with the layer's own kernel and B one
of kernel 1.  For an embedding A [rows, rank] starts at zero and B [rank, width] does not.
"""

from __future__ import annotations

import copy
import math
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Adapter(nn.Module):
    """A frozen layer with a low-rank change; `weight` is W'.

    Code that reads a layer's weight instead of calling the layer, as torch's attention and
    its fast path of transformers do, gets the changed one.
    """

    base: nn.Module
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.rank, self.scale = rank, alpha / rank

    def change(self) -> torch.Tensor:
        """Return (alpha / rank) B A in the shape of the layer's weight."""
        raise NotImplementedError

    @property
    def weight(self) -> torch.Tensor:
        """W'."""
        return cast(torch.Tensor, self.base.weight) + self.change()

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own bias, which is frozen."""
        return cast("torch.Tensor | None", getattr(self.base, "bias", None))

    def merged(self) -> nn.Module:
        """Return a plain layer with the weight W'."""
        layer = copy.deepcopy(self.base)
        with torch.no_grad():
            cast(torch.Tensor, layer.weight).copy_(self.weight)
        return layer

    def extra_repr(self) -> str:
        """Name the rank."""
        return f"rank={self.rank}"


class LinearAdapter(Adapter):
    """`nn.Linear` with a low-rank change."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, draws: torch.Generator) -> None:
        super().__init__(base, rank, alpha)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_a = _drawn((rank, base.in_features), base.in_features, base.weight, draws)
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return W x + bias + (alpha / rank) B (A x)."""
        low = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return cast(torch.Tensor, self.base(x)) + self.scale * low

    def change(self) -> torch.Tensor:
        """Return (alpha / rank) B A."""
        return self.scale * (self.lora_b @ self.lora_a)


class ConvAdapter(Adapter):
    """`nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`, not grouped, with a low-rank change."""

    def __init__(self, base: Any, rank: int, alpha: float, draws: torch.Generator) -> None:
        super().__init__(base, rank, alpha)
        kernel = tuple(base.weight.shape[2:])
        self.in_channels, self.out_channels = base.in_channels, base.out_channels
        fan_in = base.in_channels * math.prod(kernel)
        self.lora_a = _drawn((rank, base.in_channels, *kernel), fan_in, base.weight, draws)
        ones = (1,) * len(kernel)
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_channels, rank, *ones))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output and that of B after A."""
        layer: Any = self.base
        low = layer._conv_forward(x, self.lora_a, None)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[low.dim() - 3]
        return cast(torch.Tensor, layer(x) + self.scale * convolve(low, self.lora_b))

    def change(self) -> torch.Tensor:
        """Return (alpha / rank) B A as a kernel."""
        change = self.lora_b.flatten(1) @ self.lora_a.flatten(1)
        return self.scale * change.view_as(cast(torch.Tensor, self.base.weight))


class EmbeddingAdapter(Adapter):
    """`nn.Embedding` with a low-rank change."""

    def __init__(self, base: nn.Embedding, rank: int, alpha: float, draws: torch.Generator) -> None:
        super().__init__(base, rank, alpha)
        self.num_embeddings, self.embedding_dim = base.num_embeddings, base.embedding_dim
        self.padding_idx = base.padding_idx
        self.lora_a = nn.Parameter(base.weight.new_zeros(base.num_embeddings, rank))
        self.lora_b = _drawn((rank, base.embedding_dim), rank, base.weight, draws)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of W + (alpha / rank) A B."""
        rows = functional.embedding(x, self.lora_a, self.padding_idx)
        return cast(torch.Tensor, self.base(x)) + self.scale * (rows @ self.lora_b)

    def change(self) -> torch.Tensor:
        """Return (alpha / rank) A B."""
        return self.scale * (self.lora_a @ self.lora_b)


def _drawn(
    shape: tuple[int, ...], fan_in: int, like: torch.Tensor, draws: torch.Generator
) -> nn.Parameter:
    values = torch.randn(shape, generator=draws) / math.sqrt(fan_in)
    return nn.Parameter(values.to(device=like.device, dtype=like.dtype))


def lora(
    model: nn.Module,
    rank: int = 4,
    target: str = "all",
    *,
    train: str = "",
    alpha: float | None = None,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of a model whose layers are frozen but for low-rank adapters.

    Before training it computes what the model computes.  `merge_lora` puts the adapters
    into the weights.

    Parameters
    ----------
    model : nn.Module
        Any model; it is not changed.
    rank : int
        r, at least 1.
    target : str
        Comma-separated patterns of module names: `q_proj,v_proj` are all modules of these
        names, `blocks.*.mlp.*` a path; `all` is every linear, convolution and embedding
        layer.  A module that is none of these is not a target.
    train : str
        Patterns of the names of parameters that are trained whole, such as a new head:
        `head.*`.
    alpha : float, optional
        The change is scaled by alpha / rank; by default by 1.
    seed : int
        Of the adapters' first values, which are public.

    Examples
    --------
    >>> small = lora(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), rank=2)
    >>> sum(p.numel() for p in small.parameters() if p.requires_grad)
    404
    """
    rank = checks.integer("rank", rank, at_least=1)
    alpha = float(rank) if alpha is None else checks.number("alpha", alpha, above=0)
    model = copy.deepcopy(model).requires_grad_(False)
    draws = torch.Generator().manual_seed(checks.integer("seed", seed, at_least=0))
    patterns, whole = _patterns(target), _patterns(train)
    adapters: dict[int, Adapter] = {}
    for name, module in list(model.named_modules()):
        if any(_fits(name, pattern) for pattern in patterns):
            adapter = _adapted(name, module, rank, alpha, draws)
            if adapter is not None:
                adapters[id(module)] = adapter
    if not adapters:
        layers = [name for name, m in model.named_modules() if _is_layer(m)]
        raise InvalidValueError(
            f"target={target!r} must match a linear, convolution or embedding layer; the model "
            f"has {', '.join(map(repr, layers)) or 'none'}"
        )
    model = _exchanged(model, adapters)
    for pattern in whole:
        found = [p for name, p in model.named_parameters() if _fits(name, pattern)]
        if not found:
            raise InvalidValueError(
                f"train={pattern!r} must match a parameter of the model with its adapters, such "
                f"as {next(iter(dict(model.named_parameters())))!r}"
            )
        for parameter in found:
            parameter.requires_grad_(True)
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which every adapter is a plain layer of the weight W'.

    Its parameters have the names of the model that `lora` was given.
    """
    model = copy.deepcopy(model)
    plain = {id(m): m.merged() for m in model.modules() if isinstance(m, Adapter)}
    if not plain:
        raise InvalidValueError("the model must have adapters, as fedquilt.models.lora makes them")
    return _exchanged(model, plain)


def _exchanged(model: nn.Module, others: dict[int, Any]) -> nn.Module:
    """Put other modules in the place of some, wherever they are held, also more than once."""
    if id(model) in others:
        return cast(nn.Module, others[id(model)])
    for holder in list(model.modules()):
        if isinstance(holder, Adapter):
            continue
        for name, child in list(holder._modules.items()):  # named_children leaves out repeats
            if id(child) in others:
                setattr(holder, name, others[id(child)])
    return model


def _adapted(
    name: str, module: nn.Module, rank: int, alpha: float, draws: torch.Generator
) -> Adapter | None:
    if isinstance(module, nn.Linear):
        return LinearAdapter(module, rank, alpha, draws)
    if isinstance(module, _CONVOLUTIONS):
        if module.groups != 1:
            raise InvalidValueError(
                f"target must not match {name!r}: it is a convolution of {module.groups} groups, "
                "whose kernels have no low rank in common"
            )
        return ConvAdapter(module, rank, alpha, draws)
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise InvalidValueError(
                f"target must not match {name!r}: with max_norm a forward pass changes its weights"
            )
        return EmbeddingAdapter(module, rank, alpha, draws)
    return None


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS, nn.Embedding))


def _patterns(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _fits(name: str, pattern: str) -> bool:
    """Tell whether a pattern fits the end of a dotted name; `all` fits every one."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return pattern == "all" or any(fnmatchcase(end, pattern) for end in ends)
