"""A network of standard layers as a list that can be run without autograd.

`torch.fx` follows the forward pass; convolutions and dense layers take the rectifier and
the 2 x 2 maximum that follow them along.  A network with anything else has no plan, and the
reason is said: it runs as it is, through `torch.func.vmap`.

In a plan activations have their channels last, [batch, height, width, channels], so the
rows of a weight matrix are ordered by (row, column, channel) of the window or image it
reads: `Weights` carries tensors there and back.  Tokens stay whole numbers, [batch, tokens].
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fedquilt.training.draws import generator_states


class NoPlanError(Exception):
    """Why a network has no plan."""


@dataclass(frozen=True)
class Conv:
    """pool(relu(convolution)), of stride 1."""

    weight: str
    bias: str | None
    height: int
    width: int
    inputs: int
    outputs: int
    kernel: tuple[int, int]
    padding: int
    relu: bool = False
    pool: bool = False

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width before the pool."""
        (high, wide), pad = self.kernel, 2 * self.padding
        return self.height + pad - high + 1, self.width + pad - wide + 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample that comes out."""
        high, wide = self.out_size
        return (high // 2, wide // 2, self.outputs) if self.pool else (high, wide, self.outputs)


@dataclass(frozen=True)
class Dense:
    """relu(linear layer)."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    relu: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample that comes out."""
        return (self.outputs,)


@dataclass(frozen=True)
class Dropout:
    """Zero a share of the values, or of the channels."""

    share: float
    draw: int
    by_channel: bool
    shape: tuple[int, ...]
    image: tuple[int, ...]
    """The image of which `shape` is the flattened form, or the shape itself."""


@dataclass(frozen=True)
class Norm:
    """relu(group normalisation), of an image or of a vector; without weights both are None."""

    weight: str | None
    bias: str | None
    shape: tuple[int, ...]
    groups: int
    eps: float
    relu: bool = False


@dataclass(frozen=True)
class Pool:
    """The largest or the mean of every size x size values of an image."""

    image: tuple[int, ...]
    size: int
    largest: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample that comes out."""
        high, wide, channels = self.image
        return high // self.size, wide // self.size, channels


@dataclass(frozen=True)
class Embedding:
    """relu(rows of a table, one a token of the sample; or their mean or sum)."""

    weight: str
    num: int
    """How many rows the table has."""
    dim: int
    tokens: int
    padding: int | None
    """The row that gets no gradient."""
    skips_padding: bool = False
    """Whether tokens that name it do not count, in a bag of tokens."""
    pool: str | None = None
    """`mean` or `sum` over the tokens."""
    relu: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample that comes out."""
        return (self.tokens, self.dim) if self.pool is None else (self.dim,)


Layer = Conv | Dense | Dropout | Norm | Pool | Embedding


@dataclass(frozen=True)
class Weights:
    """How a tensor of the model lies in the plan."""

    name: str
    to_plan: Callable[[torch.Tensor], torch.Tensor]
    """[clients, shape in torch] -> [clients, rows, columns]"""
    to_model: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerPlan:
    """The layers in order, and how their weights lie."""

    layers: tuple[Layer, ...]
    weights: tuple[Weights, ...]
    input_shape: tuple[int, ...]
    """Of a sample, channels last."""
    normalised: bool = False
    """It ends in log-probabilities, which are left out."""

    @property
    def classes(self) -> int:
        """How many scores come out."""
        return self.layers[-1].shape[0]

    @property
    def num_draws(self) -> int:
        """How many random draws a step makes."""
        return sum(isinstance(layer, Dropout) for layer in self.layers)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens its inputs are of; None: they are not tokens."""
        first = self.layers[0]
        return first.num if isinstance(first, Embedding) else None

    def lay_out(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return samples with their channels last."""
        return inputs.movedim(1, -1) if inputs.dim() == 4 else inputs


def plan_layers(module: nn.Module, sample: torch.Tensor) -> LayerPlan:
    """Return the plan of a network in training mode; `sample` is a batch of public inputs.

    Raises
    ------
    NoPlanError
        The network has a layer or a shape that no plan has; the message says which.
    """
    _refuse_hooks(module)
    before = generator_states()
    try:
        traced = fx.symbolic_trace(module)
    except Exception as error:  # whatever a forward pass may do with a placeholder
        raise NoPlanError(f"torch.fx cannot follow its forward pass ({error})") from error
    if generator_states() != before:
        # What was drawn while it was followed would stand in the plan as if it never changed.
        raise NoPlanError("its forward pass draws from the generators of Python or NumPy")
    maker = _Maker(traced, tuple(sample.shape[1:]), not sample.is_floating_point())
    for node in traced.graph.nodes:
        maker.add(node)
    return maker.plan()


_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def _refuse_hooks(module: nn.Module) -> None:
    """Refuse whatever runs around a forward pass: `torch.fx` follows `forward` of classes alone."""
    if any(getattr(nn.modules.module, f"_global_{hooks}") for hooks in _HOOKS):
        raise NoPlanError("hooks are set for all modules")
    for name, part in module.named_modules():
        what = name or "it"
        if any(getattr(part, f"_{hooks}") for hooks in _HOOKS):
            raise NoPlanError(f"{what} has hooks")
        if nn.utils.parametrize.is_parametrized(part):
            raise NoPlanError(f"{what} has parametrized weights")
        own = {"forward", "_call_impl", "_wrapped_call_impl"} & vars(part).keys()
        if own or type(part).__call__ is not nn.Module.__call__:
            raise NoPlanError(f"{what} is called in a way of its own")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise NoPlanError(f"{name} has hooks")


class _Maker:
    """Follows the nodes of a traced network, one after the other."""

    def __init__(self, traced: fx.GraphModule, shape: tuple[int, ...], whole: bool) -> None:
        self._modules = dict(traced.named_modules())
        self._layers: list[Layer] = []
        self._weights: list[Weights] = []
        self._draws = 0
        self._last: fx.Node | None = None
        if len(shape) not in (1, 3):
            raise NoPlanError(f"its inputs have the shape {shape}")
        self._input_shape = self._shape = shape if len(shape) == 1 else (*shape[1:], shape[0])
        self._image = self._shape
        self._whole = whole
        self._closed = False

    def plan(self) -> LayerPlan:
        last = self._layers[-1] if self._layers else None
        if not isinstance(last, Dense) or last.relu:
            raise NoPlanError("it does not end in a linear layer")
        if self._whole and not isinstance(self._layers[0], Embedding):
            raise NoPlanError("its inputs are whole numbers, which no embedding reads")
        layers, weights = tuple(self._layers), tuple(self._weights)
        return LayerPlan(layers, weights, self._input_shape, self._closed)

    def add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if self._last is not None:
                raise NoPlanError("it has more than one input")
            self._last = node
            return
        if len(node.all_input_nodes) != 1 or node.all_input_nodes[0] is not self._last:
            raise NoPlanError(f"{node.name} does not follow the layer before it")
        self._last = node
        if node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                raise NoPlanError("it returns more than scores")
            return
        if self._closed:
            raise NoPlanError(f"{node.name} follows the log-probabilities")
        if node.op == "call_module":
            self._module(str(node.target), self._modules[str(node.target)])
        elif node.op == "call_function":
            self._function(node)
        elif node.op == "call_method":
            self._method(node)
        else:
            raise NoPlanError(f"{node.name} ({node.op}) is not a standard layer")

    def _module(self, name: str, module: Any) -> None:
        kind = type(module)
        if kind is nn.Linear:
            self._linear(name, module)
        elif kind is nn.Conv2d:
            self._conv(name, module)
        elif kind in (nn.Embedding, nn.EmbeddingBag):
            self._embedding(name, module)
        elif kind is nn.ReLU:
            self._relu()
        elif kind is nn.MaxPool2d:
            self._pool(
                module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
            )
        elif kind is nn.AvgPool2d:
            plain = _both(module.padding) == (0, 0) and not module.ceil_mode
            self._mean(module.kernel_size, module.stride, plain and not module.divisor_override)
        elif kind is nn.AdaptiveAvgPool2d:
            self._whole_mean(module.output_size)
        elif kind is nn.GroupNorm:
            self._norm(name, module, module.num_groups)
        elif kind is nn.InstanceNorm2d and not module.track_running_stats:
            self._norm(name, module, module.num_features)
        elif kind is nn.LayerNorm and len(module.normalized_shape) == len(self._shape) == 1:
            self._norm(name, module, 1)
        elif kind is nn.Flatten:
            self._flatten(module.start_dim, module.end_dim)
        elif kind in (nn.Dropout, nn.Dropout2d):
            self._dropout(float(module.p), kind is nn.Dropout2d)
        elif kind is nn.LogSoftmax:
            self._log_softmax(module.dim)
        elif kind is not nn.Identity:
            raise NoPlanError(f"{name} is {kind.__name__}")

    def _function(self, node: fx.Node) -> None:
        f, a, k = node.target, list(node.args[1:]), dict(node.kwargs)

        def get(place: int, name: str, default: Any) -> Any:
            return a[place] if len(a) > place else k.get(name, default)

        if f in (functional.relu, torch.relu):
            self._relu()
        elif f is functional.max_pool2d:
            size = get(0, "kernel_size", None)
            self._pool(
                size,
                get(1, "stride", None),
                get(2, "padding", 0),
                get(3, "dilation", 1),
                get(4, "ceil_mode", False),
            )
        elif f is functional.avg_pool2d:
            plain = len(a) < 3 and set(k) <= {"kernel_size", "stride"}
            self._mean(get(0, "kernel_size", None), get(1, "stride", None), plain)
        elif f is functional.adaptive_avg_pool2d:
            self._whole_mean(get(0, "output_size", None))
        elif f is torch.flatten:
            self._flatten(get(0, "start_dim", 0), get(1, "end_dim", -1))
        elif f in (functional.dropout, functional.dropout2d):
            if get(1, "training", True):
                self._dropout(float(get(0, "p", 0.5)), f is functional.dropout2d)
        elif f in (functional.log_softmax, torch.log_softmax):
            self._log_softmax(get(0, "dim", None))
        elif f in (torch.mean, torch.sum):
            self._over_tokens(node, "mean" if f is torch.mean else "sum")
        else:
            raise NoPlanError(f"{node.name} is not a standard layer")

    def _method(self, node: fx.Node) -> None:
        a: list[Any] = list(node.args[1:])
        k: dict[str, Any] = dict(node.kwargs)
        if node.target == "relu":
            self._relu()
        elif node.target == "flatten":
            start = a[0] if a else k.get("start_dim", 0)
            self._flatten(start, a[1] if len(a) > 1 else k.get("end_dim", -1))
        elif node.target in ("mean", "sum"):
            self._over_tokens(node, node.target)
        else:
            raise NoPlanError(f"{node.name} (.{node.target}) is not a standard layer")

    def _linear(self, name: str, module: nn.Linear) -> None:
        if len(self._shape) != 1 or module.in_features != self._shape[0]:
            raise NoPlanError(f"{name} reads something else than one vector a sample")
        image = self._image
        self._own(
            name, module, lambda w: _rows_of_dense(w, image), lambda w: _dense_of_rows(w, image)
        )
        bias = None if module.bias is None else f"{name}.bias"
        self._append(Dense(f"{name}.weight", bias, module.in_features, module.out_features))

    def _conv(self, name: str, module: nn.Conv2d) -> None:
        plain = module.stride == (1, 1) and module.dilation == (1, 1) and module.groups == 1
        pad = module.padding
        if not plain or len(self._shape) != 3 or isinstance(pad, str) or pad[0] != pad[1]:
            raise NoPlanError(f"{name} is not a convolution of stride 1 with equal padding")
        if module.padding_mode != "zeros":
            raise NoPlanError(f"{name} pads with {module.padding_mode}")
        size = module.kernel_size
        assert len(size) == 2
        if size[0] != size[1] or pad[0] >= size[0]:
            raise NoPlanError(f"{name} has a window that is not square, or padding as wide as it")
        before = self._layers[-1] if self._layers else None
        if isinstance(before, Dropout) or (before is not None and self._shape != before.shape):
            raise NoPlanError(f"{name} follows a dropout")
        self._own(name, module, _rows_of_conv, lambda w: _conv_of_rows(w, module.weight.shape))
        bias = None if module.bias is None else f"{name}.bias"
        high, wide, channels = self._shape
        self._append(
            Conv(
                f"{name}.weight",
                bias,
                high,
                wide,
                channels,
                module.out_channels,
                (size[0], size[1]),
                int(pad[0]),
            )
        )

    def _own(
        self,
        name: str,
        module: Any,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        if any(weights.name == f"{name}.weight" for weights in self._weights):
            raise NoPlanError(f"{name} is used twice")
        self._weights.append(Weights(f"{name}.weight", there, back))
        if getattr(module, "bias", None) is not None:
            self._weights.append(Weights(f"{name}.bias", lambda b: b, lambda b: b))

    def _embedding(self, name: str, module: Any) -> None:
        if self._layers or not self._whole or len(self._shape) != 1:
            raise NoPlanError(f"{name} reads something else than the tokens of a sample")
        if module.max_norm is not None:
            raise NoPlanError(f"{name} shortens its rows (max_norm)")
        if module.sparse or module.scale_grad_by_freq:
            raise NoPlanError(f"{name} has sparse gradients, or ones scaled by frequency")
        bag = type(module) is nn.EmbeddingBag
        if bag and module.mode not in ("mean", "sum"):
            raise NoPlanError(f"{name} takes the {module.mode} of a bag")
        num, padding = module.num_embeddings, module.padding_idx
        padding = None if padding is None else padding % num
        self._own(name, module, lambda w: w, lambda w: w)
        layer = Embedding(f"{name}.weight", num, module.embedding_dim, self._shape[0], padding)
        if bag:
            layer = replace(layer, pool=module.mode, skips_padding=padding is not None)
        self._append(layer)
        # No channels stand first in torch: flattened, they are in the same order there.
        self._image = (math.prod(layer.shape),)

    def _over_tokens(self, node: fx.Node, pool: str) -> None:
        """A mean or sum over the tokens, taken where their rows are read."""
        given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
        dim: Any = given.get("dim")
        plain = (dim,) if isinstance(dim, int) else tuple(dim or ())
        over = plain in ((1,), (-2,)) and not given.get("keepdim", False)
        last = self._layers[-1] if self._layers else None
        rows = last if isinstance(last, Embedding) and not last.relu else None
        whole = rows is not None and len(self._shape) == 2 and self._shape == rows.shape
        if rows is None or not whole or not over or not set(given) <= {"dim", "keepdim"}:
            raise NoPlanError(f"{node.name} is not a mean or sum over the tokens of an embedding")
        self._layers[-1] = replace(rows, pool=pool)
        self._shape = self._image = self._layers[-1].shape

    def _append(self, layer: Layer) -> None:
        self._layers.append(layer)
        self._shape = self._image = layer.shape

    def _relu(self) -> None:
        last = self._layers[-1] if self._layers else None
        known = last if isinstance(last, Conv | Dense | Norm | Embedding) else None
        if known is None or known.relu or self._shape != known.shape:
            raise NoPlanError(
                "a rectifier follows something else than a dense layer, convolution, norm or "
                "embedding"
            )
        self._layers[-1] = replace(known, relu=True)

    def _pool(self, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any) -> None:
        last = self._layers[-1] if self._layers else None
        standard = _both(size) == (2, 2) and _both(stride or size) == (2, 2)
        standard = standard and _both(padding) == (0, 0) and _both(dilation) == (1, 1)
        if not standard or ceil_mode or last is None or not self._is_image(last, 2):
            raise NoPlanError("a pool is not a maximum of 2 x 2 behind another layer")
        if not isinstance(last, Conv) or last.pool:
            self._append(Pool(self._shape, 2, largest=True))
            return
        self._layers[-1] = replace(last, pool=True)
        self._shape = self._image = self._layers[-1].shape

    def _is_image(self, last: Layer, smallest: int) -> bool:
        """Whether a pool can follow this layer; behind a dropout none does."""
        is_image = len(self._shape) == 3 and not isinstance(last, Dropout)
        return is_image and self._shape == last.shape and min(self._shape[:2]) >= smallest

    def _mean(self, size: Any, stride: Any, plain: bool) -> None:
        last, sizes = self._layers[-1] if self._layers else None, _both(size)
        square = sizes[0] == sizes[1] and _both(stride or size) == sizes and plain
        if not square or last is None or not self._is_image(last, sizes[0]):
            raise NoPlanError("a pool is not a mean of squares side by side behind another layer")
        self._append(Pool(self._shape, sizes[0], largest=False))

    def _whole_mean(self, size: Any) -> None:
        """A mean over the whole image."""
        if size is None or len(self._shape) != 3 or self._shape[0] != self._shape[1]:
            raise NoPlanError("a pool is not a mean of a whole square image")
        if _both(size) != (1, 1):
            raise NoPlanError("an adaptive pool is not a mean of the whole image")
        self._mean(self._shape[0], None, plain=True)

    def _norm(self, name: str, module: Any, groups: int) -> None:
        last = self._layers[-1] if self._layers else None
        if last is None or isinstance(last, Dropout) or self._shape != last.shape:
            raise NoPlanError(f"{name} does not follow a dense layer, convolution or pool")
        if len(self._shape) == 2:
            raise NoPlanError(f"{name} normalises over the tokens of a sample")
        channels = self._shape[-1]
        if channels % groups:
            raise NoPlanError(f"{name} has groups of different sizes")
        weight, bias = module.weight, module.bias
        if (weight is None) != (bias is None):
            raise NoPlanError(f"{name} has a scale without a shift")
        if weight is None:
            self._append(Norm(None, None, self._shape, groups, float(module.eps)))
            return
        self._own(name, module, lambda w: w, lambda w: w)
        names = f"{name}.weight", f"{name}.bias"
        self._append(Norm(*names, self._shape, groups, float(module.eps)))

    def _flatten(self, start: int, end: int) -> None:
        if start != 1 or end not in (-1, len(self._shape)):
            raise NoPlanError("it flattens something else than each sample")
        self._shape = (math.prod(self._shape),)

    def _dropout(self, share: float, by_channel: bool) -> None:
        if share == 0.0:
            return
        if not 0.0 < share < 1.0 or (by_channel and len(self._shape) != 3) or not self._layers:
            raise NoPlanError(
                f"dropout of {share} of something else than values or channels of an image"
            )
        self._layers.append(Dropout(share, self._draws, by_channel, self._shape, self._image))
        self._draws += 1

    def _log_softmax(self, dim: Any) -> None:
        """Leave it out: the cross-entropy of log-probabilities is that of the scores."""
        if dim not in (1, -1) or len(self._shape) != 1:
            raise NoPlanError("it takes log-probabilities over something else than classes")
        self._closed = True


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU, as in the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _rows_of_conv(w: torch.Tensor) -> torch.Tensor:
    """[clients, out, in, high, wide] -> [clients, high * wide * in, out]."""
    return w.permute(0, 3, 4, 2, 1).reshape(len(w), -1, w.shape[1]).contiguous()


def _conv_of_rows(w: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    out, inputs, high, wide = shape
    return w.view(len(w), high, wide, inputs, out).permute(0, 4, 3, 1, 2)


def _rows_of_dense(w: torch.Tensor, image: tuple[int, ...]) -> torch.Tensor:
    """[clients, out, in] -> [clients, in, out], `in` reordered from channels first to last."""
    if len(image) == 3:
        high, wide, channels = image
        w = w.view(*w.shape[:2], channels, high, wide).permute(0, 1, 3, 4, 2).flatten(2)
    return w.transpose(1, 2).contiguous()


def _dense_of_rows(w: torch.Tensor, image: tuple[int, ...]) -> torch.Tensor:
    w = w.transpose(1, 2)
    if len(image) == 3:
        high, wide, channels = image
        w = w.reshape(*w.shape[:2], high, wide, channels).permute(0, 1, 4, 2, 3).flatten(2)
    return w
