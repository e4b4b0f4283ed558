"""A plan on a GPU: all local steps of a group of clients as one recorded step, replayed.

Everything a step reads lies on the device: the clients' weights, the tables of the round, a
counter of steps.  A step is recorded once for each number of clients still training (a CUDA
graph), and a round replays it; the host has nothing to do in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedquilt.training.hardware import record_event
from fedquilt.training.objective import IGNORED
from fedquilt.training.trainers.batches import IndexChunk, Tables
from fedquilt.training.trainers.gpu import kernels, norm_kernels
from fedquilt.training.trainers.plan import (
    Conv,
    Dense,
    Dropout,
    Embedding,
    Layer,
    LayerPlan,
    Norm,
    Pool,
    is_interpreted,
)

_Halves = tuple[torch.Tensor, torch.Tensor] | None


@dataclass(eq=False)
class _Saved:
    """What a layer keeps for its way back."""

    layer: Layer
    x: torch.Tensor
    out: torch.Tensor
    which: torch.Tensor
    d: torch.Tensor
    """The gradient with respect to `out`."""
    dz: torch.Tensor
    """`d` before the pool."""
    border: int
    """How many zeros stand around `dz`, so that no window of it has to be cut."""
    out_border: int
    """How many around `out`: the padding of a convolution after this layer."""
    relu_before: bool
    """Whether `x` came out of a rectifier, so that a gradient for it goes through that."""
    x_halves: _Halves = None
    """`x` as sums of two bfloat16, where the gradient of the weights is computed from those."""
    dz_halves: _Halves = None
    out_halves: _Halves = None
    """`x_halves` of the layer after, where this one can write them."""
    parts: torch.Tensor | None = None
    bias_parts: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None


class Program:
    """Buffers and kernels for up to `rows` clients with batches of `width`.

    Parameters
    ----------
    plan : LayerPlan
        The network.
    inputs, targets : tensor
        All samples, channels last and contiguous.
    rows, width : int
        The most clients, and the batch size.
    dtype : torch.dtype
        Of the activations, and of `inputs` that are not tokens: float32 (products in TF32) or
        bfloat16.
    precision : str
        Of products of float32.
    prox : float
        FedProx's mu: clients are pulled back to where they began.
    mask_value : float, optional
        What the outputs of hidden classes count as (`engine.ClassMask`); None hides none.
    """

    def __init__(
        self,
        plan: LayerPlan,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        rows: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        precision: str = "tf32",
        prox: float = 0.0,
        mask_value: float | None = None,
    ) -> None:
        self.plan = plan
        self._prox, self._mask_value = prox, mask_value
        self.rows, self.width = rows, width
        self._inputs, self._targets = inputs, targets
        self._device, self._type = inputs.device, dtype
        self._low = dtype != torch.float32
        self._precision = precision
        self._graphs: dict[int, Any] = {}
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._rate = torch.zeros(1, device=self._device)
        self._pull = torch.zeros(1, device=self._device)
        self._hidden = torch.zeros(rows, plan.classes, dtype=torch.uint8, device=self._device)
        self._loss_sum = torch.zeros(rows, device=self._device)
        self._nowhere = 0
        self._copied: torch.cuda.Event | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._used: dict[str, torch.Tensor] = {}
        self._anchors: dict[str, torch.Tensor] = {}
        self._grow(1, 1)
        self._saved = self._allocate()

    def _grow(self, steps: int, samples: int) -> None:
        """Make room for the tables; what was recorded points at the old ones."""
        draws = self.plan.num_draws
        self._begins = torch.zeros(steps, self.rows, dtype=torch.int64, device=self._device)
        self._sizes = torch.zeros(steps, self.rows, dtype=torch.int32, device=self._device)
        self._shuffled = torch.zeros(samples, dtype=torch.int64, device=self._device)
        # Copies from here are queued, and the host draws on.
        pinned = self._device.type == "cuda"
        self._staged = torch.zeros(samples, dtype=torch.int64, pin_memory=pinned)
        self._keys = [
            torch.zeros(steps, self.rows, 2, dtype=torch.int32, device=self._device)
            for _ in range(draws)
        ]
        self._graphs.clear()

    def _allocate(self) -> list[_Saved]:
        layers = self.plan.layers
        paddings = [layer.padding if isinstance(layer, Conv) else 0 for layer in layers] + [0]
        self._input_border = paddings[0]
        image = _bordered(self.plan.input_shape, paddings[0])
        x = self._x = self._empty(image, self._inputs.dtype)
        self._y = torch.zeros(self.rows, self.width, dtype=self._targets.dtype, device=self._device)
        saved: list[_Saved] = []
        relu = False
        for place, layer in enumerate(layers):
            out = self._empty(_bordered(layer.shape, paddings[place + 1]))
            pooled = isinstance(layer, Conv) and layer.pool
            # The first layer has no inputs to give a gradient to.
            border = layer.kernel[0] - 1 - layer.padding if isinstance(layer, Conv) and place else 0
            # A convolution writes the gradient of its inputs into a border; no other layer does.
            writes_inside = place + 1 < len(layers) and isinstance(layers[place + 1], Conv)
            bordered = writes_inside and not pooled
            d = self._empty(_bordered(layer.shape, border if bordered else 0))
            dz = d
            if isinstance(layer, Conv) and (layer.pool or (border and not bordered)):
                dz = self._empty(_bordered((*layer.out_size, layer.outputs), border))
            chooses = pooled or (isinstance(layer, Pool) and layer.largest)
            which = self._empty(layer.shape, torch.uint8) if chooses else out
            kept = _Saved(layer, x, out, which, d, dz, border, paddings[place + 1], relu)
            self._make_parts(kept)
            self._make_halves(kept, saved[-1] if saved else None)
            saved.append(kept)
            x = out
            relu = _is_rectified(layer, relu)
        return saved

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(
            self.rows, self.width, *shape, dtype=dtype or self._type, device=self._device
        )

    def _make_parts(self, kept: _Saved) -> None:
        layer = kept.layer

        def parts(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=self._device)

        if isinstance(layer, Conv):
            length = layer.kernel[0] * layer.kernel[1] * layer.inputs
            kept.parts = parts(_conv_split(layer), self.rows, length, layer.outputs)
            kept.bias_parts = parts(_SUM_SPLIT, self.rows, layer.outputs)
        elif isinstance(layer, Dense):
            kept.parts = parts(_dense_split(layer.inputs), self.rows, self.width, layer.outputs)
        elif isinstance(layer, Norm):
            kept.mean = parts(self.rows, self.width, layer.groups)
            kept.rstd = parts(self.rows, self.width, layer.groups)
            kept.parts = parts(_SUM_SPLIT, self.rows, layer.shape[-1])
            kept.bias_parts = parts(_SUM_SPLIT, self.rows, layer.shape[-1])

    def _make_halves(self, kept: _Saved, before: _Saved | None) -> None:
        layer = kept.layer
        if not isinstance(layer, Conv) or not _weights_blocks(layer, self._type)["HALVES"]:
            return

        def halves(tensor: torch.Tensor) -> _Halves:
            # Zeros: what stands around an image is never written.  The interpreter has no
            # products of bfloat16; there the halves are rounded to it and kept as float32.
            dtype = torch.float32 if is_interpreted() else torch.bfloat16
            first, second = (torch.zeros_like(tensor, dtype=dtype) for _ in range(2))
            return first, second

        kept.x_halves, kept.dz_halves = halves(kept.x), halves(kept.dz)
        if before is not None and isinstance(before.layer, Conv):
            before.out_halves = kept.x_halves

    @property
    def bytes_a_row(self) -> int:
        """What a client's row takes beside its weights."""
        tensors = [self._x, self._y]
        for kept in self._saved:
            tensors += [kept.out, kept.which, kept.d, kept.dz]
            tensors += [t for t in (kept.parts, kept.bias_parts) if t is not None]
            tensors += [t for pair in (kept.x_halves, kept.dz_halves) for t in pair or ()]
        places = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        return sum(places.values()) // self.rows

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Give every row these weights, [1, shape in the model] each."""
        for weights in self.plan.weights:
            laid_out = weights.to_plan(tensors[weights.name])
            if weights.name not in self._weights:
                shape = (self.rows, *laid_out.shape[1:])
                self._weights[weights.name] = torch.empty(shape, device=self._device)
                self._anchors[weights.name] = (
                    torch.empty_like(laid_out) if self._prox else self._weights[weights.name]
                )
                self._used[weights.name] = (
                    torch.empty(shape, dtype=self._type, device=self._device)
                    if self._low
                    else self._weights[weights.name]
                )
            if self._prox:
                self._anchors[weights.name].copy_(laid_out)
            self._weights[weights.name].copy_(laid_out.expand_as(self._weights[weights.name]))
            if self._low:
                self._used[weights.name].copy_(self._weights[weights.name])

    def train(self, tables: Tables, learning_rate: float) -> torch.Tensor:
        """Run all steps; return each client's loss, summed over the samples it saw.

        The weights are then in `weight`.
        """
        steps, count = tables.sizes.shape
        self._write(tables)
        self._rate.fill_(learning_rate)
        self._pull.fill_(learning_rate * self._prox)
        self._loss_sum.zero_()
        self._step.zero_()
        active = (tables.sizes > 0).sum(axis=1)
        chunks = tables.chunks()
        coming = next(chunks, None)
        for t in range(steps):
            while coming is not None and coming.step <= t:
                self._fill(coming)
                coming = next(chunks, None)
            self._run(_row_step(int(active[t]), self.rows))
        self._copied = record_event(self._device)
        return self._loss_sum[:count].clone()

    def _fill(self, chunk: IndexChunk) -> None:
        """Queue the copy of some shuffled samples."""
        some = slice(chunk.place, chunk.place + len(chunk.samples))
        self._staged[some] = torch.from_numpy(chunk.samples)
        self._shuffled[some].copy_(self._staged[some], non_blocking=True)

    def weight(self, name: str, count: int) -> torch.Tensor:
        """Return the first rows of a tensor, as the plan has it."""
        return self._weights[name][:count]

    def _write(self, tables: Tables) -> None:
        steps, count = tables.sizes.shape
        if self._copied is not None:
            self._copied.synchronize()  # the samples staged before are read no more
        if steps > len(self._sizes) or tables.length > len(self._shuffled):
            wanted = max(steps, len(self._sizes)), max(tables.length, len(self._shuffled))
            self._grow(*(1 << (size - 1).bit_length() for size in wanted))
        self._nowhere = len(self._shuffled) - 1
        self._sizes.zero_()
        self._sizes[:steps, :count] = torch.from_numpy(tables.sizes.astype(np.int32)).to(
            self._device
        )
        self._begins[:steps, :count] = torch.from_numpy(tables.begins).to(self._device)
        if tables.hidden is not None:
            self._hidden[:count] = tables.hidden
        # Rows without samples read a sample that is nobody's choice: the first one.
        self._shuffled[-1] = 0
        for here, keys in zip(self._keys, tables.keys, strict=True):
            here[:steps, :count] = torch.from_numpy(keys).to(self._device)

    def _run(self, count: int) -> None:
        if self._device.type != "cuda":
            self._kernels(count)
            return
        if count not in self._graphs:
            self._graphs[count] = self._record(count)
        self._graphs[count].replay()

    def _record(self, count: int) -> Any:
        """Record a step of so many clients; one before the first compiles the kernels."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            if not self._graphs:
                self._try_out(count)
            # Not `torch.cuda.graph`: it collects garbage and waits for the device each time,
            # for the sake of what a step allocates, and ours allocates nothing.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._kernels(count)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def _try_out(self, count: int) -> None:
        """Run a step that changes nothing."""
        state = (*self._weights.values(), self._loss_sum, self._step)
        kept = [tensor.clone() for tensor in state]
        self._kernels(count)
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        for name, tensor in self._weights.items():
            if self._low:
                self._used[name].copy_(tensor)

    def _kernels(self, count: int) -> None:
        """Launch one step of the first `count` rows."""
        sample = math.prod(self.plan.input_shape)
        kernels.gather_kernel[(self.width, count)](
            self._step, self._begins, self._sizes, self._shuffled, self._nowhere,
            self._inputs, self._targets, self._x, self._y, self.rows, self.width,
            *_image(self.plan.input_shape), self._input_border, BLOCK=min(1024, _power(sample)),
        )  # fmt: skip
        for kept in self._saved:
            _FORWARD[type(kept.layer)](self, kept, count)
        last = self._saved[-1]
        kernels.loss_kernel[(count,)](
            self._step, self._sizes, last.out, self._y, last.d, self._loss_sum, self._hidden,
            self.rows, IGNORED, self.width, self.plan.classes,
            self._mask_value is not None, self._mask_value == 0.0,
            BM=_power(self.width), BN=_power(self.plan.classes),
        )  # fmt: skip
        for place in range(len(self._saved) - 1, -1, -1):
            kept = self._saved[place]
            before = self._saved[place - 1] if place else None
            _BACKWARD[type(kept.layer)](self, kept, before, count)
        kernels.advance_kernel[(1,)](self._step)

    def _conv(self, kept: _Saved, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Conv)
        high, wide = layer.shape[:2]
        pixels = self.width * high * wide * (4 if layer.pool else 1)
        small, _ = _window_block(layer)
        how = _forward_blocks(layer, self._type)
        bias = kept.out if layer.bias is None else self._used[layer.bias]
        grid = (_cdiv(pixels, how["BM"]), _cdiv(layer.outputs, how["BN"]), count)
        kernels.conv_kernel[grid](
            kept.x, self._used[layer.weight], bias, kept.out, *(kept.out_halves or (kept.out,) * 2),
            kept.which, self.width, *_geometry(layer), kept.out_border,
            kept.out_halves is not None, layer.bias is not None, layer.relu, layer.pool,
            small,
            PRECISION=self._precision, **how,
        )  # fmt: skip

    def _conv_back(self, kept: _Saved, before: _Saved | None, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Conv)
        assert kept.parts is not None
        assert kept.bias_parts is not None
        if layer.pool:
            high, wide = layer.out_size
            columns = min(64, max(16, _power(layer.outputs)))
            grid = (_cdiv(self.width * high * wide, 64), _cdiv(layer.outputs, columns), count)
            kernels.unpool_kernel[grid](
                kept.d, kept.which, kept.dz, *(kept.dz_halves or (kept.dz,) * 2), self.width,
                layer.outputs, high, wide, kept.border, kept.dz_halves is not None,
                BM=64, BN=columns,
            )  # fmt: skip
        elif kept.dz is not kept.d:
            size = self.width * math.prod(layer.shape)
            norm_kernels.border_kernel[(_cdiv(size, 1024), count)](
                kept.d, kept.dz, self.width, *layer.shape, kept.border, BLOCK=1024
            )
        small, _ = _window_block(layer)
        window = layer.kernel[1] * layer.inputs
        how = _weights_blocks(layer, self._type)
        blocks = 1 if small else layer.kernel[0] * _cdiv(window, how["BC"])
        split = len(kept.parts)
        grid = (blocks, _cdiv(layer.outputs, how["BN"]), count * split)
        (x, x_low), (dz, dz_low) = self._halves(kept, before, count)
        kernels.conv_weights_kernel[grid](
            x, dz, x_low, dz_low, kept.parts, self.rows, self.width,
            *_geometry(layer), kept.border, small, split, PRECISION=self._precision, **how,
        )  # fmt: skip
        if before is not None:
            border = before.border if before.dz is before.d else 0
            how = _inputs_blocks(layer, self._type)
            pixels = self.width * layer.height * layer.width
            grid = (_cdiv(pixels, how["BM"]), _cdiv(layer.inputs, how["BN"]), count)
            kernels.conv_inputs_kernel[grid](
                kept.dz, self._used[layer.weight], kept.x, before.d, self.width,
                *_geometry(layer), kept.border, border, kept.relu_before,
                PRECISION=self._precision, **how,
            )  # fmt: skip
        self._apply(layer.weight, kept.parts, count)
        if layer.bias is not None:
            columns = min(64, max(16, _power(layer.outputs)))
            split = len(kept.bias_parts)
            kernels.channel_sums_kernel[(_cdiv(layer.outputs, columns), split, count)](
                kept.d, kept.bias_parts, self.rows, self.width, *layer.shape,
                kept.border if kept.dz is kept.d else 0, split, BM=64, BN=columns, num_warps=4,
            )  # fmt: skip
            self._apply(layer.bias, kept.bias_parts, count)

    def _halves(
        self, kept: _Saved, before: _Saved | None, count: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Return what the gradient of the weights is computed from: whole, or in two halves."""
        if kept.x_halves is None or kept.dz_halves is None:
            return (kept.x, kept.x), (kept.dz, kept.dz)
        if before is None or before.out_halves is None:
            self._split(kept.x, kept.x_halves, count)
        if not (isinstance(kept.layer, Conv) and kept.layer.pool):  # the pool's way back does it
            self._split(kept.dz, kept.dz_halves, count)
        return kept.x_halves, kept.dz_halves

    def _split(
        self, whole: torch.Tensor, halves: tuple[torch.Tensor, torch.Tensor], count: int
    ) -> None:
        length = whole[0].numel()
        kernels.halves_kernel[(_cdiv(length, 1024), count)](whole, *halves, length, BLOCK=1024)

    def _apply(self, name: str, parts: torch.Tensor, count: int) -> None:
        length = math.prod(parts.shape[2:])
        kernels.apply_kernel[(_cdiv(length, 1024), count)](
            self._step, self._sizes, self._rate, parts, self._weights[name], self._used[name],
            self._anchors[name], self._pull, self.rows, length, len(parts), self._low,
            bool(self._prox), BLOCK=1024,
        )  # fmt: skip

    def _dense(self, kept: _Saved, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Dense)
        assert kept.parts is not None
        split = len(kept.parts)
        rows, columns = _dense_blocks(self.width, layer.outputs)
        grid = (_cdiv(self.width, rows) * _cdiv(layer.outputs, columns), split, count)
        kernels.dense_kernel[grid](
            kept.x, self._used[layer.weight], kept.parts, self.rows,
            self.width, layer.inputs, layer.outputs, split,
            BM=rows, BN=columns, BK=64, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip
        bias = kept.out if layer.bias is None else self._used[layer.bias]
        kernels.dense_sum_kernel[(_cdiv(self.width * layer.outputs, 512), count)](
            kept.parts, bias, kept.out, self.rows, self.width, layer.outputs, split,
            layer.bias is not None, layer.relu, BLOCK=512,
        )  # fmt: skip

    def _dense_back(self, kept: _Saved, before: _Saved | None, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Dense)
        if before is not None:
            rows = max(16, min(64, _power(self.width)))
            grid = (_cdiv(layer.inputs, 64), _cdiv(self.width, rows), count)
            kernels.dense_inputs_kernel[grid](
                kept.d, self._used[layer.weight], kept.x, before.d,
                self.width, layer.inputs, layer.outputs, kept.relu_before,
                BM=rows, BN=64, BK=min(128, max(16, _power(layer.outputs))),
                PRECISION=self._precision, num_warps=4,
            )  # fmt: skip
        columns = min(64, max(16, _power(layer.outputs)))
        features = 64 if self._low else 32
        bias = layer.weight if layer.bias is None else layer.bias
        grid = (_cdiv(layer.inputs, features), _cdiv(layer.outputs, columns), count)
        kernels.dense_update_kernel[grid](
            self._step, self._sizes, self._rate, kept.x, kept.d,
            self._weights[layer.weight], self._weights[bias],
            self._used[layer.weight], self._used[bias],
            self._anchors[layer.weight], self._anchors[bias], self._pull, self.rows,
            self.width, layer.inputs, layer.outputs, layer.bias is not None, self._low,
            bool(self._prox),
            BF=features, BN=columns, BM=max(16, min(64, _power(self.width))),
            PRECISION=self._precision, num_warps=4,
        )  # fmt: skip

    def _norm(self, kept: _Saved, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Norm)
        gamma, beta = self._affine(kept)
        norm_kernels.norm_kernel[(self.width * layer.groups, count)](
            kept.x, gamma, beta, kept.out, kept.mean, kept.rstd, layer.eps,
            self.width, *_image(layer.shape), layer.groups, kept.out_border,
            layer.weight is not None, layer.relu, BLOCK=_norm_block(layer),
        )  # fmt: skip

    def _affine(self, kept: _Saved) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and the shift of a norm, in float32; anything where it has none."""
        layer = kept.layer
        assert isinstance(layer, Norm)
        if layer.weight is None or layer.bias is None:
            return kept.x, kept.x
        return self._weights[layer.weight], self._weights[layer.bias]

    def _norm_back(self, kept: _Saved, before: _Saved | None, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Norm)
        assert before is not None
        assert kept.parts is not None
        assert kept.bias_parts is not None
        high, wide, channels = _image(layer.shape)
        sizes = self.width, high * wide, channels, layer.groups
        norm_kernels.norm_inputs_kernel[(self.width * layer.groups, count)](
            kept.x, kept.d, self._affine(kept)[0], kept.mean, kept.rstd, before.d, *sizes,
            layer.weight is not None, kept.relu_before, BLOCK=_norm_block(layer),
        )  # fmt: skip
        if layer.weight is None or layer.bias is None:
            return
        columns, split = min(64, max(16, _power(channels))), len(kept.parts)
        norm_kernels.norm_weights_kernel[(_cdiv(channels, columns), split, count)](
            kept.x, kept.d, kept.mean, kept.rstd, kept.parts, kept.bias_parts, self.rows, *sizes,
            split, BM=64, BN=columns,
        )  # fmt: skip
        self._apply(layer.weight, kept.parts, count)
        self._apply(layer.bias, kept.bias_parts, count)

    def _pool(self, kept: _Saved, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Pool)
        size = self.width * math.prod(layer.shape)
        norm_kernels.pool_kernel[(_cdiv(size, 1024), count)](
            kept.x, kept.out, kept.which, self.width, *layer.image, layer.size, kept.out_border,
            layer.largest, BLOCK=1024,
        )  # fmt: skip

    def _pool_back(self, kept: _Saved, before: _Saved | None, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Pool)
        assert before is not None
        size = self.width * math.prod(layer.image)
        # The largest that is above zero came through the rectifier: the layer after has looked.
        mask = kept.relu_before and not layer.largest
        norm_kernels.pool_inputs_kernel[(_cdiv(size, 1024), count)](
            kept.d, kept.which, kept.x, before.d, self.width, *layer.image, layer.size,
            layer.largest, mask, BLOCK=1024,
        )  # fmt: skip

    def _embed(self, kept: _Saved, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Embedding)
        sizes = _table_sizes(layer, self.width)
        block = min(1024, _power(sizes[0] * layer.dim))
        norm_kernels.embedding_kernel[(_cdiv(sizes[0] * layer.dim, block), count)](
            kept.x, self._used[layer.weight], kept.out, *sizes, layer.relu, BLOCK=block,
        )  # fmt: skip

    def _embed_back(self, kept: _Saved, before: _Saved | None, count: int) -> None:
        layer = kept.layer
        assert isinstance(layer, Embedding)
        sizes = _table_sizes(layer, self.width)
        table, columns = min(32, max(16, _power(layer.num))), min(64, max(16, _power(layer.dim)))
        grid = (_cdiv(layer.num, table), _cdiv(layer.dim, columns), count)
        norm_kernels.embedding_update_kernel[grid](
            self._step, self._sizes, self._rate, kept.x, kept.d,
            self._weights[layer.weight], self._used[layer.weight], self._anchors[layer.weight],
            self._pull, self.rows, *sizes, self._low, bool(self._prox),
            BV=table, BN=columns, BM=max(16, min(64, _power(sizes[0]))), num_warps=4,
        )  # fmt: skip

    def _drop(self, kept: _Saved, count: int) -> None:
        self._dropped(kept, kept.x, kept.out, False, count)

    def _drop_back(self, kept: _Saved, before: _Saved | None, count: int) -> None:
        assert before is not None
        # The layer after has masked by what came out of here: zero where a value was dropped
        # or negative.  Where it has not, the rectifier before still has to be gone through.
        self._dropped(kept, kept.d, before.d, kept.relu_before, count)

    def _dropped(
        self, kept: _Saved, x: torch.Tensor, out: torch.Tensor, mask: bool, count: int
    ) -> None:
        layer = kept.layer
        assert isinstance(layer, Dropout)
        sample = math.prod(layer.shape)
        channels = layer.image[-1]
        places = math.prod(layer.image[:-1])
        drawn = channels if layer.by_channel else sample
        kernels.dropout_kernel[(_cdiv(self.width * sample, 1024), count)](
            self._step, self._keys[layer.draw], x, kept.x, out, self.rows,
            int(layer.share * 2**32) - 2**31, 1.0 / (1.0 - layer.share),
            self.width, sample, drawn, channels,
            1 if layer.by_channel else places, 0 if layer.by_channel else 1,
            mask, BLOCK=1024,
        )  # fmt: skip


_FORWARD: dict[type, Callable[..., None]] = {
    Conv: Program._conv,
    Dense: Program._dense,
    Dropout: Program._drop,
    Norm: Program._norm,
    Pool: Program._pool,
    Embedding: Program._embed,
}
_BACKWARD: dict[type, Callable[..., None]] = {
    Conv: Program._conv_back,
    Dense: Program._dense_back,
    Dropout: Program._drop_back,
    Norm: Program._norm_back,
    Pool: Program._pool_back,
    Embedding: Program._embed_back,
}


def _is_rectified(layer: Layer, before: bool) -> bool:
    """Whether a value above zero that comes out tells that a rectifier let it through."""
    if isinstance(layer, Dropout):
        return before  # zero, or a multiple of what came in
    if isinstance(layer, Pool):
        return before and layer.largest
    return layer.relu


def _table_sizes(layer: Embedding, width: int) -> tuple[int, int, int, int, int, bool, bool]:
    """Samples, tokens of each, rows and columns of the table, padding, whether mean and bag."""
    samples, tokens = (width * layer.tokens, 1) if layer.pool is None else (width, layer.tokens)
    padding = -1 if layer.padding is None else layer.padding
    mean, skips = layer.pool == "mean", layer.skips_padding
    return samples, tokens, layer.num, layer.dim, padding, mean, skips


def _norm_block(layer: Norm) -> int:
    return min(1024, max(16, _power(math.prod(layer.shape) // layer.groups)))


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Height, width and channels; a vector is an image of one row and column."""
    return (1, 1, shape[0]) if len(shape) == 1 else (shape[0], shape[1], shape[2])


def _bordered(shape: tuple[int, ...], border: int) -> tuple[int, ...]:
    if not border:
        return shape
    high, wide, channels = shape
    return high + 2 * border, wide + 2 * border, channels


def _geometry(layer: Conv) -> tuple[int, ...]:
    return (
        layer.height,
        layer.width,
        layer.inputs,
        layer.outputs,
        *layer.out_size,
        *layer.kernel,
        layer.padding,
    )


def _window_block(layer: Conv) -> tuple[bool, int]:
    """Whether a whole window is one block of the product, and how long a block is."""
    window = layer.kernel[1] * layer.inputs
    whole = layer.kernel[0] * window
    if window < 16 and whole <= 128:
        return True, max(16, _power(whole))
    return False, 32 if window % 64 else 64


def _forward_blocks(layer: Conv, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes of the convolution, warps and stages, as they were fastest on an H200."""
    small, block = _window_block(layer)
    columns = min(128, max(16, _power(layer.outputs)))
    if small:
        return {"BM": 128, "BN": columns, "BK": block, "num_warps": 4}
    wide, single = columns == 128, dtype == torch.float32
    warps = 8 if wide or single else 4
    return {"BM": 256, "BN": columns, "BK": 32, "num_warps": warps, "num_stages": 4 if wide else 3}


def _weights_blocks(layer: Conv, dtype: torch.dtype) -> dict[str, int]:
    """The same for the gradient of its weights."""
    small, block = _window_block(layer)
    window = layer.kernel[1] * layer.inputs
    columns = min(64, max(16, _power(layer.outputs)))
    if small:
        return {"BM": 128, "BC": block, "BN": columns, "HALVES": False, "num_warps": 4}
    if dtype == torch.float32:
        columns = min(128, max(16, _power(layer.outputs)))
        wide = window >= 384 and columns == 128
        rows = 128 if wide else min(64, max(16, _power(window)))
        how = {"BM": 32, "num_warps": 8 if wide else 4, "num_stages": 3 if columns == 128 else 4}
        return {"BC": rows, "BN": columns, "HALVES": True, **how}
    wide = window >= 384
    rows = 128 if wide else min(64, max(16, _power(window)))
    how = {"BM": 64, "num_warps": 4, "num_stages": 3 if wide else 4}
    return {"BC": rows, "BN": columns, "HALVES": False, **how}


def _inputs_blocks(layer: Conv, dtype: torch.dtype) -> dict[str, int]:
    """The same for the gradient of its inputs."""
    columns = min(128, max(16, _power(layer.inputs)))
    wide, single = columns == 128, dtype == torch.float32
    block = min(32 if single else 64, max(16, _power(layer.outputs)))
    pixels = 256 if wide and single else 128
    how = {"num_warps": 8 if wide else 4, "num_stages": 4 if single and not wide else 3}
    return {"BM": pixels, "BN": columns, "BK": block, **how}


# How many stretches of pixels the gradient of a bias is added up in.
_SUM_SPLIT = 32


def _conv_split(layer: Conv) -> int:
    """How many stretches of pixels the gradient of the weights is added up in."""
    return 4


def _dense_split(inputs: int) -> int:
    """How many stretches the sum over the features is cut into: more programs for long ones."""
    return max(1, min(8, inputs // 512))


def _dense_blocks(width: int, outputs: int) -> tuple[int, int]:
    return max(16, min(64, _power(width))), max(16, min(128, _power(outputs)))


def _row_step(active: int, rows: int) -> int:
    """Return how many rows run where `active` are training: few numbers, little waste."""
    if active <= 8:
        return min(rows, max(1, active))
    step = 1 << (active.bit_length() - 3)
    return min(rows, -(-active // step) * step)


def _power(value: int) -> int:
    """The next power of two."""
    return int(1 << max(0, value - 1).bit_length())


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
