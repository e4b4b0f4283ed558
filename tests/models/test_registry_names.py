"""Networks by name: ResNet-18 with either norm, and the one for texts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.models import CharLSTM, LeNet, ResNet18, make_model


@pytest.mark.parametrize(
    ("name", "norm"), [("resnet18", nn.GroupNorm), ("resnet18-batchnorm", nn.BatchNorm2d)]
)
def test_resnet18_by_name(name: str, norm: type[nn.Module]) -> None:
    model = make_model(name, (1, 28, 28), 7, seed=0)
    assert isinstance(model, ResNet18)
    norms = [m for m in model.modules() if isinstance(m, (nn.GroupNorm, nn.BatchNorm2d))]
    assert norms
    assert all(type(m) is norm for m in norms)
    assert tuple(model.eval()(torch.zeros(2, 1, 28, 28)).shape) == (2, 7)


def test_lenet_by_name() -> None:
    model = make_model("lenet", (1, 28, 28), 10, seed=0)
    assert isinstance(model, LeNet)
    assert model.get_num_parameters() == 62_558
    assert tuple(model(torch.zeros(2, 1, 28, 28)).shape) == (2, 10)
    for shape in ((1, 8, 8), (64,)):
        with pytest.raises(InvalidValueError, match="must be"):
            make_model("lenet", shape, 10, seed=0)


def test_batch_norm_is_for_fedavg_only() -> None:
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 2
    model = make_model("resnet18-batchnorm", (3, 8, 8), 2, seed=0)
    for mode in ("certified", "quap_fl"):
        with pytest.raises(InvalidValueError, match="GroupNorm"):
            fedquilt.run(
                model, (x, y), None, [[0, 1], [2, 3]], mode=mode, output_dir=None, quiet=True
            )


def test_the_networks_made_for_a_shape() -> None:
    assert isinstance(make_model("auto", (80,), 80, seed=0), CharLSTM)
    assert isinstance(make_model("auto", (3, 64, 64), 200, seed=0), ResNet18)


def test_the_network_for_texts_reads_in_order() -> None:
    model = CharLSTM().eval()
    assert model.get_num_parameters() == 819_920
    text = torch.randint(0, 80, (2, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        forward, backward = model(text), model(text.flip(1))
    assert tuple(forward.shape) == (2, 80)
    assert not torch.allclose(forward, backward)
