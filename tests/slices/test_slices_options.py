"""What the methods can be told: rows of absent classes, distillation, ramp-up, who trains."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from slices_samples import data, federation, network, problem
from torch import nn

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config, plain_config
from fedquilt.models import ExitNet
from fedquilt.round import run_round
from fedquilt.setup.federation import build_method
from fedquilt.slices.engine import _Nested, loss_of_slice
from fedquilt.slices.method import LargestOnly, Slices
from fedquilt.slices.model_slice import SliceMap, WithoutRows
from fedquilt.slices.selection import Prefix
from fedquilt.slices.slicer import Slicer, exits_loss, ramp
from run_samples import tiny


def test_rows_of_absent_classes_are_left_out_of_the_mean() -> None:
    sample = federation(method="heterofl", tiers="1", absent_classes="leave_out")
    place = sample.method.place(0, 0)  # its three samples are of class 1
    assert isinstance(place, WithoutRows)
    assert place.left_out == (0, 2)
    covered = torch.zeros(len(sample.weights))
    place.cover_(covered, 2.0)
    weight, bias = covered[-15:-3].view(3, 4), covered[-3:]
    assert weight.eq(torch.tensor([0.0, 2.0, 0.0])[:, None]).all()
    assert bias.tolist() == [0.0, 2.0, 0.0]
    assert covered[:-15].eq(2.0).all()
    total = torch.zeros(len(sample.weights))
    place.scatter_add_(total, torch.ones(place.place.size), 3.0)
    assert torch.equal(total, 1.5 * covered)


@pytest.mark.parametrize("settings", [{"mode": "certified"}, {"method": "fedrolex"}])
def test_under_a_bound_what_is_held_does_not_follow_data(settings: dict[str, str]) -> None:
    method = build_method(*problem(**{"method": "heterofl", **settings}))
    assert all(isinstance(method.place(client, 0), SliceMap) for client in range(6))


def test_leaving_rows_out_is_usual_where_nothing_is_claimed() -> None:
    """New runs as the authors do; a run's file that does not name it means what it meant."""
    assert build_config({"method": "heterofl"}).absent_classes == "leave_out"
    assert build_config({"method": "heterofl", "mode": "certified"}).absent_classes == "average"
    assert plain_config({"method": "heterofl", "mode": "fedavg"}).absent_classes == "leave_out"
    written = build_config({"method": "heterofl"}).as_dict()
    del written["absent_classes"]
    assert plain_config(written).absent_classes == "average"
    with pytest.raises(InvalidValueError, match="under a bound no divisor may"):
        tiny(method="heterofl", mode="certified", absent_classes="leave_out")


def test_a_sum_of_two_heads_has_no_rows_of_its_own() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.hidden(x))
            return self.one(hidden) + self.two(hidden)

    assert Slicer(Heads()).output_layer is None
    assert Slicer(network()).output_layer == "4"


def fjord_loss(**options: float) -> float:
    config, its = problem(method="fjord", tiers="1,1/2", **options)
    method = build_method(config, its)
    assert isinstance(method, Slices)
    slicing, (inputs, labels, _) = method.slicing, data()
    client = slicing.widths.index(Fraction(1))
    model = slicing.sub_model(slicing.cut(client, 0))
    loss_of = loss_of_slice(slicing, model)
    assert loss_of is not None
    losses = loss_of(client, 0)
    return sum(float(losses(model, inputs, labels)) for _ in range(4))


def test_distillation_of_fjord_can_be_told() -> None:
    usual = fjord_loss()
    assert fjord_loss(fjord_alpha=0.5, fjord_temperature=1.0) == usual
    assert fjord_loss(fjord_alpha=0.9) != usual
    assert fjord_loss(fjord_temperature=3.0) != usual


def test_nested_widths_are_rounded_once() -> None:
    """10 units: a client of width 3/4 has 7, and width 1/2 in it is 5, as for everybody."""
    model = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 3))
    plan = Slicer(model)
    inside = Slicer(plan.build("3/4"))
    units = tuple(axis.units for axis in plan.axes if not axis.pinned)
    assert len(inside.build(_Nested(Fraction(1, 2), units))[0].weight) == 5
    assert len(plan.build(Prefix("1/2"))[0].weight) == 5


def test_depthfl_ramps_up() -> None:
    assert ramp(0, 0) == 1.0
    assert ramp(0, 10) == pytest.approx(math.exp(-5))
    assert ramp(5, 10) == pytest.approx(math.exp(-1.25))
    assert ramp(10, 10) == ramp(99, 10) == 1.0
    model, x, y = ExitNet(3, 1), torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    none, half, all_of_it = (float(exits_loss(model, x, y, part)) for part in (0.0, 0.5, 1.0))
    assert half == pytest.approx((none + all_of_it) / 2, rel=1e-5)
    assert all_of_it > none


def test_only_the_largest_train() -> None:
    sample = federation(method="largest_only", tiers="1,1/2,1/4")
    assert isinstance(sample.method, LargestOnly)
    wide = np.flatnonzero(sample.method.present())
    assert len(wide) == 2
    assert run_round(sample, 0).cohort == wide.tolist()
    whole = federation(method="full", mode="fedavg")
    costs = sample.method.result([{"test_accuracy": 0.5, "test_loss": 1.0}])["slices"]
    assert costs["tiers"][0]["clients"] == 2
    assert costs["tiers"][0]["test"] == {"accuracy": 0.5, "loss": 1.0}
    assert len(whole.weights) == costs["tiers"][0]["parameters"]


def test_largest_only_needs_somebody_large() -> None:
    with pytest.raises(InvalidValueError, match="must have clients of width 1"):
        build_method(*problem(method="largest_only", tiers="1/2"))


def test_modules_can_be_kept_whole() -> None:
    model = nn.Sequential(
        *(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()),
        *(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)),
    )
    inputs, labels, clients = data()
    done = fedquilt.run(
        *(model, (inputs, labels), (inputs, labels), clients),
        output_dir=None,
        method="heterofl",
        tiers="1/2",
        whole="2",
        num_rounds=1,
        quiet=True,
    )
    # the first layer feeds the whole one, so it stays whole too
    assert done.result["slices"]["tiers"][0]["parameters"] == 16 + 20 + 10 + 9
