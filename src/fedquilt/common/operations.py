"""How many operations a model takes: counted where torch dispatches them.

`torch.utils.flop_counter` counts the same, and loads torch's compiler (some 900 modules, more
than a second) to do so; the products of usual networks are counted here without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoCompilerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose code is never compiled, so that torch need not load its compiler to say so."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap the mode in what keeps the compiler away from it."""
        return False


class OperationCount(NoCompilerMode):
    """Counts the operations of matrix products, convolutions and attention within it.

    A product of [n, k] and [k, m] takes 2 n k m operations: each term is multiplied and added.
    Element-wise work does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call as it is and count what it took."""
        out = func(*args, **(kwargs or {}))
        counted = _COUNTS.get(func._overloadpacket)
        if counted is not None:
            self.total += counted(args, out)
        elif any(part in str(func) for part in _RARE):
            self.total += _as_torch_counts(func, args, kwargs or {}, out)
        return out


def _product(first: int) -> Callable[[Any, Any], int]:
    """Return the count of a product whose left matrix is the argument number `first`."""
    return lambda args, out: 2 * out.numel() * int(args[first].shape[-1])


def _convolution(args: Any, out: torch.Tensor) -> int:
    """Count each value of the output as a product with one filter; transposed, of the input."""
    inputs, weight, transposed = args[0], args[1], args[6]
    places = inputs if transposed else out
    return int(2 * places.numel() * math.prod(weight.shape[1:]))


def _attention(args: Any, out: Any) -> int:
    """Count the product of queries and keys, and that of their weights and the values."""
    return 2 * int((args[0].numel() + out[0].numel()) * args[1].shape[-2])


_ATEN = torch.ops.aten
_COUNTS: dict[Any, Callable[[Any, Any], int]] = {
    _ATEN.mm: _product(0),
    _ATEN.bmm: _product(0),
    _ATEN.addmm: _product(1),
    _ATEN.baddbmm: _product(1),
    _ATEN.convolution: _convolution,
    # Torch's counter knows the ways of a GPU only.
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
}
_RARE = ("attention", "_mm", "conv")
"""What the names of other calls that torch can count hold."""


def _as_torch_counts(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
