"""Noise expanded on a GPU: the key stream is ChaCha20's, the numbers are Box and Muller's.

The kernel runs in Triton's interpreter here, which has to be chosen before Triton is imported:
these tests run once more, in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.common.vectors import StreamingNorm
from fedquilt.privacy import noise
from fedquilt.privacy.noise import (
    BandedNoise,
    DeviceNoise,
    SecretNoise,
    SeededNoise,
    expand_key,
    noise_source,
    normal_where,
)

is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not is_interpreted, reason="runs in the interpreter's process")
KEY = bytes(range(100, 132))
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(is_interpreted, reason="this is the interpreter's process")
@pytest.mark.processes
def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "6 passed" in ended.stdout


def chacha20(key: bytes, size: int) -> bytes:
    """Return the key stream from block 0 with nonce 0, by another implementation."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers")
    cipher = ciphers.Cipher(ciphers.algorithms.ChaCha20(key, bytes(16)), mode=None)
    return bytes(cipher.encryptor().update(bytes(size)))


@interpreted
@pytest.mark.parametrize("size", [5, 3001])
def test_numbers_are_those_of_chacha20(size: int) -> None:
    blocks = -(-size // 8)
    words = np.frombuffer(chacha20(KEY, 64 * blocks), dtype="<u8").reshape(blocks, 8)
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:, :4] + 2.0**-53))
    angle = 2.0 * np.pi * uniform[:, 4:]
    wanted = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(-1)[:size]
    got = expand_key(KEY, size, CPU)
    assert got.dtype == torch.float64
    assert np.allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_every_vector_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    def noted(key: bytes, size: int, device: Any) -> torch.Tensor:
        keys.append(key)
        return torch.zeros(size, dtype=torch.float64)

    monkeypatch.setattr(noise, "expand_key", noted)
    banded = BandedNoise(DeviceNoise())
    drawn = [*banded.draw_chunks(0, 30_000_000, CUDA), *banded.draw_chunks(1, 10, CUDA)]
    assert [(chunk.start, chunk.stop) for chunk, _ in drawn] == [
        *((0, 1 << 24), (1 << 24, 30_000_000)),
        (0, 10),
    ]
    assert len(set(keys)) == 3
    assert all(len(key) == 32 for key in keys)


def test_where_noise_is_drawn() -> None:
    pytest.importorskip("triton")
    source = noise_source(None, CUDA)
    assert isinstance(source, DeviceNoise)
    assert source.description == (
        "operating system generator; for vectors on the GPU expanded there by ChaCha20"
    )
    assert not source.reproducible
    assert type(noise_source(None, CPU)) is SecretNoise
    assert isinstance(noise_source(3, CUDA), SeededNoise)  # the same on every device
    # A vector on the CPU gets its noise from the operating system itself.
    ((_, noise),) = BandedNoise(source).draw_chunks(0, 1000, CPU)
    assert 0.9 < float(noise.std()) < 1.1


def test_noise_of_one_vector_is_drawn_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[torch.device] = []

    def noted(key: bytes, size: int, device: Any) -> torch.Tensor:
        places.append(device)
        return torch.ones(size, dtype=torch.float64)

    monkeypatch.setattr(noise, "expand_key", noted)
    assert normal_where(CUDA, 4, DeviceNoise()).tolist() == [1.0] * 4
    assert places == [CUDA]
    assert len(normal_where(CPU, 4, DeviceNoise())) == 4
    assert torch.equal(
        normal_where(CPU, 4, SeededNoise(1).stream(2)),
        torch.from_numpy(SeededNoise(1).stream(2).normal(4)),
    )
    assert places == [CUDA]


def test_a_norm_is_added_up_where_the_pieces_are() -> None:
    values = torch.arange(7, dtype=torch.float64)
    far = StreamingNorm()
    for chunk in values.split(3):
        held: Any = SimpleNamespace(device=CUDA, to=lambda _dtype, chunk=chunk: chunk)
        far.add(held)
    assert far.value() == pytest.approx(float(values.norm()), rel=1e-15)
