"""Long vectors in chunks come out as they would whole, bit by bit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedquilt.aggregation import RunningMean, make_server_optimizer
from fedquilt.common import storage, vectors
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.storage import as_safetensors
from fedquilt.common.vectors import CHUNK, chunks
from fedquilt.privacy.noise import BandedNoise, SecretNoise, SeededNoise

CPU = torch.device("cpu")
SIZE = 2 * CHUNK + 1003


def draws(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_pieces_cover_everything_once() -> None:
    for size in (0, 1, CHUNK, SIZE):
        covered = np.concatenate([np.arange(size)[chunk] for chunk in chunks(size)] or [[]])
        assert np.array_equal(covered, np.arange(size))


def test_a_norm_in_chunks_is_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = draws(0)
    exact = math.sqrt(math.fsum((vector.double().numpy() ** 2).tolist()))
    whole = vectors.norm(vector)
    monkeypatch.setattr(vectors, "_LONG", 0)
    assert vectors.norm(vector) == pytest.approx(exact, rel=1e-12)
    assert vectors.norm(vector) == pytest.approx(whole, rel=1e-12)
    assert vectors.norm(torch.ones(CHUNK + 5)) == math.sqrt(CHUNK + 5)
    for odd in (math.nan, math.inf):
        vector[CHUNK + 7] = odd
        assert not math.isfinite(vectors.norm(vector))


def test_sums_in_chunks_are_the_sums() -> None:
    mean, total = RunningMean(SIZE), torch.zeros(SIZE, dtype=torch.float64)
    for seed, weight in ((1, 3.0), (2, 0.7)):
        mean.add(draws(seed), weight)
        total.add_(draws(seed), alpha=weight)
    mean.add_scaled(draws(3), 0.123)
    total += draws(3).double() * 0.123
    assert torch.equal(mean.total, total)
    assert mean.weight == 4.7


@pytest.mark.parametrize("bands", [1, 2])
def test_noise_in_chunks_is_the_noise(bands: int) -> None:
    whole, parted = (BandedNoise(SeededNoise(5), bands) for _ in range(2))
    for index in range(3):
        drawn = [noise.numpy().copy() for _, noise in parted.draw_chunks(index, SIZE, CPU)]
        assert np.array_equal(np.concatenate(drawn), whole.draw(index, SIZE))


def test_secret_noise_in_chunks_is_drawn_anew_in_each() -> None:
    first, second, _ = (
        noise.numpy() for _, noise in BandedNoise(SecretNoise()).draw_chunks(0, SIZE, CPU)
    )
    assert len(first) == len(second) == CHUNK
    assert not np.intersect1d(first, second).size
    assert np.std(np.concatenate([first, second])) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "yogi"])
def test_a_server_steps_every_piece(name: str) -> None:
    weights, update = draws(1), draws(2, torch.float64)
    long, short = (make_server_optimizer(name, 0.3, 0.9) for _ in range(2))
    last = slice(2 * CHUNK, SIZE)
    moved, alone = weights, weights[last].clone()
    for _ in range(2):
        moved, alone = long.step(moved, update), short.step(alone, update[last])
    assert torch.equal(moved[last], alone)
    assert not torch.equal(moved, draws(1))


def test_safetensors_are_read_by_their_library(tmp_path: Path) -> None:
    tensors = {
        "turned": torch.arange(6.0).view(2, 3).t(),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 4),
        "names with \u00e4 and \\": torch.tensor([1, 2], dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
    }
    storage.write_file(tmp_path / "t", as_safetensors(tensors, {"a": "b"}))
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "t", "pt") as stream:
        assert stream.metadata() == {"a": "b"}


def test_a_type_that_cannot_be_saved_leaves_no_file(tmp_path: Path) -> None:
    odd = {"odd": torch.zeros(1, dtype=torch.complex128)}
    with pytest.raises(InvalidValueError, match="complex128 must have a type"):
        storage.write_file(tmp_path / "t", as_safetensors(odd, {}))
    assert not list(tmp_path.iterdir())
