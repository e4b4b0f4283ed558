"""Features learned from drawn pictures: what was shipped, what they depend on, where they lie."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedquilt.config import build_config
from fedquilt.errors import InvalidValueError
from fedquilt.models import MODELS, make_model
from fedquilt.models.features import DrawnFeatures, drawn, precompute
from fedquilt.setup.build_task import build_task
from tools import train_extractor


def test_the_shipped_weights_are_those_of_the_digest_and_of_the_training_network() -> None:
    raw = drawn.WEIGHTS.read_bytes()
    assert hashlib.sha256(raw).hexdigest() == drawn.SHA256
    tensors = load_file(drawn.WEIGHTS)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    made = train_extractor.folded(train_extractor.Network())
    assert {name: shapes[name] for name in made} == {name: v.shape for name, v in made.items()}


def test_features_are_those_of_a_plain_network_projected_and_of_one_length() -> None:
    tensors = {name: value.double() for name, value in load_file(drawn.WEIGHTS).items()}
    network = train_extractor.Network().double().eval()
    for name, unit in network.named_modules():  # BatchNorm folded: only its bias does something
        if isinstance(unit, train_extractor.Unit):
            unit.norm.eps = 0.0
            unit.conv.weight.data = tensors[f"{name}.weight"]
            unit.norm.bias.data = tensors[f"{name}.bias"]
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = network(train_extractor.standardised(images.double()))
    wanted = (plain - tensors["colour.mean"]) @ tensors["colour.directions"][:, :32]
    wanted *= 64**0.5 / wanted.norm(dim=1, keepdim=True)
    wanted = torch.cat([wanted, _plain_patches(images.double())[:, :32]], dim=1)
    wanted[:, 32:] *= 64**0.5 / wanted[:, 32:].norm(dim=1, keepdim=True)
    front = DrawnFeatures((3, 32, 32), 64)
    torch.testing.assert_close(front(images).double(), wanted, rtol=1e-3, atol=1e-3)
    moved = front(3 * images - 1)  # how data were scaled does not matter
    torch.testing.assert_close(moved.double(), wanted, rtol=1e-3, atol=1e-3)
    narrow = DrawnFeatures((3, 32, 32), 16)(images)
    for mine, part in ((narrow[:, :8], wanted[:, :8]), (narrow[:, 8:], wanted[:, 32:40])):
        ratio = mine / part
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-2, atol=1e-2)
        assert mine.norm(dim=1).tolist() == pytest.approx([8.0] * 3)


def _plain_patches(images: torch.Tensor) -> torch.Tensor:
    """What the patches say, patch by patch."""
    fitted = {name: value.double() for name, value in load_file(drawn.PATCHES).items()}
    kernels = fitted["kernels"].flatten(1)
    seen = train_extractor.standardised(images).unfold(2, 6, 1).unfold(3, 6, 1)
    rows = seen.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [N, 27, 27, 108]
    rows = rows - rows.mean(3, keepdim=True)
    rows = rows / (rows.square().mean(3, keepdim=True) + 0.04).sqrt()
    found = (rows @ kernels.T - fitted["thresholds"].flatten()).clamp(min=0)
    halves = (slice(0, 14), slice(13, 27))
    quarters = [found[:, a, b].mean((1, 2)) for a in halves for b in halves]
    return (torch.stack(quarters, 2).flatten(1) - fitted["mean"]) @ fitted["directions"]


def test_patches_are_those_of_the_digest_and_views_of_a_picture_agree_on_the_first_ones() -> None:
    assert hashlib.sha256(drawn.PATCHES.read_bytes()).hexdigest() == drawn.PATCHES_SHA256
    torch.manual_seed(7)
    pictures = train_extractor.draw("colour", 200)
    front = DrawnFeatures((3, 32, 32), 512)
    one, two = (front.describe(train_extractor.view("colour", pictures))[:, 256:] for _ in "ab")
    alike = (one - one.mean(0)) * (two - two.mean(0)) / (one.std(0) * two.std(0))
    first, last = alike.mean(0)[:32].mean(), alike.mean(0)[-32:].mean()
    assert first > last + 0.1


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64)])
def test_what_is_said_of_a_picture_depends_on_no_other(shape: tuple[int, int, int]) -> None:
    front = DrawnFeatures(shape, 32)
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    alone = precompute(front, images[:1], batch_size=4)
    torch.testing.assert_close(precompute(front, images, batch_size=4)[:1], alone)
    assert not list(front.parameters())
    assert not front.state_dict()


@pytest.mark.parametrize("side", [8, 28])
def test_gradients_and_drawn_features_each_have_half_of_a_row(side: int) -> None:
    front = make_model("hog-drawn-linear", (1, side, side), 10, 0).front
    images = torch.rand(4, 1, side, side, generator=torch.Generator().manual_seed(2))
    rows = front(images)
    gradients = make_model("hog-linear", (1, side, side), 10, 0).front(images)
    drawn_rows = DrawnFeatures((1, side, side), 256, "grey")(images)
    torch.testing.assert_close(rows[:, :128], gradients / 2**0.5)  # both have length sqrt(128)
    torch.testing.assert_close(rows[:, 128:], drawn_rows / 2**0.5)
    torch.testing.assert_close(front(images[:1]), rows[:1], rtol=1e-3, atol=1e-4)


def test_grey_directions_whiten_what_the_tool_draws() -> None:
    """Means of 400 pictures drawn afresh: near zero against the spread, which is even."""
    torch.manual_seed(5)
    kinds = train_extractor.KINDS[1:]
    pictures = torch.cat(
        [train_extractor.view(k, train_extractor.draw(k, 200), still=True)[:, :1] for k in kinds]
    )
    rows = DrawnFeatures((1, 32, 32), 256, "grey").describe(pictures)
    assert rows.mean(0).norm() < 0.15 * rows.std(0).norm()
    plain = DrawnFeatures((1, 32, 32), 256)
    raw = plain._network(plain._seen(pictures))
    values = [torch.linalg.eigvalsh(torch.cov(x.T)).clamp(min=0) for x in (rows, raw)]
    even, uneven = (float(x.max() / x.sum()) for x in values)
    assert even < uneven / 4


def test_models_of_every_width_train_that_many_numbers_a_class() -> None:
    for width in (16, 32, 64, 128, 256, 512):
        model = make_model(f"drawn-linear-{width}", (3, 32, 32), 10, 0)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 10 * width
    assert sum(name.startswith("drawn-") for name in MODELS) == 6
    beside = make_model("hog-drawn-linear", (1, 28, 28), 10, 0)
    assert sum(p.numel() for p in beside.parameters() if p.requires_grad) == 3840
    with pytest.raises(InvalidValueError, match="channels of input_shape=3 must be 1"):
        make_model("hog-drawn-linear", (3, 32, 32), 10, 0)
    with pytest.raises(InvalidValueError, match="width=512 must be"):
        make_model("drawn-linear-512", (1, 28, 28), 10, 0)
    with pytest.raises(InvalidValueError, match="channels of input_shape"):
        make_model("drawn-linear-16", (2, 32, 32), 10, 0)


def test_features_of_a_data_set_are_computed_once_and_again_if_the_file_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDQUILT_CACHE", str(tmp_path / "cache"))
    front, images, calls = DrawnFeatures((1, 28, 28), 16), torch.rand(5, 1, 28, 28), []

    def compute(all_of_it: torch.nn.Module) -> torch.Tensor:
        calls.append(1)
        return precompute(all_of_it, images)

    first = drawn.remembered(front, images, compute)
    torch.testing.assert_close(first, precompute(front, images))
    wide = DrawnFeatures((1, 28, 28), 256)
    torch.testing.assert_close(
        drawn.remembered(wide, images, compute), precompute(wide, images), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(drawn.remembered(front, images, compute), first)
    assert len(calls) == 1
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(b"something else")
    assert torch.equal(drawn.remembered(front, images, compute), first)
    drawn.remembered(front, images + 1, compute)  # other pictures, another file
    assert len(calls) == 3
    monkeypatch.setenv("FEDQUILT_CACHE", "/dev/null/nowhere")
    assert torch.equal(drawn.remembered(front, images, compute), first)


def test_kept_features_are_their_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDQUILT_CACHE", str(tmp_path / "cache"))
    front, images = DrawnFeatures((1, 28, 28), 16), torch.rand(2, 1, 28, 28)
    drawn.remembered(front, images, lambda whole: precompute(whole, images))
    (path,) = (tmp_path / "cache").iterdir()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)] == [0o700, 0o600]


def test_nobody_is_told_whether_features_were_kept_from_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it shows that somebody's pictures have changed since."""
    monkeypatch.setenv("FEDQUILT_CACHE", str(tmp_path))
    config = build_config({"dataset": "digits", "model": "drawn-linear-16", "device": "cpu"})
    told: list[list[tuple[str, float]]] = []
    for _ in range(2):
        steps: list[tuple[str, float]] = []
        build_task(config, working=lambda *step, to=steps: to.append(step))
        told.append(steps)
    assert list(tmp_path.iterdir())
    assert told[0] == told[1] != []


def test_gradient_features_of_many_pictures_are_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDQUILT_CACHE", str(tmp_path))
    images = torch.rand(20, 1, 8, 8)
    for name in ("hog-linear", "scatter-linear"):  # of one width and shape, not of one file
        front = make_model(name, (1, 8, 8), 10, 0).front
        monkeypatch.setattr(front, "keeps_from", 20)
        for _ in range(2):
            kept = drawn.remembered(front, images, lambda whole: precompute(whole, images))
            assert torch.equal(kept, precompute(front, images))
        drawn.remembered(front, images[:19], lambda whole: precompute(whole, images[:19]))
    assert len(list(tmp_path.iterdir())) == 2


def test_weights_that_were_changed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(1, 3, 32, 32)
    for which, channels in (("WEIGHTS", 1), ("GREY", 1), ("PATCHES", 3)):
        (tmp_path / which).write_bytes(getattr(drawn, which).read_bytes()[:-1] + b"\x01")
        monkeypatch.setattr(drawn, which, tmp_path / which)
        drawn._tensors.cache_clear()
        kind = "grey" if which == "GREY" else None
        with pytest.raises(drawn.DataError, match="must have"):
            DrawnFeatures((channels, 32, 32), 16, kind)(images[:, :channels])
        monkeypatch.undo()
        drawn._tensors.cache_clear()
