"""Secret noise drawn where the model is: ChaCha20 on a GPU, under a key of the operating system.

The operating system's generator gives some 300 MB a second to one thread, and a number takes 16
bytes: 50 million parameters wait three seconds for their noise, a GPU for a small model as long
as a round takes.  So a release on a GPU asks the operating system for a fresh 256-bit key and
expands it there with ChaCha20 (Bernstein 2008; RFC 8439), the cipher that Linux' own generator
expands its keys with.  A key serves one vector and is then forgotten; whoever cannot tell
ChaCha20 from random bits cannot tell this noise from that of `SecretNoise`.

A block of 64 bytes, under the block's number, makes eight standard normal numbers as
`SecretNoise` makes two of 16 bytes (Box and Muller), in float64.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fedquilt.common.randomness import secret_bytes
from fedquilt.privacy.noise import SecretNoise

_NUMBERS = 8  # of one block
_BLOCKS = 128  # of one program
_MOST_BLOCKS = 1 << 32  # the block's number has 32 bits


class DeviceNoise(SecretNoise):
    """Noise from the operating system, expanded on a GPU where the vector is on one."""

    description = "operating system generator; for vectors on the GPU expanded there by ChaCha20"

    def normal_on(self, device: torch.device, size: int) -> torch.Tensor:
        """Return `size` independent standard normal numbers in float64, on a GPU."""
        return expand(secret_bytes(32), size, device)


def expand(key: bytes, size: int, device: torch.device) -> torch.Tensor:
    """Return the standard normal numbers of a key: never twice the same key for noise."""
    from fedquilt.privacy.noise_kernels import normal_kernel

    blocks = -(-size // _NUMBERS)
    if blocks >= _MOST_BLOCKS:
        raise ValueError(f"size={size} must be below {_NUMBERS * _MOST_BLOCKS}")
    words = torch.from_numpy(np.frombuffer(key, dtype=np.int32).copy()).to(device)
    # In a tensor: a kernel would take a Python number as float32.
    scales = torch.tensor([2.0**-53, 2.0 * math.pi * 2.0**-53], dtype=torch.float64, device=device)
    numbers = torch.empty(size, dtype=torch.float64, device=device)
    normal_kernel[(-(-blocks // _BLOCKS),)](words, scales, numbers, size, BLOCK=_BLOCKS)
    return numbers
