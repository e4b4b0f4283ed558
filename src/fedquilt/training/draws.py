"""What random layers draw: every client from a stream of its own.

A claim about one client stands on this: what another client sends must be the same
whoever stands beside it.  Dropout in a program of many clients (`torch.func.vmap`)
draws for all of them at once, laid out by the shape of the group, so that one client's
number of samples would change everybody's masks.  Here every number is instead a
function of (client's seed, step, draw of the step, place in the client's own batch),
computed by a counter-based generator: the place is hashed under the key of the draw.
All engines compute the same numbers, bit by bit, in any order and any company.

The hash is the 32-bit finaliser of MurmurHash3 with a second key between its two
multiplications; keys come from SplitMix64 (Steele, Lea and Flood 2014).  It decides
dropout masks, never privacy noise, so it need not be secret.

What is drawn here: `dropout`, `dropout1d`, `dropout2d`, `dropout3d` of
`torch.nn.functional` and the layers made of them, `torch.rand_like`, `torch.randn_like`.
Anything else draws from torch's own generators: the engines that train one client at a
time seed those with the client's seed, and the batched engine refuses the model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedquilt.training.hardware import NoCompilerMode

Bits = Callable[[int, torch.Size, torch.device], torch.Tensor]
"""Returns the int32 bits of a draw of the running step: (number of the draw, shape, device)."""

_GOLDEN = 0x9E3779B97F4A7C15
_SPREAD = np.uint32(0x9E3779B9).astype(np.int32).item()
_FIRST = np.uint32(0x85EBCA6B).astype(np.int32).item()
_SECOND = np.uint32(0xC2B2AE35).astype(np.int32).item()
_MOST_DRAWS = 2**16  # of a step; keys of later steps begin above


def draw_keys(seeds: ArrayLike, step: ArrayLike, draw: int) -> NDArray[np.int32]:
    """Return the two 32-bit keys of a draw, [..., 2], for broadcast seeds and steps."""
    place = np.asarray(step, dtype=np.uint64) * np.uint64(_MOST_DRAWS) + np.uint64(draw)
    mixed = _splitmix(np.asarray(seeds, dtype=np.uint64) ^ _splitmix(place))
    halves = [mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)]
    return np.stack(halves, axis=-1).astype(np.uint32).view(np.int32)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = np.asarray(x + np.uint64(_GOLDEN))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def hashed_bits(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` numbers under each pair of keys, [..., 2] -> [..., count], int32."""
    place = torch.arange(count, dtype=torch.int32, device=keys.device) * _SPREAD
    x = place + keys[..., :1]
    x ^= (x >> 16) & 0xFFFF  # torch shifts the sign in; the mask takes it out again
    x *= _FIRST
    x ^= keys[..., 1:]
    x ^= (x >> 13) & 0x7FFFF
    x *= _SECOND
    x ^= (x >> 16) & 0xFFFF
    return x


def bits_of(seed: int, step: int) -> Bits:
    """Return the bits of a client's step, computed when they are asked for."""

    def bits(draw: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
        keys = torch.from_numpy(draw_keys(seed, step, draw)).to(device)
        return hashed_bits(keys, shape.numel()).view(shape)

    return bits


class ClientDraws(TorchFunctionMode):
    """Within it, random layers draw from `bits`, which is set before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []
        self._bits: Bits | None = None

    def begin(self, bits: Bits) -> None:
        """Begin a step; its draws are counted from zero."""
        self._bits = bits
        self.shapes = []

    def draw(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return the int32 bits of the step's next draw."""
        if self._bits is None:
            raise RuntimeError("begin must be called before a layer draws")
        self.shapes.append(shape)
        return self._bits(len(self.shapes) - 1, shape, device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace torch's random functions; run every other as it is."""
        known = _KNOWN.get(func)
        if known is not None:
            drawn = known(self, *args, **(kwargs or {}))
            if drawn is not None:
                return drawn
        return func(*args, **(kwargs or {}))


class RandomCalls(NoCompilerMode):
    """Counts the calls within it that draw from torch's own generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a random call; run every call as it is."""
        self.count += int(torch.Tag.nondeterministic_seeded in func.tags)
        return func(*args, **(kwargs or {}))


@contextmanager
def own_draws(draws: ClientDraws | None) -> Iterator[None]:
    """Enter the draws of a model that has any; None: it draws nothing, and pays nothing."""
    if draws is None:
        yield
        return
    with draws:
        yield


@contextmanager
def seeded_layers(device: torch.device, seed: int) -> Iterator[None]:
    """Let all global generators draw from `seed`, and put their own state back after.

    Those of torch, and those of Python and NumPy, which a user's layer may use.
    """
    on_gpu = device.type == "cuda"
    cpu_state = torch.get_rng_state()
    gpu_state = torch.cuda.get_rng_state(device) if on_gpu else None
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if on_gpu:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)


def generator_states() -> str:
    """Return the states of the generators of Python and NumPy, to see whether they move."""
    return repr((random.getstate(), np.random.get_state()))


def _dropped(
    draws: ClientDraws, x: torch.Tensor, p: float, shape: torch.Size, inplace: bool
) -> torch.Tensor:
    """Zero a share p and scale the others by 1 / (1 - p), as torch does."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    kept = draws.draw(shape, x.device) >= int(p * 2**32) - 2**31
    mask = kept.to(x.dtype) * (1.0 / (1.0 - p) if p < 1 else 0.0)
    return x.mul_(mask) if inplace else x * mask


def _dropout(
    draws: ClientDraws,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor | None:
    if not training or p == 0 or not _fits(input):
        return None
    return _dropped(draws, input, p, input.shape, inplace)


def _channel_dropout(dims: tuple[int, ...]) -> Callable[..., torch.Tensor | None]:
    """Return dropout of whole channels for inputs of these numbers of dimensions."""

    def dropout(
        draws: ClientDraws,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor | None:
        if not training or p == 0 or not _fits(input) or input.dim() not in dims:
            return None
        shape = torch.Size((*input.shape[:2], *(1,) * (input.dim() - 2)))
        return _dropped(draws, input, p, shape, inplace)

    return dropout


def _rand_like(
    draws: ClientDraws,
    input: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> torch.Tensor | None:
    if not _fits(input) or others:
        return None
    return _uniform(draws, input).to(dtype or input.dtype)


def _randn_like(
    draws: ClientDraws,
    input: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """Draw normal numbers by the transform of Box and Muller (1958) of two uniform ones."""
    if not _fits(input) or others:
        return None
    radius = (-2.0 * torch.log1p(-_uniform(draws, input))).sqrt()
    angle = (2.0 * math.pi) * _uniform(draws, input)
    return (radius * torch.cos(angle)).to(dtype or input.dtype)


def _uniform(draws: ClientDraws, like: torch.Tensor) -> torch.Tensor:
    """Return numbers in [0, 1) of 24 bits, which float32 holds exactly."""
    bits = draws.draw(like.shape, like.device)
    return ((bits >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _fits(x: torch.Tensor) -> bool:
    """Whether x is one number or more of a floating type; a scalar has no place in a batch."""
    return x.is_floating_point() and x.dim() > 0


_KNOWN: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.dropout: _dropout,
    torch.dropout: lambda draws, input, p, train: _dropout(draws, input, p, train),
    functional.dropout1d: _channel_dropout((3,)),
    functional.dropout2d: _channel_dropout((3, 4)),
    functional.dropout3d: _channel_dropout((5,)),
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
}
