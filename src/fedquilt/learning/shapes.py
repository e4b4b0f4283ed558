"""Which shapes of a program of many clients give each of them the same update, bit by bit.

A kernel may add up in another order when there are more or fewer rows beside a client's
(the clients still training) or a wider batch (the largest of theirs): how much data other
clients hold would then show in its update.  On a GPU such differences reach a thousandth.
A step therefore runs in the full shape, [clients of the group, batch size], which is
public, unless a smaller one was seen on this device to give the very same bits.  Seen: one
step of made-up samples in both shapes.  Kernels that differ at all differ somewhere on a
few thousand random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedquilt.learning.engine import public_inputs
from fedquilt.learning.stack import Batch, ModelStack

_FEWEST_ROWS = 4
_NARROWEST = 4
_BIT_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ProgramShapes:
    """The shapes in which a stack of models was seen to compute alike."""

    def __init__(self, stack: ModelStack) -> None:
        self._stack = stack
        self._prints: dict[tuple[int, int, int, int, int, bool], torch.Tensor] = {}
        self._fits: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def fit(self, active: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the smallest shape that holds active x width and computes as the full one.

        The full shape is rows x columns.
        """
        key = (active, width, rows, columns)
        if key not in self._fits:
            alike = (
                shape
                for shape in smaller_shapes(active, width, rows, columns)
                if self._is_alike(shape, rows, columns)
            )
            self._fits[key] = next(alike, (rows, columns))
        return self._fits[key]

    def rows_are_alike(self, rows: int, columns: int) -> bool:
        """Tell whether a client's update is the same in every row of the full shape."""
        upright = self._print(rows, columns, rows, columns, columns)
        turned = self._print(rows, columns, rows, columns, columns, turned=True)
        return torch.equal(upright.flip(0), turned)

    def _is_alike(self, shape: tuple[int, int], rows: int, columns: int) -> bool:
        count, width = shape
        full = self._print(rows, columns, rows, columns, width)
        return torch.equal(full[:count], self._print(count, width, rows, columns, width))

    def _print(
        self, count: int, width: int, rows: int, columns: int, longest: int, turned: bool = False
    ) -> torch.Tensor:
        """Return a fingerprint of what each of the first `count` clients computes."""
        key = (count, width, rows, columns, longest, turned)
        if key not in self._prints:
            self._prints[key] = self._compute(*key)
        return self._prints[key]

    def _compute(
        self, count: int, width: int, rows: int, columns: int, longest: int, turned: bool
    ) -> torch.Tensor:
        """Run one step of made-up clients, whose batches hold 1 to `longest` samples."""
        stack = self._stack
        device = stack.flat.vector.device
        random = torch.Generator().manual_seed(rows)
        lengths = torch.randint(1, longest + 1, (rows, 1), generator=random)
        shares = (torch.arange(columns) < lengths) / lengths
        like = stack.public.inputs
        inputs = public_inputs(like, rows * columns, seed=columns)
        inputs = inputs.view(rows, columns, *like.shape[1:])
        targets = stack.public.targets.new_zeros(rows, columns, *stack.public.targets.shape[1:])
        weights = [
            tensor + 0.05 * torch.randn(tensor.shape, generator=random).to(tensor)
            for tensor in stack.spread(stack.flat.vector, rows)
        ]
        bits = stack.trial_bits(rows, columns)
        order = torch.arange(rows).flip(0) if turned else torch.arange(rows)
        order = order[:count].to(device)
        leaves = [tensor[order].requires_grad_() for tensor in weights]
        batch = Batch(
            inputs[order, :width], targets[order, :width], [part[order, :width] for part in bits]
        )
        stack.reset()
        losses = stack.losses(leaves, batch) * shares.to(device)[order, :width]
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        return fingerprint([losses.detach().sum(1), *(g for g in gradients if g is not None)])


@torch.no_grad()
def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one number for each row and tensor that follows from all of the row's bits."""
    columns = []
    for tensor in tensors:
        bits = tensor.reshape(len(tensor), -1).contiguous().view(_BIT_TYPES[tensor.element_size()])
        odd = torch.arange(bits.shape[1], device=bits.device) * 0x9E3779B1 | 1
        columns.append((bits.to(torch.int64) * odd).sum(1))
    return torch.stack(columns, 1)


def smaller_shapes(active: int, width: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield shapes below rows x columns that hold active x width, small ones first.

    Rows in steps of an eighth, widths in halves: few enough to be tried, and little waste.
    """
    widths = [columns]
    while widths[-1] // 2 >= max(width, _NARROWEST):
        widths.append(widths[-1] // 2)
    for narrow in reversed(widths):
        for count in _row_steps(active, rows):
            if (count, narrow) != (rows, columns):
                yield count, narrow


def _row_steps(active: int, rows: int) -> Iterator[int]:
    count = max(active, min(_FEWEST_ROWS, rows))
    while count < rows:
        step = max(1, 2 ** (count.bit_length() - 4))
        count = -(-count // step) * step
        if count < rows:
            yield count
        count += step
    yield rows
