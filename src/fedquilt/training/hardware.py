"""The machine that clients train on: cores, freed memory, counted operations, GPU streams.

A number that is fetched from a GPU waits for everything queued before it in the same stream.
While clients train there, the host can finish the last round's records if its reads go through
a side stream, which waits only for the event the records are about.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Parameters of mallopt(3), and their defaults in glibc.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Let glibc keep large freed blocks for the next use instead of giving them back.

    Activations of megabytes come and go with every layer.  glibc maps large blocks anew and
    unmaps them when they are freed, so that all their pages are cleared again each time.
    Yields whether it could be done; elsewhere than on glibc nothing happens.  Afterwards the
    defaults are back, and what is free is given back.
    """
    if not keep_freed_memory():
        yield False
        return
    try:
        yield True
    finally:
        keep_freed_memory(False)


def keep_freed_memory(wanted: bool = True) -> bool:
    """Let glibc keep freed memory from now on, or no longer; return whether it could be done."""
    libc = _glibc()
    if libc is None:
        return False
    for name, value in (_KEEPING if wanted else _DEFAULTS).items():
        libc.mallopt(name, value)
    if not wanted:
        libc.malloc_trim(0)
    return True


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018 (other C libraries have no such function)
    except (OSError, AttributeError):
        return None
    return libc


def warm_up_gpu(name: str) -> None:
    """Start a GPU and its compiler in the background, while data are read.

    Errors are raised where the device is used.
    """
    if name.startswith("cuda") or name == "auto":
        threading.Thread(target=_warm_up, name="warm up the GPU", daemon=True).start()


def _warm_up() -> None:
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            image = torch.ones(1, 1, 4, 4, device="cuda")
            torch.nn.functional.conv2d(image, image)  # loads the libraries of layers
            from triton.runtime.cache import triton_key

            triton_key()  # reads all of Triton, once in a process


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all that is queued so far; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def on_side_stream(since: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Run on a stream of its own that waits for an event, and not for what was queued after it.

    What is read within must not be changed by what was queued after the event.
    """
    if since is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(since)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


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
    `torch.utils.flop_counter` counts the same, and loads torch's compiler to do so: some 900
    modules, more than a second.
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
