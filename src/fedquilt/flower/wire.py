"""Orders and replies, as the records that Flower carries, and updates in fewer bytes.

An order says which client of the run a node is, what to compute, and a random token.  The
reply returns the token: Flower checks the key behind a request, but not that the node of
the key is the one whose answer it claims to be.

Vectors are sent as raw little-endian numbers of an allowed type.  Nothing that arrives is
unpickled or evaluated, and its size is compared before it is read.

| compression | what travels | bytes a number |
|---|---|---|
| `none` | float32 (float64 where the model is) | 4 |
| `bf16` | the upper half of float32, rounded to nearest even | 2 |
| `int8` | stochastic quantisation: x = s q / 127, E[q] = 127 x / s, s the largest of a block | 1 |
| `topk` | the k entries of largest size, with their places (Stich et al. 2018) | 8 k / n |

Rounding may lengthen a vector.  The bound of a claim does not depend on that: the server
clips what it has decompressed, and never trusts a clip of the client's.

`topk` keeps at the client what it did not send and adds it to the next update (error
feedback, Karimireddy et al. 2019).  What a client sends still follows from its own data and
earlier releases alone, and is clipped in every round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedquilt import __version__
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import RunConfig, plain_config
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.slices.selection import is_table, one_for_each

_RAW = "fedquilt.raw"
_TYPES = ("float32", "float64", "int8", "int16", "int32")
_MOST_ARRAYS = 4


@dataclass(frozen=True)
class Order:
    """What a node is asked to do: the facts of one client's part of a round.

    `size` is how many numbers it shall send; 0: as many as it has.
    """

    token: str
    round_index: int
    client: int
    num_clients: int
    learning_rate: float
    settings: str
    frozen: str
    compression: str
    topk: float
    monitor: bool
    size: int = 0
    version: str = __version__


@dataclass(frozen=True, eq=False)
class Reply:
    """What a node answered, as it arrived: nothing in it has been checked but its form."""

    token: str
    failed: bool
    arrays: Arrays
    num_examples: int | None
    loss: float | None
    monitor: dict[str, float]


def settings_text(config: RunConfig, widths: Sequence[Fraction] | None = None) -> str:
    """Return what clients must know of a configuration: options that differ from the usual.

    Only options that are declared with `Flag.NODES` are among them.  Clients are told the
    `widths` of a table of tiers, not where it lies on the server's disk.
    """
    # What is usual differs by kind of run, so these are always said.
    kind = {"mode": config.mode, "method": config.method}
    usual = read_settings(json.dumps(kind)).as_dict()
    told = config.as_dict()
    if is_table(config.tiers):
        told["tiers"] = usual["tiers"] if widths is None else one_for_each(widths)
    chosen = {
        name: told[name]
        for name in option_names(Flag.NODES, type(config))
        if told[name] != usual[name]
    }
    return json.dumps({**chosen, **kind}, sort_keys=True)


def read_settings(text: str) -> RunConfig:
    """Read what `settings_text` wrote."""
    return plain_config({"dataset": "custom", "model": "custom", **json.loads(text)})


def pack_order(order: Order, vector: Array | None) -> RecordDict:
    """Return an order as the content of a message; `vector` may be shared by many."""
    facts = {field.name: getattr(order, field.name) for field in fields(order)}
    content = RecordDict({"config": ConfigRecord(facts)})
    if vector is not None:
        content["arrays"] = ArrayRecord({"vector": vector})
    return content


def unpack_order(content: RecordDict) -> tuple[Order, torch.Tensor]:
    """Read what `pack_order` wrote, on the node."""
    facts = dict(content["config"])
    if facts.get("version") != __version__:
        raise InvalidValueError(
            f"fedquilt of the server is {facts.get('version')!r} and must be {__version__!r}, "
            "as on this node"
        )
    arrays = read_arrays(content.array_records.get("arrays", ArrayRecord()), 1 << 40)
    vector = torch.from_numpy(arrays["vector"].copy()) if "vector" in arrays else torch.zeros(0)
    return Order(**facts), vector  # type: ignore[arg-type]


def pack_reply(
    token: str,
    arrays: Arrays | None,
    *,
    num_examples: int | None = None,
    loss: float | None = None,
    monitor: Mapping[str, float] | None = None,
) -> RecordDict:
    """Return a reply; None for the arrays: the node failed, and says no more about it."""
    content = RecordDict({"config": ConfigRecord({"token": token, "failed": arrays is None})})
    if arrays is not None:
        # An empty array has no place in a message; that it is missing says the same.
        full = {name: as_array(array) for name, array in arrays.items() if len(array)}
        content["arrays"] = ArrayRecord(full)
    metrics: dict[str, Any] = {} if num_examples is None else {"num-examples": num_examples}
    if loss is not None and np.isfinite(loss):
        metrics["loss"] = loss
    if metrics:
        content["metrics"] = MetricRecord(metrics)
    if monitor:
        content["monitor"] = MetricRecord({name: float(x) for name, x in monitor.items()})
    return content


def unpack_reply(content: RecordDict, limit: int) -> Reply:
    """Read a reply of at most `limit` bytes of arrays; raise `UnreadableError` or a misfit's own.

    It was written by a node: whatever is in it may be wrong.
    """
    config = content.config_records.get("config", ConfigRecord())
    metrics = content.metric_records.get("metrics", MetricRecord())
    count, loss = metrics.get("num-examples"), metrics.get("loss")
    if count is not None and not (type(count) is int and 0 <= count < 2**31):
        raise UnreadableError(f"num-examples={count!r} must be a whole number")
    readings = content.metric_records.get("monitor", MetricRecord())
    return Reply(
        token=str(config.get("token", "")),
        failed=config.get("failed") is True,
        arrays=read_arrays(content.array_records.get("arrays", ArrayRecord()), limit),
        num_examples=count,
        loss=loss if isinstance(loss, float) else None,
        monitor={
            str(name)[:40]: value
            for name, value in list(readings.items())[:16]
            if isinstance(value, float) and np.isfinite(value)
        },
    )


def reply_token(content: RecordDict) -> str:
    """Return the token of a reply without looking at anything else in it."""
    return str(content.config_records.get("config", ConfigRecord()).get("token", ""))


def as_array(array: NDArray[Any]) -> Array:
    """Return a vector as Flower's array of raw little-endian numbers."""
    raw = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return Array(str(array.dtype), tuple(array.shape), _RAW, raw.tobytes())


def read_arrays(record: ArrayRecord, limit: int) -> Arrays:
    """Return the arrays of a record; raise `UnreadableError` for what is none or too much."""
    if len(record) > _MOST_ARRAYS:
        raise UnreadableError(f"{len(record)} arrays must be at most {_MOST_ARRAYS}")
    size = sum(len(array.data) for array in record.values())
    if size > limit:
        raise UnreadableError(f"{size} bytes must be at most {limit}")
    return {name: _numbers(name, array) for name, array in record.items()}


def _numbers(name: str, array: Array) -> NDArray[Any]:
    if array.stype != _RAW or array.dtype not in _TYPES or len(array.shape) != 1:
        raise UnreadableError(f"array {name[:40]!r} must be a vector of raw numbers")
    kind = np.dtype(array.dtype).newbyteorder("<")
    if len(array.data) != array.shape[0] * kind.itemsize:
        raise UnreadableError(f"array {name[:40]!r} must hold as many bytes as its shape says")
    return np.frombuffer(array.data, dtype=kind).astype(np.dtype(array.dtype), copy=False)


Arrays = dict[str, NDArray[Any]]
_BLOCK = 2048
_LEVELS = 127


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


_COMPRESSORS: dict[str, Callable[[torch.Tensor, int, float], Arrays]] = {
    "bf16": _to_bf16,
    "int8": _to_int8,
    "topk": _to_topk,
}
_DECOMPRESSORS: dict[str, Callable[[Mapping[str, NDArray[Any]], int], torch.Tensor]] = {
    "none": _plain,
    "bf16": _from_bf16,
    "int8": _from_int8,
    "topk": _from_topk,
}
