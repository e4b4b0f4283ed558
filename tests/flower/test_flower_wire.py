"""Compressed updates: what arrives is near what was sent, and the server's clip bounds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedquilt.common.errors import InvalidValueError
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.wire import UnreadableError, compress, decompress
from flower_samples import Tampered, honest, run_federation, spent

NAMES = ("none", "bf16", "int8", "topk")


def vector(size: int = 5000) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def size_of(arrays: dict[str, Any]) -> int:
    return sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize(
    ("name", "share", "apart"), [("none", 1.0, 0.0), ("bf16", 0.5, 2e-2), ("int8", 0.26, 5e-2)]
)
def test_fewer_bytes_and_nearly_the_same_numbers(name: str, share: float, apart: float) -> None:
    sent = vector()
    arrays, read = compress(name, sent, seed=7)
    assert size_of(arrays) <= share * 4 * len(sent)
    assert torch.equal(decompress(name, arrays, len(sent), torch.float32), read)
    assert float((read - sent).abs().max()) <= apart


def test_quantisation_has_no_bias() -> None:
    sent = vector(400)
    mean = torch.stack([compress("int8", sent, seed)[1] for seed in range(400)]).mean(dim=0)
    level = float(sent.abs().max()) / 127
    assert float((mean - sent).abs().max()) < 0.25 * level  # a coin's mean of 400: sd 0.025
    assert float((compress("int8", sent, 0)[1] - sent).abs().max()) <= level * 1.001


def test_topk_sends_the_largest_entries_as_they_are() -> None:
    sent = vector(1000)
    arrays, read = compress("topk", sent, 0, share=0.1)
    assert len(arrays["index"]) == 100
    kept = read != 0
    assert torch.equal(read[kept], sent[kept])
    assert float(sent[~kept].abs().max()) <= float(sent[kept].abs().min())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_arrives_as_not_finite(name: str) -> None:
    sent = vector(3000)
    sent[17] = torch.nan
    assert not bool(compress(name, sent, 0)[1].isfinite().all())


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("bf16", {"bf16": np.zeros(9, np.int16)}),
        ("bf16", {"vector": np.zeros(10, np.float32)}),
        ("int8", {"int8": np.zeros(10, np.int8)}),
        ("int8", {"int8": np.zeros(10, np.int8), "scale": np.zeros(2, np.float32)}),
        ("topk", {"index": np.array([0, 10], np.int32), "value": np.zeros(2, np.float32)}),
        ("topk", {"index": np.array([-1, 2], np.int32), "value": np.zeros(2, np.float32)}),
        ("topk", {"index": np.array([2, 2], np.int32), "value": np.zeros(2, np.float32)}),
        ("topk", {"index": np.array([1, 2], np.int32), "value": np.zeros(1, np.float32)}),
    ],
)
def test_arrays_that_no_codec_made_are_refused(name: str, arrays: dict[str, Any]) -> None:
    with pytest.raises(UnreadableError):
        decompress(name, arrays, 10, torch.float32)


@pytest.mark.parametrize("name", ["bf16", "int8", "topk"])
def test_a_compressed_run_learns_and_charges_the_same(name: str, tmp_path: Path) -> None:
    plain = run_federation(honest(), tmp_path / "plain", num_rounds=3)
    how = FlowerSettings(compression=name, topk=0.3)
    less = run_federation(honest(), tmp_path / name, how, num_rounds=3)
    assert np.allclose(spent(less), spent(plain))
    assert any(f"compressed ({name})" in note for note in less.statement.notes)
    how = FlowerSettings(compression=name, topk=0.3)
    learned = run_federation(
        honest(), None, how, mode="fedavg", num_rounds=30, learning_rate=0.3, eval_every=30
    )
    assert learned.final_accuracy > 0.8


def test_the_server_clips_what_it_has_decompressed(tmp_path: Path) -> None:
    from flower_samples import with_arrays

    def huge(order: Any, reply: Any) -> list[Any]:
        levels = np.full(21, 127, np.int8)
        return [with_arrays(reply, int8=levels, scale=np.full(1, 1e20, np.float32))]

    how = FlowerSettings(compression="int8")
    result = run_federation(Tampered(huge, rounds=(0, 1)), tmp_path, how, clip_norm=0.1)
    assert all(float(tensor.abs().max()) < 100 for tensor in result.state_dict.values())


def test_compression_is_refused_where_it_would_spoil_updates() -> None:
    from fedquilt.config import build_config
    from fedquilt.flower.simulate import simulate

    few = {"num_clients": 4, "num_rounds": 1, "partition": "iid"}
    tables = build_config({**few, "method": "condense", "ipc": 1}).replace(engine="flower")
    with pytest.raises(InvalidValueError, match="must be 'none' for tables"):
        simulate(tables, in_memory=True, settings=FlowerSettings(compression="bf16"))
    sliced = build_config({**few, "method": "heterofl"}).replace(engine="flower")
    with pytest.raises(InvalidValueError, match="belongs to fixed places"):
        simulate(sliced, in_memory=True, settings=FlowerSettings(compression="topk"))
