"""The local steps of one client on a CPU: the layers of a plan, gradients written by hand.

Autograd spends more time on its graph than a small network on its products.  Here a step is a
handful of calls on memory that is kept: for a dense layer y = x W^T + b with the gradient d of
its output,

    x's gradient is d W,   W <- W - (r / n) d^T x,   b <- b - (r / n) sum(d),

each of them one product that writes where its result belongs; plain SGD is part of the product.
The bias is a column of the weights beside a column of ones in x where that is possible.
Convolutions are oneDNN's, channels last, with the rectifier inside, or Winograd's where that saves
enough multiplications (`winograd`).  d of the cross-entropy is
softmax(scores) - onehot(target); the 1 / n of the mean is in the step.

Images are [batch, channels, height, width] in memory with channels last, so a dense layer behind
them has its columns in that order, too (`LayerTensors` carries weights there and back).

A small network's step is so short that the calls count as much as what they compute.  Where all
layers are dense, several clients take it together: every tensor has a first axis of *lanes*, one
client each, and a product becomes a batch of products, which touch nobody else's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedquilt.training.trainers import winograd
from fedquilt.training.trainers.plan import Conv, Dense, Dropout, LayerPlan, NoPlanError
from fedquilt.training.trainers.winograd import Update

_ALIGN = 16  # floats of a cache line; columns of a joined matrix are filled up to it
_aten = torch.ops.aten


def _filled_up(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def matrices(*shape: int) -> torch.Tensor:
    """Return memory for matrices, each of which begins where a cache line does.

    Products may round differently elsewhere, and where a client's matrix lies among those of
    others must not show in its update.
    """
    *before, rows, columns = shape
    block = torch.empty(*before, _filled_up(rows * columns))
    return block[..., : rows * columns].view(*before, rows, columns)


class LayerTensors:
    """The weights of one layer, or their gradients: `named` has them in torch's shapes.

    With `lanes` all of them have one more axis in front.
    """

    def __init__(
        self,
        layer: Conv | Dense,
        image: tuple[int, ...] | None,
        joined: bool,
        lanes: tuple[int, ...],
    ) -> None:
        self.bias: torch.Tensor | None = None
        if isinstance(layer, Conv):
            if winograd.suits(layer):
                size = (*layer.kernel, layer.inputs, layer.outputs)
                self.weight = torch.zeros(size).permute(3, 2, 0, 1)
            else:
                size = (layer.outputs, *layer.kernel, layer.inputs)
                self.weight = torch.zeros(size).permute(0, 3, 1, 2)
            named = self.weight
        else:
            columns = layer.inputs
            if joined:
                columns = _filled_up(layer.inputs + bool(layer.bias))
            self.weight = torch.zeros(*lanes, layer.outputs, columns)
            named = self.weight[..., : layer.inputs]
            if image is not None:
                named = named.view(layer.outputs, *image).permute(0, 3, 1, 2)
        self.named = {layer.weight: named}
        if layer.bias is not None:
            joint = joined and isinstance(layer, Dense)
            self.bias = self.weight[..., layer.inputs] if joint else torch.zeros(layer.outputs)
            self.named[layer.bias] = self.bias


class _Step(Protocol):
    """One layer, for batches of one size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out; it may be changed by who gets it."""

    def backward(self, d: torch.Tensor, update: Update) -> torch.Tensor | None:
        """Put the weights' gradient where it goes; return the input's, None for the first layer."""


class _DenseStep:
    """relu(x W^T + b); `x` is [n, columns of the weights] where the bias is one of them."""

    def __init__(self, made: LayerBuffers, view: BufferView) -> None:
        layer = made.layer
        assert isinstance(layer, Dense)
        has_lanes = view.lanes is not None
        self._product = torch.bmm if has_lanes else torch.mm
        self._add_product = torch.baddbmm if has_lanes else torch.addmm
        self._into = view.of_clients(made.into.weight)
        weight = view.of_clients(made.weights.weight)
        self._turned: torch.Tensor = weight.mT
        self._plain = weight[..., : layer.inputs]
        self._bias = None if made.joined else made.weights.bias
        self._bias_into = None if made.joined else made.into.bias
        self._relu, self._first = layer.relu, made.first
        self._out: torch.Tensor = view.of_samples(made.out)
        self._scores = self._out[..., : layer.outputs]
        self._gradient = view.of_samples(made.gradient)[..., : layer.inputs]
        self._sum = torch.empty(layer.outputs)
        self._image, self._size = made.image, view.size
        self._d: torch.Tensor | None = None

    def write_to(self, scores: torch.Tensor) -> None:
        """Let what comes out be there: the last layer's has no column of ones."""
        self._out = self._scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._image is not None:
            x = x.permute(0, 2, 3, 1).reshape(self._size, -1)
        self._x = x
        if self._bias is None:
            self._product(x, self._turned, out=self._scores)
        else:
            torch.addmm(self._bias, x, self._turned, out=self._scores)
        if self._relu:
            self._scores.relu_()
        return self._out

    def backward(self, d: torch.Tensor, update: Update) -> torch.Tensor | None:
        if self._relu:
            _aten.threshold_backward.grad_input(d, self._scores, 0, grad_input=d)
        before = None
        if not self._first:
            before = self._product(d, self._plain, out=self._gradient)
        if d is not self._d:  # nearly always the same memory
            self._d, self._d_turned = d, d.mT
        into, keep, scale = self._into, update.keep, update.scale
        self._add_product(into, self._d_turned, self._x, beta=keep, alpha=scale, out=into)
        if self._bias_into is not None:
            update.put(self._bias_into, torch.sum(d, 0, out=self._sum))
        if before is None or self._image is None:
            return before
        return before.view(self._size, *self._image).permute(0, 3, 1, 2)


class _ConvStep:
    """pool(relu(convolution))."""

    def __init__(self, made: LayerBuffers, view: BufferView) -> None:
        layer = made.layer
        assert isinstance(layer, Conv)
        self._weight, self._bias = made.weights.weight, made.weights.bias
        self._into, self._bias_into = made.into.weight, made.into.bias
        self._relu, self._pool, self._first = layer.relu, layer.pool, made.first
        self._padding = [layer.padding, layer.padding]
        self._channels = layer.outputs
        if layer.pool:
            self._gradient = view.of_samples(made.gradient).permute(0, 3, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._x = x
        y = convolved(x, self._weight, self._bias, self._padding, self._relu)
        if self._pool:
            self._full = y
            y, self._places = _aten.max_pool2d_with_indices.default(y, [2, 2])
        self._y = y
        return y

    def backward(self, d: torch.Tensor, update: Update) -> torch.Tensor | None:
        if self._relu:
            # A maximum of rectified values is positive where the gradient passes both.
            _aten.threshold_backward.grad_input(d, self._y, 0, grad_input=d)
        if self._pool:
            _aten.max_pool2d_with_indices_backward.grad_input(
                *(d, self._full, [2, 2], [2, 2], [0, 0], [1, 1], False, self._places),
                grad_input=self._gradient,
            )
            d = self._gradient
        before, gradient, _ = _aten.convolution_backward.default(
            *(d, self._x, self._weight, None, [1, 1], self._padding, [1, 1], False, [0, 0], 1),
            [not self._first, True, False],
        )
        update.put(self._into, gradient)
        if self._bias_into is not None:
            update.put(self._bias_into, d.permute(0, 2, 3, 1).reshape(-1, self._channels).sum(0))
        return None if self._first else before


class _DropoutStep:
    """Multiply by a mask that is drawn before the step."""

    def __init__(self, made: LayerBuffers, view: BufferView) -> None:
        layer, size = made.layer, view.size
        assert isinstance(layer, Dropout)
        self._first = made.first
        self._features = layer.shape[0]
        image = layer.image
        self._shape: tuple[int, ...] = (size, *layer.shape)
        if len(image) == 3:
            high, wide, channels = image
            self._shape = (size, channels, *((1, 1) if layer.by_channel else (high, wide)))
        self._count = torch.Size(self._shape).numel()
        self._image = len(image) == 3
        self._mask = torch.empty(0)

    def draw(self, mask: torch.Tensor) -> None:
        """Take the mask of the step, as torch lays it out."""
        self._mask = mask[: self._count].view(self._shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x if self._image else x[:, : self._features]
        part.mul_(self._mask)
        return x

    def backward(self, d: torch.Tensor, update: Update) -> torch.Tensor | None:
        return d.mul_(self._mask)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: list[int], relu: bool
) -> torch.Tensor:
    """Return relu(convolution) of stride 1, channels last, in one call where oneDNN is there."""
    if _FUSED is not None:
        after = "relu" if relu else "none"
        fused: torch.Tensor = _FUSED(x, weight, bias, padding, [1, 1], [1, 1], 1, after, [], "")
        return fused
    y = torch.conv2d(x, weight, bias, padding=padding)
    return y.relu_() if relu else y


def _fused_convolution() -> Any:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_convolution_pointwise", None)


_FUSED = _fused_convolution()


@dataclass(eq=False)
class LayerBuffers:
    """A layer of the plan with its weights and memory for a full batch."""

    layer: Conv | Dense | Dropout
    first: bool
    image: tuple[int, ...] | None = None
    """The image that a dense layer reads as one vector, channels last."""
    joined: bool = False
    """The weights' columns are filled up, the bias among them if there is one."""

    def __post_init__(self) -> None:
        self.weights: Any = None
        self.into: Any = None
        self.out: Any = None
        self.gradient: Any = None
        self.tiles: Any = None


class ManualProgram:
    """All layers of a plan, and a step through them.

    Parameters
    ----------
    plan : LayerPlan
        The network.
    width : int
        The size of a full batch.
    with_gradients : bool
        Keep the gradients beside the weights, for rules other than plain SGD.
    lanes : int, optional
        How many clients may take a step together; only for networks of dense layers.  Weights,
        inputs and scores then have an axis of lanes in front.
    """

    def __init__(
        self, plan: LayerPlan, width: int, with_gradients: bool, lanes: int | None = None
    ) -> None:
        self._lanes = () if lanes is None else (lanes,)
        self._layers = _made(plan, fill_up=lanes is not None)
        self.width, self._classes = width, plan.classes
        self.starts_with_image = isinstance(plan.layers[0], Conv)
        self._input_shape = plan.input_shape
        self.weights: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        for number, made in enumerate(self._layers):
            self._give_memory(number, made, with_gradients)
        self._features = torch.Size(plan.input_shape).numel()
        first = self._layers[0]
        columns = first.weights.weight.shape[-1] if first.joined else self._features
        self._x = torch.zeros(*self._lanes, width, columns)
        if first.joined and isinstance(first.layer, Dense) and first.layer.bias:
            self._x[..., self._features] = 1.0
        self._fillings = [
            made.weights.weight[..., made.layer.inputs + bool(made.layer.bias) :]
            for made in self._layers
            if made.joined and isinstance(made.layer, Dense)
        ]
        self._buffers: dict[BufferView, BatchBuffers] = {}

    def _give_memory(self, number: int, made: LayerBuffers, with_gradients: bool) -> None:
        layer, width = made.layer, self.width
        if isinstance(layer, Dropout):
            return
        made.weights = LayerTensors(layer, made.image, made.joined, self._lanes)
        made.into = made.weights
        self.weights |= made.weights.named
        if with_gradients:
            made.into = LayerTensors(layer, made.image, made.joined, self._lanes)
            self.gradients |= made.into.named
        if isinstance(layer, Conv):
            if winograd.suits(layer):
                made.tiles = winograd.WinogradMemory(layer, width, made.first)
            elif layer.pool:
                made.gradient = torch.empty(width, *layer.out_size, layer.outputs)
            return
        columns = _filled_up(layer.inputs) if self._lanes else layer.inputs
        made.gradient = torch.empty(*self._lanes, width, columns)
        # The next dense layer may read a column of ones beside the values.
        after = next((m for m in self._layers[number + 1 :] if isinstance(m.layer, Dense)), None)
        columns, has_ones = layer.outputs, False
        if after is not None and after.joined and isinstance(after.layer, Dense):
            has_ones = after.layer.bias is not None
            columns = _filled_up(layer.outputs + has_ones)
        made.out = torch.zeros(*self._lanes, width, columns)
        if has_ones:
            made.out[..., layer.outputs] = 1.0

    def reset(self) -> None:
        """Make zero what fills matrices up: a client whose numbers are NaN leaves NaN there."""
        for filling in self._fillings:
            filling.zero_()

    def step(
        self,
        buffers: BatchBuffers,
        inputs: torch.Tensor,
        batch: torch.Tensor,
        onehot: torch.Tensor,
        scores: torch.Tensor,
        turned: torch.Tensor,
        update: Update,
        masks: Sequence[torch.Tensor] = (),
    ) -> None:
        """Take one step on the samples `batch` of `inputs` [all samples, features].

        `buffers` are those of the batch's size; `scores` receives those before the step.  They and
        `onehot` are [classes, samples]: a softmax over few classes is fast for many samples.
        `turned` is the transposed view of `scores`.  With buffers of several lanes `batch` has
        the samples of all of them.
        """
        torch.index_select(inputs, 0, batch, out=buffers.gathered)
        x = self._image(buffers.x) if self.starts_with_image else buffers.x
        if masks:
            for dropout, mask in zip(buffers.dropouts, masks, strict=True):
                dropout.draw(mask)
        if buffers.last is not None:
            buffers.last.write_to(turned)
        for step in buffers.steps:
            x = step.forward(x)
        if buffers.last is None:
            turned.copy_(x)
        torch.softmax(scores, -2, out=buffers.by_class).sub_(onehot)
        d: torch.Tensor | None = buffers.d
        for step in buffers.backward:
            if d is not None:
                d = step.backward(d, update)

    def _image(self, x: torch.Tensor) -> torch.Tensor:
        high, wide, channels = self._input_shape
        size = x.shape[0]
        image = x.view(size, channels, high, wide).permute(0, 2, 3, 1).contiguous()
        # Named strides: of one channel torch could not tell where it lies.
        strides = (high * wide * channels, 1, wide * channels, channels)
        return image.as_strided((size, channels, high, wide), strides)

    def buffers(self, size: int, first: int = 0, lanes: int = 1) -> BatchBuffers:
        """Return the layers for batches of a size, of `lanes` clients from the lane `first` on."""
        taken = (first, first + lanes) if self._lanes else None
        view = BufferView(size, taken)
        known = self._buffers.get(view)
        if known is not None:
            return known
        if lanes > 1 and (taken is None or size != self.width):
            raise ValueError(f"lanes={lanes} must be 1 for batches of {size}, not {self.width}")
        steps = [_STEPS[type(made.layer)](made, view) for made in self._layers]
        x = view.of_samples(self._x)
        by_class = matrices(*x.shape[: len(self._lanes)], self._classes, size)
        gathered = (x if taken is None else x.flatten(0, 1))[:, : self._features]
        buffers = self._buffers[view] = BatchBuffers(steps, x, gathered, by_class)
        return buffers


@dataclass(frozen=True)
class BufferView:
    """Which part of the memory a batch takes: so many samples, of the lanes [first, end)."""

    size: int
    lanes: tuple[int, int] | None

    def of_clients(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the lanes."""
        return tensor if self.lanes is None else tensor[slice(*self.lanes)]

    def of_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for the samples of as many lanes.

        A client alone computes in the first lane's, wherever its weights are: products may round
        differently where memory begins at another place of a cache line.
        """
        if self.lanes is None:
            return tensor[: self.size]
        first, end = self.lanes
        return tensor[: end - first, : self.size]


@dataclass(eq=False)
class BatchBuffers:
    """The layers for batches of one size, and the memory of their first input and last gradient."""

    steps: list[_Step]
    x: torch.Tensor
    gathered: torch.Tensor
    by_class: torch.Tensor

    def __post_init__(self) -> None:
        self.d = self.by_class.mT
        self.backward = self.steps[::-1]
        self.dropouts = [step for step in self.steps if isinstance(step, _DropoutStep)]
        last = self.steps[-1]
        self.last = last if isinstance(last, _DenseStep) else None


def _convolution(made: LayerBuffers, view: BufferView) -> _Step:
    if made.tiles is None:
        return _ConvStep(made, view)
    layer, weights, into = made.layer, made.weights, made.into
    assert isinstance(layer, Conv)
    tensors = (weights.weight, weights.bias, into.weight, into.bias)
    return winograd.WinogradStep(layer, made.tiles, *tensors, made.first, view.size)


_STEPS: dict[type, Any] = {Conv: _convolution, Dense: _DenseStep, Dropout: _DropoutStep}


def check_layers(plan: LayerPlan) -> None:
    """Raise NoPlanError for a plan with a layer that is not written here."""
    for layer in plan.layers:
        if type(layer) not in _STEPS:
            raise NoPlanError(f"{type(layer).__name__} is not written for a CPU")


def _made(plan: LayerPlan, fill_up: bool) -> list[LayerBuffers]:
    """Return the layers, told what they read; `fill_up` rows of weights without a bias, too."""
    layers: list[LayerBuffers] = []
    image: tuple[int, ...] | None = None
    behind_image = False
    for number, layer in enumerate(plan.layers):
        assert isinstance(layer, Conv | Dense | Dropout)  # `check_layers`
        made = LayerBuffers(layer, first=number == 0)
        if isinstance(layer, Conv):
            image, behind_image = layer.shape, True
        elif isinstance(layer, Dense):
            made.image = image if behind_image else None
            made.joined = not behind_image and (fill_up or layer.bias is not None)
            behind_image = False
        layers.append(made)
    return layers
