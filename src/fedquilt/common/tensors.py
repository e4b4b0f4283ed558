"""Tensors as a file of safetensors, written from where they lie.

The library's own `save` holds all tensors a second time, as bytes, and a third time in one
piece.  The format is a length, a header in JSON and the bytes of each tensor
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedquilt.common.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

# The format's names of torch's types, where they are not the first letter and the bits.
_NAMES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_PLAIN = re.compile(r"([fiuc])(?:loat|nt|int|omplex)(8|16|32|64)")
_ALIGNED = 8


def as_safetensors(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the parts of a file that holds these tensors, for `storage.write_file`.

    Wide types come first, so that every tensor begins where its type wants it to.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in ordered:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _type_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNED) * _ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        yield _bytes_of(tensors[name])


def _type_name(name: str, tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if plain := _PLAIN.fullmatch(kind):
        return plain[1].upper() + plain[2]
    if kind not in _NAMES:
        raise InvalidValueError(f"{name} of type {tensor.dtype} must have a type that can be saved")
    return _NAMES[kind]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in its own memory where it lies in one piece there."""
    import torch

    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
