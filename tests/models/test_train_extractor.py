"""The training of feature extractors on drawn pictures: what is written is what was trained."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from tools import train_extractor


def test_a_folded_network_says_what_the_trained_one_says() -> None:
    torch.manual_seed(0)
    network = train_extractor.Network()
    for module in network.modules():  # statistics and factors that are not those of the start
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, std=0.1)
    weights = {k: torch.from_numpy(v).float() for k, v in train_extractor.folded(network).items()}

    def unit(name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        kernel = weights[f"{name}.weight"]
        padding = kernel.shape[-1] // 2
        return functional.conv2d(x, kernel, weights[f"{name}.bias"], stride, padding)

    x = train_extractor.standardised(torch.rand(2, 3, 32, 32))
    y = unit("stem", x, 1).relu()
    for number, (_, _, stride) in enumerate(train_extractor.BLOCKS):
        name = f"blocks.{number}"
        inner = unit(f"{name}.second", unit(f"{name}.first", y, stride).relu(), 1)
        y = inner + (unit(f"{name}.around", y, stride) if f"{name}.around.bias" in weights else y)
        y = y.relu()
    expected = network.eval()(x).detach()
    torch.testing.assert_close(
        y.mean((2, 3)), expected, rtol=2e-2, atol=2e-2 * float(expected.std())
    )


def test_the_loss_is_small_when_views_agree_and_large_when_they_are_mixed_up() -> None:
    points = torch.eye(8)
    alike = torch.cat([points, points])
    mixed = torch.cat([points, points.roll(1, 0)])
    others = 14 * np.exp(0.0)  # every other view is at a right angle
    expected = -np.log(np.exp(10.0) / (np.exp(10.0) + others))
    assert float(train_extractor.contrast(alike)) == pytest.approx(expected, rel=1e-4)
    assert float(train_extractor.contrast(mixed)) > 9


@pytest.mark.parametrize("kind", train_extractor.KINDS)
def test_pictures_of_a_kind_differ_and_keep_to_their_range(kind: str) -> None:
    torch.manual_seed(0)
    pool = train_extractor.draw(kind, 6)
    assert pool.shape == (6, 3, 40, 40)
    assert len({picture.numpy().tobytes() for picture in pool}) == 6
    seen = train_extractor.view(kind, pool)
    assert seen.shape == (6, 3, 32, 32)
    assert 0 <= float(seen.min()) < float(seen.max()) <= 1
    if kind != "colour":
        assert torch.equal(pool[:, 0], pool[:, 1])


@pytest.mark.slow
def test_a_short_training_writes_weights_statistics_and_their_digests(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"x --seconds 3 --device cpu --out {tmp_path} --batch 20 --pool 60 --described 30"
    monkeypatch.setattr(sys, "argv", said.split())
    train_extractor.main()
    facts = json.loads((tmp_path / "extractor.json").read_text())
    for name in ("extractor", "statistics"):
        raw = (tmp_path / f"{name}.safetensors").read_bytes()
        assert hashlib.sha256(raw).hexdigest() == facts["sha256"][name]
    weights = load_file(tmp_path / "extractor.safetensors")
    assert sum(value.size for value in weights.values()) < 3_000_000
    assert all(np.isfinite(value).all() for value in weights.values())
    found = load_file(tmp_path / "statistics.safetensors")
    for kind in train_extractor.KINDS:
        assert np.linalg.eigvalsh(found[f"{kind}.total"].astype(float)).min() > -1e-3
        assert np.trace(found[f"{kind}.jitter"]) > 0
