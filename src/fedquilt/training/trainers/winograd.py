"""3 x 3 convolutions with a quarter of the multiplications (Winograd 1980, Lavin and Gray 2016).

An output tile of 4 x 4 needs an input tile of 6 x 6.  With the polynomials' values at five points
and at infinity,

    tile of y = A^T (sum over channels of (G w G^T) * (B^T tile of x B)) A,

36 products a tile and pair of channels instead of 144.  For all tiles together they are 36 products
of matrices; A, B and G are matrices that are applied to the rows, then to the columns.  Gradients
are those of this formula: the same matrices, transposed.

Points 0, +-3/4, +-3/2 round best (Barabasz et al. 2020 show why it depends on them): in float32 the
result is 5e-7 of its length away from the exact one, 2e-7 of a direct convolution.

A 2 x 2 maximum lies within a tile.  It is taken there, the columns of each row first, and a tie
goes to the first of the two as in torch; bias and rectifier follow, on a quarter of the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedquilt.training.trainers.plan import Conv

_OUT, _IN = 4, 6  # rows of a tile
_POINTS = (0.0, 0.75, -0.75, 1.5, -1.5)
# How large the products of some samples may be: they are worked off while they are in a cache.
_CHUNK_BYTES = 3 << 19
# The transforms of a tile are worth it from so many multiplications less.
_WORTH = 2.8
_aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """Where the gradient of a step goes: `into <- keep * into + scale * gradient`.

    Plain SGD adds to the weights (keep 1, scale -r / n); other rules ask for the gradient
    itself (keep 0, scale 1 / n).
    """

    keep: float
    scale: float

    def put(self, into: torch.Tensor, gradient: torch.Tensor) -> None:
        """Do so with a gradient that is there."""
        if self.keep:
            into.add_(gradient, alpha=self.scale)
        else:
            torch.mul(gradient, self.scale, out=into)


def suits(layer: Conv) -> bool:
    """Tell whether a layer is a 3 x 3 convolution that is faster this way, by counting."""
    if layer.kernel != (3, 3) or min(layer.inputs, layer.outputs) < _IN:
        return False
    high, wide = layer.out_size
    tiles = math.ceil(high / _OUT) * math.ceil(wide / _OUT)
    pairs = layer.inputs * layer.outputs
    direct = 3 * 9 * high * wide * pairs
    transforms = 2 * _IN**3 * 2 * layer.inputs + 2 * (_OUT + _IN) * _OUT * _IN * layer.outputs
    return direct > _WORTH * tiles * (3 * _IN**2 * pairs + transforms)


def tile_transforms() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A^T [4, 6], G [6, 3] and B^T [6, 6] of Toom and Cook, in float64.

    With N_i(x) the product of (x - p_j) over the points other than p_i: row i of B^T has the
    coefficients of N_i, row i of G the powers of p_i over N_i(p_i), column i of A^T its powers.
    """
    points = torch.tensor(_POINTS, dtype=torch.float64)
    a = torch.zeros(_OUT, _IN, dtype=torch.float64)
    g = torch.zeros(_IN, 3, dtype=torch.float64)
    b = torch.zeros(_IN, _IN, dtype=torch.float64)
    for i, point in enumerate(points):
        others = torch.cat([points[:i], points[i + 1 :]])
        a[:, i] = point ** torch.arange(_OUT)
        g[i] = point ** torch.arange(3) / (point - others).prod()
        b[i, : _IN - 1] = _coefficients(others)
    a[-1, -1] = g[-1, -1] = 1.0
    b[-1] = _coefficients(points)
    return a, g, b


def _coefficients(roots: torch.Tensor) -> torch.Tensor:
    """Return the coefficients of the product of (x - root), that of x^0 first."""
    result = torch.ones(1, dtype=roots.dtype)
    for root in roots:
        result = torch.cat([torch.zeros_like(root)[None], result])
        result[:-1] -= root * result[1:].clone()
    return result


class _Transforms:
    """The matrices in float32, as they stand on the left of products; [n] of them for batches."""

    def __init__(self) -> None:
        a, g, b = tile_transforms()
        self.weights = torch.kron(g, g).float()
        self.weights_back = self.weights.t()
        self.a, self.b = a.float(), b.float()
        self.a_back, self.b_back = self.a.t(), self.b.t()
        self.a_each = self.a.expand(_OUT, -1, -1).contiguous()
        self.b_each = self.b.expand(_IN, -1, -1).contiguous()
        self.a_back_each = self.a_back.expand(_OUT, -1, -1).contiguous()
        self.b_back_each = self.b_back.expand(_IN, -1, -1).contiguous()


_T = _Transforms()


@dataclass(frozen=True)
class _Grid:
    """The tiles of an image."""

    rows: int
    columns: int

    @classmethod
    def of(cls, layer: Conv) -> _Grid:
        high, wide = layer.out_size
        return cls(math.ceil(high / _OUT), math.ceil(wide / _OUT))

    @property
    def tiles(self) -> int:
        """How many an image has."""
        return self.rows * self.columns

    @property
    def read(self) -> tuple[int, int]:
        """Height and width of what the tiles read."""
        return _OUT * self.rows + 2, _OUT * self.columns + 2

    def written(self, pool: bool) -> tuple[int, int]:
        """Height and width of what comes out of all tiles."""
        side = 2 if pool else _OUT
        return side * self.rows, side * self.columns


class WinogradMemory:
    """What a layer keeps for full batches of `width` samples, and while it works on some of them.

    `weight` and `into` are the weights and where their gradient goes, [3, 3, inputs, outputs].
    """

    def __init__(self, layer: Conv, width: int, first: bool) -> None:
        grid = self.grid = _Grid.of(layer)
        largest = 4 * _IN**2 * grid.tiles * max(layer.inputs, layer.outputs)
        self.chunk = math.ceil(width / math.ceil(width * largest / _CHUNK_BYTES))
        reads, writes = (
            self.chunk * grid.tiles * channels for channels in (layer.inputs, layer.outputs)
        )
        self.gathered, self.half_in = torch.empty(2, _IN**2 * reads)
        self.products, self.half_out = torch.empty(_IN**2 * writes), torch.empty(24 * writes)
        self.out = torch.empty(_OUT**2 * writes)
        self.values = torch.empty(width * grid.tiles * layer.inputs * _IN**2)
        self.weights, self.gradient = torch.empty(2, _IN**2, layer.inputs, layer.outputs)
        # 1 where the larger of two columns, or of two rows, is the first one, else 0.
        kept = width * grid.tiles * layer.outputs if layer.pool else 0
        self.left, self.upper = torch.empty(8 * kept), torch.empty(4 * kept)
        # Beyond the image they stay zero: nothing else is ever written there.
        self.image: torch.Tensor | None = None
        self.d: torch.Tensor | None = None
        if layer.padding or grid.read != (layer.height, layer.width):
            self.image = torch.zeros(width, *grid.read, layer.inputs)
        whole = grid.written(layer.pool)
        if whole != layer.shape[:2]:
            self.d = torch.zeros(width, *whole, layer.outputs)
        self.y = torch.empty(width, *whole, layer.outputs)
        self.back = torch.empty(0 if first else width, *grid.read, layer.inputs)


class WinogradStep:
    """pool(relu(convolution)) for batches of one size."""

    def __init__(
        self,
        layer: Conv,
        memory: WinogradMemory,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        into: torch.Tensor,
        bias_into: torch.Tensor | None,
        first: bool,
        size: int,
    ) -> None:
        self._layer, self._memory, self._first = layer, memory, first
        self._bias, self._bias_into = bias, bias_into
        self._weight, self._into = (
            # Stored as [3, 3, inputs, outputs], whatever torch calls its dimensions.
            tensor.permute(2, 3, 1, 0).view(9, layer.inputs * layer.outputs)
            for tensor in (weight, into)
        )
        self._gradient = memory.gradient.view(_IN**2, -1)
        self._transformed = memory.weights.view(_IN**2, -1)
        grid, (high, wide) = memory.grid, layer.shape[:2]
        self._whole_y = memory.y[:size]
        self._y = self._whole_y[:, :high, :wide].permute(0, 3, 1, 2)
        self._image = None if memory.image is None else memory.image[:size]
        self._d = None if memory.d is None else memory.d[:size]
        pad = layer.padding
        self._inner = (slice(None), slice(pad, pad + layer.height), slice(pad, pad + layer.width))
        self._back = memory.back[:size][self._inner].permute(0, 3, 1, 2)
        side = 2 if layer.pool else _OUT
        self._tiled = (size, grid.rows, side, grid.columns, side, layer.outputs)
        self._chunks = [
            _Chunk(layer, memory, place, min(memory.chunk, size - place), first)
            for place in range(0, size, memory.chunk)
        ]
        self._targets = [
            self._in_tiles(self._whole_y)[:, :, chunk.samples] for chunk in self._chunks
        ]

    def _in_tiles(self, image: torch.Tensor) -> torch.Tensor:
        """Return [row and column in the tile, sample, row and column of the tile, channel]."""
        return image.view(self._tiled).permute(2, 4, 0, 1, 3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out; it may be changed by who gets it."""
        torch.mm(_T.weights, self._weight, out=self._transformed)
        image = x.permute(0, 2, 3, 1)
        if self._image is not None:
            self._image[self._inner].copy_(image)
            image = self._image
        for chunk, target in zip(self._chunks, self._targets, strict=True):
            target.copy_(chunk.forward(image[chunk.samples]))
        if self._bias is not None:
            self._whole_y.add_(self._bias)
        if self._layer.relu:
            self._whole_y.relu_()
        return self._y

    def backward(self, d: torch.Tensor, update: Update) -> torch.Tensor | None:
        """Put the weights' gradient where it goes; return the input's, None for the first layer."""
        if self._layer.relu:
            _aten.threshold_backward.grad_input(d, self._y, 0, grad_input=d)
        image = d.permute(0, 2, 3, 1)
        if self._bias_into is not None:
            update.put(self._bias_into, image.sum((0, 1, 2)))
        if self._d is not None:
            high, wide = image.shape[1:3]
            self._d[:, :high, :wide].copy_(image)
            image = self._d
        tiles = self._in_tiles(image)
        for number, chunk in enumerate(self._chunks):
            chunk.backward(tiles[:, :, chunk.samples], 1.0 if number else 0.0)
        into, keep, scale = self._into, update.keep, update.scale
        torch.addmm(into, _T.weights_back, self._gradient, beta=keep, alpha=scale, out=into)
        return None if self._first else self._back


class _Chunk:
    """Some samples of a batch, few enough for their tiles to stay in a cache.

    t tiles, c channels in, k channels out; of the transformed tiles, 36 numbers each, first come
    all first ones, then all second ones, and so on.
    """

    def __init__(
        self, layer: Conv, memory: WinogradMemory, place: int, count: int, first: bool
    ) -> None:
        grid, c, k = memory.grid, layer.inputs, layer.outputs
        self.samples = slice(place, place + count)
        t = count * grid.tiles
        self._first, self._pool = first, layer.pool
        shape = (_IN, _IN, count, grid.rows, grid.columns, c)
        self._gathered = memory.gathered[: 36 * t * c].view(shape)
        self._gathered_rows = self._gathered.view(_IN, -1)
        self._half_in = memory.half_in[: 36 * t * c].view(_IN, -1)
        self._half_in_each = self._half_in.view(_IN, _IN, -1)
        begin = place * grid.tiles * c * 36
        self._values = memory.values[begin : begin + 36 * t * c].view(36, t, c)
        self._values_each = self._values.view(_IN, _IN, -1)
        self._weights, self._gradient = memory.weights, memory.gradient
        self._products = memory.products[: 36 * t * k].view(36, t, k)
        self._products_rows = self._products.view(_IN, -1)
        self._half_out = memory.half_out[: 24 * t * k].view(_OUT, -1)
        self._half_out_each = self._half_out.view(_OUT, _IN, -1)
        self._out = memory.out[: 16 * t * k].view(_OUT, _OUT, -1)
        self._tiles = (count, grid.rows, grid.columns, k)
        if layer.pool:
            self._make_pool(memory, place * grid.tiles * k, t * k)
        if not first:
            self._make_fold(memory.back[self.samples], grid)

    def _make_pool(self, memory: WinogradMemory, place: int, count: int) -> None:
        """Lay out [row of two, which of the two, column of two, which of the two, all tiles]."""
        out = self._out.view(2, 2, 2, 2, count)
        self._out_columns = out[:, :, :, 0], out[:, :, :, 1]
        self._left = memory.left[8 * place : 8 * (place + count)].view(2, 2, 2, count)
        self._upper = memory.upper[4 * place : 4 * (place + count)].view(2, 2, count)
        # Between the transforms nobody needs this memory.
        self._largest = memory.half_out[: 8 * count].view(2, 2, 2, count)
        self._largest_rows = self._largest[:, 0], self._largest[:, 1]
        self._pooled = memory.half_out[8 * count : 12 * count].view(2, 2, count)

    def _make_fold(self, back: torch.Tensor, grid: _Grid) -> None:
        """Tiles overlap by two rows and columns: four parts of a tile, and where they belong."""
        sample, row, column, _ = back.stride()
        strides = (row, column, sample, _OUT * row, _OUT * column, 1)
        parts = (slice(0, _OUT), slice(_OUT, _IN))
        self._back = back
        self._fold = []
        for rows in parts:
            for columns in parts:
                part = self._gathered[rows, columns]
                begin = back.storage_offset() + rows.start * row + columns.start * column
                self._fold.append((back.as_strided(part.shape, strides, begin), part))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        sample, row, column, _ = image.stride()
        strides = (row, column, sample, _OUT * row, _OUT * column, 1)
        self._gathered.copy_(image.as_strided(self._gathered.shape, strides))
        torch.mm(_T.b, self._gathered_rows, out=self._half_in)
        torch.bmm(_T.b_each, self._half_in_each, out=self._values_each)
        torch.bmm(self._values, self._weights, out=self._products)
        torch.mm(_T.a, self._products_rows, out=self._half_out)
        torch.bmm(_T.a_each, self._half_out_each, out=self._out)
        if not self._pool:
            return self._out.view(_OUT, _OUT, *self._tiles)
        torch.ge(*self._out_columns, out=self._left)
        torch.maximum(*self._out_columns, out=self._largest)
        torch.ge(*self._largest_rows, out=self._upper)
        return torch.maximum(*self._largest_rows, out=self._pooled).view(2, 2, *self._tiles)

    def backward(self, d: torch.Tensor, keep: float) -> None:
        if self._pool:
            pooled = self._pooled
            pooled.view(2, 2, *self._tiles).copy_(d)
            (upper, lower), (left, right) = self._largest_rows, self._out_columns
            torch.mul(pooled, self._upper, out=upper)
            torch.sub(pooled, upper, out=lower)
            torch.mul(self._largest, self._left, out=left)
            torch.sub(self._largest, left, out=right)
        else:
            self._out.view(_OUT, _OUT, *self._tiles).copy_(d)
        torch.bmm(_T.a_back_each, self._out, out=self._half_out_each)
        torch.mm(_T.a_back, self._half_out, out=self._products_rows)
        values, gradient = self._values.transpose(1, 2), self._gradient
        torch.baddbmm(gradient, values, self._products, beta=keep, out=gradient)
        if self._first:
            return
        half = self._half_in_each.view(36, *self._values.shape[1:])
        torch.bmm(self._products, self._weights.transpose(1, 2), out=half)
        torch.bmm(_T.b_back_each, self._half_in_each, out=self._values_each)
        torch.mm(_T.b_back, self._values_each.view(_IN, -1), out=self._gathered_rows)
        self._back.zero_()
        for number, (target, part) in enumerate(self._fold):
            target.add_(part) if number else target.copy_(part)
