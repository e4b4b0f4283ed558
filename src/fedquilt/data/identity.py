"""Whether two sets of samples are the same, and whether clients share any."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.data.holdings import Holdings

_AT_ONCE = 1 << 24


def salted_digest(samples: Any, salt: bytes) -> str:
    """Return a digest of what samples hold: tensors, or lists and mappings of them.

    Shape, type and every bit count.  The salt (at most 64 bytes) keys the digest: somebody
    who sees it without the salt cannot test a guess of the data against it.
    """
    digest = hashlib.blake2b(key=salt, digest_size=32)
    for place, tensor in _leaves(samples, ""):
        digest.update(f"{place}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            for piece in torch.split(flat.view(torch.uint8), _AT_ONCE):
                digest.update(piece.cpu().numpy().data)
    return digest.hexdigest()


def _leaves(samples: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree with where they hang, in an order of its own."""
    if isinstance(samples, Mapping):
        for key in sorted(samples, key=str):
            yield from _leaves(samples[key], f"{place}/{key}")
    elif isinstance(samples, (list, tuple)):
        for number, item in enumerate(samples):
            yield from _leaves(item, f"{place}/{number}")
    else:
        yield place, torch.as_tensor(samples)


def shared_sample(clients: Sequence[NDArray[np.int64]]) -> tuple[int, int, int] | None:
    """Return a sample that two clients hold, and these two; None when there is none."""
    held = clients if isinstance(clients, Holdings) else Holdings(clients)
    samples, owners = held.numbers_and_owners()
    if np.unique(samples).size == samples.size:
        return None
    order = np.argsort(samples, kind="stable")
    samples, owners = samples[order], owners[order]
    # Twice at one client is nobody else's.
    twice = np.flatnonzero((np.diff(samples) == 0) & (np.diff(owners) != 0))
    if not twice.size:
        return None
    place = int(twice[0])
    return int(samples[place]), int(owners[place]), int(owners[place + 1])
