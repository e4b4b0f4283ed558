"""Updates in fewer bytes: how they are written, read again, and what clients keep back.

| compression | what travels | bytes a number | error feedback |
|---|---|---|---|
| `none` | float32 (float64 where the model is) | 4 | |
| `bf16` | the upper half of float32, rounded to nearest even | 2 | no |
| `int8` | stochastic rounding: x = s q / 127, E[q] = 127 x / s, s the largest of a block | 1 | no |
| `qsgd` | the same with 7 levels of the length of 512 numbers (Alistarh et al. 2017) | 0.51 | no |
| `sign` | signs, and the mean size (Bernstein et al. 2018, Karimireddy et al. 2019) | 1 / 8 | yes |
| `topk` | the k entries of largest size, with their places (Stich et al. 2018) | 8 k / n | yes |
| `randomk` | k entries whose places a seed draws, and the seed (the same) | 4 k / n | yes |
| `ternary` | places, signs, mean size of the k largest (Sattler et al. 2019) | 4.1 k / n | yes |

Their lengths follow from the shape of what is sent, never from what is in it.

Rounding may lengthen a vector.  The bound of a claim does not depend on that: the server
clips what it has decompressed, and never trusts a clip of the client's.

Error feedback keeps at the client what it did not send and adds it to the next update
(Karimireddy et al. 2019).  What a client sends still follows from its own data, a public seed and
earlier releases alone, and is clipped in every round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.training.task import ClientIds, ClientUpdate, ClientVectors, Engine, WrappedEngine

Arrays = dict[str, NDArray[Any]]
ERROR_FEEDBACK = ("topk", "randomk", "sign", "ternary")
"""Compressions that keep back what they did not send; the others are without bias."""
_BLOCK = 2048
_LEVELS = 127
_BUCKET, _STEPS = 512, 7


class UnreadableError(ValueError):
    """Arrays are not what their compression makes; says in which way."""


def compress(
    name: str, vector: torch.Tensor, seed: int, share: float = 0.1
) -> tuple[Arrays, torch.Tensor]:
    """Return the arrays of an update, and the vector that the server will read from them."""
    if name == "none":
        return {"vector": vector.detach().cpu().numpy()}, vector
    plain = vector.detach().cpu().to(torch.float32)
    arrays = _COMPRESSORS[name](plain, seed, share)
    return arrays, decompress(name, arrays, plain.numel(), torch.float32).to(vector)


def decompress(
    name: str, arrays: Mapping[str, NDArray[Any]], size: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the vector of `size` numbers that arrays stand for; raise `UnreadableError`.

    None for the size: as many as there are, which only `none` can say.
    """
    if size is None:
        arrays = {"vector": np.zeros(0, np.float32), **arrays}
        return _plain(arrays, len(arrays["vector"])).to(dtype)
    if name not in _DECOMPRESSORS:
        raise InvalidValueError(
            f"compression={name!r} must be one of {', '.join(map(repr, _DECOMPRESSORS))}"
        )
    return _DECOMPRESSORS[name](arrays, size).to(dtype)


def bounded(name: str, arrays: Arrays, size: int | None, limit: float) -> Arrays:
    """Return arrays whose vector has at most the norm `limit`; zeros for one that is not finite.

    Every compression is linear in one of its arrays, so that one is scaled.  Rounding it again
    (to bfloat16, 8 bits) adds at most 2^-8 of a number, which is taken off first.
    """
    vector = decompress(name, arrays, size, torch.float64)
    length = float(torch.linalg.vector_norm(vector))
    if length <= limit:
        return arrays
    key = {"none": "vector", "bf16": "bf16", "topk": "value", "randomk": "value"}.get(name, "scale")
    factor = limit / length * (1 - 2**-7 if name == "bf16" else 1 - 2**-20)
    if not np.isfinite(length):
        return {**arrays, key: np.zeros_like(arrays[key])}
    if name == "bf16":
        return _to_bf16((vector * factor).to(torch.float32), 0, 1.0)
    return {**arrays, key: (arrays[key].astype(np.float64) * factor).astype(arrays[key].dtype)}


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
    index = _places(arrays, size)
    value = torch.from_numpy(_array(arrays, "value", "float32", len(index)).copy())
    return torch.zeros(size).index_copy(0, index, value)


def _places(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    index = torch.from_numpy(_array(arrays, "index", "int32", None).copy()).to(torch.int64)
    inside = bool(((index >= 0) & (index < size)).all()) and bool((index.diff() > 0).all())
    if not inside:
        raise UnreadableError("places must ascend within the vector")
    return index


def _to_randomk(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    seed %= 2**31
    index = _drawn(seed, max(1, round(share * len(vector))), len(vector))
    return {"seed": np.asarray([seed], np.int32), "value": vector[index].numpy()}


def _from_randomk(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    value = torch.from_numpy(_array(arrays, "value", "float32", None).copy())
    (seed,) = _array(arrays, "seed", "int32", 1).tolist()
    if len(value) > size or seed < 0:
        raise UnreadableError(f"{len(value)} numbers must be at most {size}, drawn by a seed >= 0")
    return torch.zeros(size).index_copy(0, _drawn(seed, len(value), size), value)


def _drawn(seed: int, count: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count]


def _to_qsgd(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    """Round |x| / |bucket| up or down to one of 7 levels by a coin; 4 bits a number."""
    buckets = torch.nn.functional.pad(vector, (0, -len(vector) % _BUCKET)).view(-1, _BUCKET)
    scale = torch.linalg.vector_norm(buckets, dim=1)
    source = torch.Generator().manual_seed(seed)
    unit = torch.where(scale > 0, _STEPS / scale, 0.0)[:, None]
    levels = torch.floor(buckets.abs() * unit + torch.rand(buckets.shape, generator=source))
    codes = torch.nan_to_num(levels).clamp(0, _STEPS).to(torch.uint8)
    codes |= (buckets < 0).to(torch.uint8) << 3
    codes = torch.nn.functional.pad(codes.flatten()[: len(vector)], (0, len(vector) % 2))
    packed = codes[0::2] | (codes[1::2] << 4)
    return {"qsgd": packed.numpy().view(np.int8), "scale": scale.numpy()}


def _from_qsgd(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    packed = _array(arrays, "qsgd", "int8", -(-size // 2)).view(np.uint8)
    scale = torch.from_numpy(_array(arrays, "scale", "float32", -(-size // _BUCKET)).copy())
    codes = torch.from_numpy(np.stack([packed & 15, packed >> 4], axis=1).ravel()[:size].copy())
    levels = (codes & 7).to(torch.float32) * torch.where(codes > 7, -1.0, 1.0)
    return levels * (scale / _STEPS).repeat_interleave(_BUCKET)[:size]


def _to_sign(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    return {"sign": _bits(vector), "scale": _mean_size(vector)}


def _from_sign(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    return _signs(arrays, size) * float(_array(arrays, "scale", "float32", 1)[0])


def _to_ternary(vector: torch.Tensor, seed: int, share: float) -> Arrays:
    largest = _to_topk(vector, seed, share)
    value = torch.from_numpy(largest["value"])
    return {"index": largest["index"], "sign": _bits(value), "scale": _mean_size(value)}


def _from_ternary(arrays: Mapping[str, NDArray[Any]], size: int) -> torch.Tensor:
    index = _places(arrays, size)
    return torch.zeros(size).index_copy(0, index, _from_sign(arrays, len(index)))


def _mean_size(vector: torch.Tensor) -> NDArray[Any]:
    return vector.abs().mean().reshape(1).numpy()


def _bits(vector: torch.Tensor) -> NDArray[Any]:
    """Return the signs of numbers, eight in a byte."""
    return np.packbits((vector < 0).numpy()).view(np.int8)


def _signs(arrays: Mapping[str, NDArray[Any]], count: int) -> torch.Tensor:
    bits = _array(arrays, "sign", "int8", -(-count // 8)).view(np.uint8)
    return 1.0 - 2.0 * torch.from_numpy(np.unpackbits(bits, count=count).astype(np.float32))


_COMPRESSORS: dict[str, Callable[[torch.Tensor, int, float], Arrays]] = {
    "bf16": _to_bf16,
    "int8": _to_int8,
    "topk": _to_topk,
    "randomk": _to_randomk,
    "qsgd": _to_qsgd,
    "sign": _to_sign,
    "ternary": _to_ternary,
}
_DECOMPRESSORS: dict[str, Callable[[Mapping[str, NDArray[Any]], int], torch.Tensor]] = {
    "none": _plain,
    "bf16": _from_bf16,
    "int8": _from_int8,
    "topk": _from_topk,
    "randomk": _from_randomk,
    "qsgd": _from_qsgd,
    "sign": _from_sign,
    "ternary": _from_ternary,
}


def sent_bytes(name: str, size: int, share: float) -> int:
    """Return how many bytes an update of so many numbers takes, whatever is in it."""
    return sum(array.nbytes for array in compress(name, torch.zeros(size), 0, share)[0].values())


class CompressedEngine(WrappedEngine):
    """An engine whose updates arrive as the server would read them from a message.

    Parameters
    ----------
    engine : Engine
        Who trains.
    name, share
        The compression, and of how large a part of the numbers.
    num_clients : int
        Of the federation, for each of whom error feedback keeps a vector.
    sent : tensor of bool
        Which numbers of an update travel; the others arrive as zero.
    seed : int
        The run's, from which coins and places are drawn: they are public.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        share: float,
        num_clients: int,
        sent: torch.Tensor,
        seed: int,
    ) -> None:
        self._engine, self._name, self._share, self._seed = engine, name, share, seed
        self._sent = sent
        self.kept: ClientVectors | None = None
        if name in ERROR_FEEDBACK:
            self.kept = ClientVectors(f"compression={name!r}", num_clients, int(sent.sum()))

    starts_early = property(lambda self: self._engine.starts_early)

    def lend_updates(self) -> None:
        """Let updates lie in lent memory: what is read again has its own."""
        self._engine.lend_updates()

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield each client's update as it arrives."""
        updates = self._engine.train(start, cohort, round_index, learning_rate)
        return (self._arrived(update, round_index) for update in updates)

    def _arrived(self, update: ClientUpdate, round_index: int) -> ClientUpdate:
        seed = torch_seed(self._seed, "compression", round_index, update.client)
        delta = update.delta[self._sent]
        residual = None if self.kept is None else self.kept.get(update.client)
        if residual is not None:
            delta = delta + residual
        read = compress(self._name, delta, seed, self._share)[1]
        if self.kept is not None:
            self.kept.put(update.client, delta - read)
        arrived = torch.zeros_like(update.delta)
        arrived[self._sent] = read
        return dataclasses.replace(update, delta=arrived)
