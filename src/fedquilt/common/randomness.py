"""Seeded generators, one for each purpose, none of them global.

Every stream is a function of (seed, purpose, keys) alone: round 7 of client 12
draws the same numbers whichever rounds ran before it in this process, on
whichever engine.  That is what makes a resumed run equal an uninterrupted one.

Noise that must stay secret, and secret coins, draw `secret_bytes`: the one place where the
package asks the operating system for randomness that a release depends on.
"""

from __future__ import annotations

import os
import zlib

import numpy as np


def secret_bytes(size: int) -> bytes:
    """Return bytes of the operating system's generator.

    All noise and all secret coins come from here and from nowhere else, so that an audit
    can hold them still (`fedquilt.audit.cases.known_entropy`) without knowing who draws.
    """
    return os.urandom(size)


def _sequence(seed: int, purpose: str, keys: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *keys))


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return the generator of a purpose, for example ("select", round)."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, keys)))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """Return a 63-bit seed for a torch generator of a purpose."""
    return int(_sequence(seed, purpose, keys).generate_state(1, np.uint64)[0]) >> 1
