"""A user's own network as the frozen front of a small head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.models import FeatureModel, OwnFront
from fedquilt.models.features import precompute

pytestmark = pytest.mark.usefixtures("one_thread")


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2)
    )


class Output(nn.Module):
    """Returns what models of other libraries return."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.flatten(2).squeeze(1).view(len(x), 8, 8) * self.weight
        found = {
            "pooled": SimpleNamespace(last_hidden_state=rows, pooler_output=rows[:, 0]),
            "hidden": SimpleNamespace(last_hidden_state=rows),
            "tuple": (rows[:, 0], rows),
            "dictionary": {"features": rows[:, 0]},
            "mixing": rows[:, 0] - rows.mean(dim=0)[0],
            "few": rows[:2, 0],
        }
        return found[self.kind]


def images(count: int = 6) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "mean"), [("pooled", False), ("hidden", True), ("tuple", False)])
def test_usual_outputs_are_understood(kind: str, mean: bool) -> None:
    front = OwnFront(Output(kind), (1, 8, 8))
    assert front.num_features == 8
    rows = images().view(-1, 8, 8)
    torch.testing.assert_close(front(images()), rows.mean(dim=1) if mean else rows[:, 0])


def test_other_outputs_are_picked_by_a_function() -> None:
    with pytest.raises(InvalidValueError, match="front returns dict"):
        OwnFront(Output("dictionary"), (1, 8, 8))
    front = OwnFront(Output("dictionary"), (1, 8, 8), output=lambda found: found["features"])
    assert front.num_features == 8


@pytest.mark.parametrize(
    ("kind", "message"), [("mixing", "whatever stands beside it"), ("few", "one row of features")]
)
def test_fronts_that_are_none(kind: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        OwnFront(Output(kind), (1, 8, 8))


def test_it_never_trains_and_is_in_no_state_dict() -> None:
    network = backbone()
    model = FeatureModel(OwnFront(network, (1, 8, 8)), 10, bias=True)
    assert list(model.state_dict()) == ["head.weight", "head.bias"]
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    model.train()
    front = model.front
    assert torch.equal(front(images()), front(images())), "no dropout"
    assert all(p.requires_grad for p in network.parameters()), "the user's own is left alone"
    assert torch.equal(precompute(front, images()), front(images()))
    assert model.double().front(images().double()).dtype == torch.float32
    assert next(front._held[0].parameters()).dtype == torch.float64, "it moves along"  # type: ignore[union-attr,index]


@pytest.mark.parametrize("mode", ["certified", "fedavg"])
def test_a_run_trains_the_head(mode: str, tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(2)
    data = (torch.rand(40, 1, 8, 8, generator=draws), torch.arange(40) % 10)
    model = FeatureModel(OwnFront(backbone(), (1, 8, 8)), 10, chosen_on=("ImageNet-1k",))
    done = fedquilt.run(
        model,
        data,
        data,
        [list(range(20)), list(range(20, 40))],
        mode=mode,
        num_rounds=2,
        local_epochs=1,
        availability="always",
        clients_per_round=1.0,
        output_dir=str(tmp_path),
    )
    assert list(done.state_dict) == ["head.weight"]
    assert done.folder is not None
    again = fedquilt.load(done.folder, model)
    assert again.model is not None
    assert done.model is not None
    torch.testing.assert_close(again.model(images()), done.model(images()))
    if mode == "certified":
        assert done.statement.covered == ("head.weight",)
        assert any("ImageNet-1k: if clients hold" in note for note in done.statement.notes)
