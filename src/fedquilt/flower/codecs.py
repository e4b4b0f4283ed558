"""Updates in fewer bytes.

| name | what travels | bytes a number |
|---|---|---|
| `none` | float32 (float64 where the model is) | 4 |
| `bf16` | the upper half of float32, rounded to nearest even | 2 |
| `int8` | stochastic quantisation: x = s q / 127, E[q] = 127 x / s, s the largest of a block | 1 |
| `topk` | the k entries of largest size, with their places (Stich et al. 2018) | 8 k / n |

Rounding may lengthen a vector.  The bound of a claim does not depend on that: the server
clips what it has decoded, and never trusts a clip of the client's.

`topk` keeps at the client what it did not send and adds it to the next update (error
feedback, Karimireddy et al. 2019).  What a client sends still follows from its own data and
earlier releases alone, and is clipped in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError

Arrays = dict[str, NDArray[Any]]
_BLOCK = 2048
_LEVELS = 127


class UnreadableError(ValueError):
    """Arrays are not what their codec makes; says in which way."""


def encode(
    name: str, vector: torch.Tensor, seed: int, share: float = 0.1
) -> tuple[Arrays, torch.Tensor]:
    """Return the arrays of an update, and the vector that the server will read from them."""
    if name == "none":
        return {"vector": vector.detach().cpu().numpy()}, vector
    plain = vector.detach().cpu().to(torch.float32)
    arrays = _ENCODERS[name](plain, seed, share)
    return arrays, decode(name, arrays, plain.numel(), torch.float32).to(vector)


def decode(
    name: str, arrays: Mapping[str, NDArray[Any]], size: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the vector of `size` numbers that arrays stand for; raise `UnreadableError`.

    None for the size: as many as there are, which only `none` can say.
    """
    if size is None:
        arrays = {"vector": np.zeros(0, np.float32), **arrays}
        return _plain(arrays, len(arrays["vector"])).to(dtype)
    if name not in _DECODERS:
        raise InvalidValueError(
            f"compression={name!r} must be one of {', '.join(map(repr, _DECODERS))}"
        )
    return _DECODERS[name](arrays, size).to(dtype)


def _array(
    arrays: Mapping[str, NDArray[Any]], name: str, kind: str, size: int | None
) -> NDArray[Any]:
    """Return one of the arrays when it has the type and the length that it must have."""
    if name not in arrays:
        raise UnreadableError(f"array {name!r} is missing")
    array = arrays[name]
    if array.dtype != np.dtype(kind):
        raise UnreadableError(f"array {name!r} of type {array.dtype} must be {kind}")
    if array.ndim != 1 or (size is not None and len(array) != size):
        raise UnreadableError(f"array {name!r} of shape {array.shape} must be ({size},)")
    return array


def _plain(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    array = arrays.get("vector")
    kind = "float64" if array is not None and array.dtype == np.float64 else "float32"
    return torch.from_numpy(_array(arrays, "vector", kind, size).copy())


def _to_bf16(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    return {"bf16": vector.to(torch.bfloat16).view(torch.int16).numpy()}


def _from_bf16(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    bits = torch.from_numpy(_array(arrays, "bf16", "int16", size).copy())
    return bits.view(torch.bfloat16).to(torch.float32)


def _to_int8(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    """Round up or down by a coin: without bias, and at most one level off."""
    blocks = torch.nn.functional.pad(vector, (0, -len(vector) % _BLOCK)).view(-1, _BLOCK)
    scale = blocks.abs().amax(dim=1)
    source = torch.Generator().manual_seed(seed)
    unit = torch.where(scale > 0, _LEVELS / scale, 0.0)[:, None]
    levels = torch.floor(blocks * unit + torch.rand(blocks.shape, generator=source))
    levels = torch.nan_to_num(levels).clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return {"int8": levels.flatten()[: len(vector)].numpy(), "scale": scale.numpy()}


def _from_int8(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    levels = torch.from_numpy(_array(arrays, "int8", "int8", size).copy()).to(torch.float32)
    scale = torch.from_numpy(_array(arrays, "scale", "float32", -(-size // _BLOCK)).copy())
    return levels * (scale / _LEVELS).repeat_interleave(_BLOCK)[:size]


def _to_topk(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    count = max(1, round(share * len(vector)))
    index = torch.topk(vector.abs(), count).indices.sort().values
    return {"index": index.to(torch.int32).numpy(), "value": vector[index].numpy()}


def _from_topk(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    index = torch.from_numpy(_array(arrays, "index", "int32", None).copy()).to(torch.int64)
    value = torch.from_numpy(_array(arrays, "value", "float32", len(index)).copy())
    inside = bool(((index >= 0) & (index < size)).all()) and bool((index.diff() > 0).all())
    if not inside:
        raise UnreadableError("places must ascend within the vector")
    vector = torch.zeros(size)
    vector[index] = value
    return vector


_ENCODERS: dict[str, Callable[[torch.Tensor, int, float], Arrays]] = {
    "bf16": _to_bf16,
    "int8": _to_int8,
    "topk": _to_topk,
}
_DECODERS: dict[str, Callable[[Mapping[str, NDArray[Any]], int], torch.Tensor]] = {
    "none": _plain,
    "bf16": _from_bf16,
    "int8": _from_int8,
    "topk": _from_topk,
}
