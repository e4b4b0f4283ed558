"""Depth, losses, costs, frozen and buffered models, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sliced_federation import CLASSES, cross_entropy, divergence, mean_over_holders, trained
from slices_samples import RATE, SIZES, data, federation, network, problem
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.experiment.api import load, run_config, run_in_memory
from fedquilt.models import ExitNet
from fedquilt.report import slices_table
from fedquilt.round import run_round
from fedquilt.setup.federation import build_method
from fedquilt.slices.engine import class_mask
from fedquilt.slices.method import Slices
from fedquilt.slices.selection import Listed
from fedquilt.training import Task
from run_samples import tiny


class TwoExits(nn.Module):
    """Two hidden layers of four units, a classifier on each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, 4), nn.Tanh()) for n in (3, 4))
        self.heads = nn.ModuleList(nn.Linear(4, CLASSES) for _ in range(2))

    def exits(self, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outputs.append(head(x))
        return outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.exits(x), start=torch.zeros(())) / len(self.blocks)


SHAPES = ((4, 3), (4,), (4, 4), (4,), (CLASSES, 4), (CLASSES,), (CLASSES, 4), (CLASSES,))
FIRST = (0, 1, 4, 5)  # the tensors of the first block and its classifier


def exits_in_numpy(vector: np.ndarray, x: np.ndarray, depth: int) -> list[np.ndarray]:
    stops = np.cumsum([math.prod(shape) for shape in SHAPES])[:-1]
    parts = [p.reshape(s) for p, s in zip(np.split(vector, stops), SHAPES, strict=True)]
    hidden = [np.tanh(x @ parts[0].T + parts[1])]
    hidden.append(np.tanh(hidden[0] @ parts[2].T + parts[3]))
    return [hidden[d] @ parts[4 + 2 * d].T + parts[5 + 2 * d] for d in range(depth)]


def test_depth_slices_are_those_of_numpy() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = TwoExits()
    sample = federation(model=model, method="depthfl", tiers="1,1/2", local_epochs=1)
    assert isinstance(sample.method, Slices)
    before = sample.weights.double().numpy()
    inputs, labels, clients = data()
    updates = []
    for client, index in enumerate(clients):
        x, y = inputs.double().numpy()[index], labels.numpy()[index]
        depth = 2 if sample.method.slicing.widths[client] == 1 else 1

        def loss(v: np.ndarray, start: np.ndarray, x: Any = x, y: Any = y, d: int = depth) -> float:
            own, fixed = exits_in_numpy(v, x, d), exits_in_numpy(start, x, d)
            total = sum(cross_entropy(z, y) for z in own)
            if d == 2:
                total += divergence(fixed[1], own[0]) + divergence(fixed[0], own[1])
            return total

        held = [d in FIRST or depth == 2 for d in range(len(SHAPES))]
        sizes = [math.prod(shape) for shape in SHAPES]
        mask = np.repeat(np.array(held), sizes)
        updates.append((trained([loss], before, RATE), mask, float(SIZES[client])))
    run_round(sample, 0)
    expected = before + mean_over_holders(updates)
    np.testing.assert_allclose(sample.weights.numpy(), expected, atol=3e-6)


def test_slices_of_scalefl_are_those_of_numpy() -> None:
    """Width 1/2 keeps 0.63 of 2 blocks and of 4 units: one block of two units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = TwoExits()
    sample = federation(model=model, method="scalefl", tiers="1,1/2", local_epochs=1)
    assert isinstance(sample.method, Slices)
    before = sample.weights.double().numpy()
    inputs, labels, clients = data()
    narrow = [np.zeros(shape, dtype=bool) for shape in SHAPES]
    narrow[0][:2] = narrow[1][:2] = narrow[4][:, :2] = narrow[5][:] = True
    narrow_mask = np.concatenate([part.ravel() for part in narrow])
    updates = []
    for client, index in enumerate(clients):
        x, y = inputs.double().numpy()[index], labels.numpy()[index]
        is_wide = sample.method.slicing.widths[client] == 1
        mask = np.ones_like(narrow_mask) if is_wide else narrow_mask

        def loss(
            v: np.ndarray,
            start: np.ndarray,
            x: Any = x,
            y: Any = y,
            m: Any = mask,
            d: Any = is_wide,
        ) -> float:
            own, fixed = (exits_in_numpy(vector * m, x, 1 + d) for vector in (v, start))
            if not d:
                return float(cross_entropy(own[0], y))
            lesson = 0.95 * cross_entropy(own[0], y)
            lesson += 0.05 * 9 * divergence(fixed[1] / 3, own[0] / 3)
            return float(2 / 6 * (lesson + 2 * cross_entropy(own[1], y)))

        updates.append((trained([loss], before, RATE), mask, float(SIZES[client])))
    run_round(sample, 0)
    expected = before + mean_over_holders(updates)
    np.testing.assert_allclose(sample.weights.numpy(), expected, atol=3e-6)


def test_fiarse_cuts_by_the_model_that_the_round_began_with() -> None:
    sample = federation(method="fiarse", tiers="1/2")
    assert isinstance(sample.method, Slices)
    slicing = sample.method.slicing
    sample.weights = torch.zeros_like(sample.weights)
    sample.weights[3 * 2 : 3 * 4] = 1.0  # the weights of the first layer's units 2 and 3
    cut = slicing.cut(0, 7)
    assert isinstance(cut, Listed)
    assert cut.kept[0] == (2, 3)
    sample.weights = torch.zeros_like(sample.weights)
    assert slicing.cut(0, 7) == cut  # the round is still the same
    assert slicing.cut(0, 8) != cut


def test_fiarse_is_refused_where_clients_are_elsewhere() -> None:
    sample = federation(method="fiarse", tiers="1/2")
    with pytest.raises(InvalidValueError, match="method='fiarse' must be used where clients are"):
        sample.method.move_to(cast(Any, None))


def test_nobody_has_less_than_one_block() -> None:
    sample = federation(model=TwoExits(), method="depthfl", tiers="1,1/8")
    assert isinstance(sample.method, Slices)
    small = sample.method.slicing.widths.index(Fraction(1, 8))
    assert sample.method.slicing.place(small, 0).size == 12 + 4 + 12 + 3


class Halves(nn.Module):
    """Returns its inputs: logits, or log-probabilities."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.normalised = normalised

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log_softmax(-1) if self.normalised else x


@pytest.mark.parametrize("normalised", [False, True])
def test_the_mask_of_missing_classes(normalised: bool) -> None:
    inputs, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 1, 0])
    task = Task(inputs, labels, [np.array([0, 1, 2]), np.array([3, 4]), np.array([], dtype=int)])
    mask = class_mask(Halves(normalised), task)
    assert mask is not None
    assert mask.hidden.tolist() == [[False] * 3, [True, False, True], [True] * 3]
    assert mask.value == (-math.inf if normalised else 0.0)
    everything = Task(inputs, labels, [np.arange(6)])
    nothing = class_mask(Halves(normalised), everything)
    assert nothing is not None
    assert not nothing.hidden.any()


def test_costs_are_counted_by_hand() -> None:
    """3 -> h -> h -> 3 has h (3 + h + 3) multiply-adds and as many weights, and 2h + 3 biases."""
    sample = federation(method="fedrolex", tiers="1,1/2,1/4")
    assert isinstance(sample.method, Slices)
    record = sample.method.result([])["slices"]
    expected = []
    for width, hidden in (("1", 4), ("1/2", 2), ("1/4", 1)):
        products = hidden * (3 + hidden + 3)
        size = products + 2 * hidden + 3
        row = {"parameters": size, "bytes_up": 4 * size, "bytes_down": 4 * size}
        expected.append({"width": width, "clients": 2, **row, "multiply_adds": products})
    assert record["tiers"] == expected
    assert record["mean"]["multiply_adds"] == (40 + 16 + 7) / 3
    table = slices_table(record)
    assert "1/2" in table
    assert "mean" in table
    assert "23" in table


def test_convolutions_are_counted_once_for_each_place() -> None:
    result = run_in_memory(tiny(mode="fedavg", method="heterofl", tiers="1", model="digits"))
    (tier,) = result.result["slices"]["tiers"]
    assert tier["multiply_adds"] == 16 * 9 * 64 + 256 * 32 + 32 * 10
    assert tier["parameters"] == 8714


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
def test_smallest_trains_scores_saves_and_loads_the_small_model(tmp_path: Path, mode: str) -> None:
    config = tiny(mode=mode, method="smallest", model="mlp", output_dir=str(tmp_path))
    done = run_config(config)
    assert done.model is not None
    assert done.state_dict["fc1.weight"].shape == (8, 64)  # 1/8 of 64 hidden units
    assert done.folder is not None
    again = load(done.folder)
    assert again.model is not None
    inputs = torch.rand(5, 1, 8, 8)
    assert torch.equal(again.model.eval()(inputs), done.model.eval()(inputs))
    assert done.result["slices"]["tiers"][0]["parameters"] == 8 * 65 + 10 * 9


def test_frozen_layers_are_cut_with_the_window() -> None:
    """What never travels is cut from the whole model, anew for every window."""
    settings = {"method": "fedrolex", "tiers": "1/2", "trainable": "4", "local_epochs": 1}
    sample = federation(**settings)
    assert isinstance(sample.method, Slices)
    model = sample.method.slicing.model
    for index in range(3):
        small = sample.method.slicing.sub_model(sample.method.slicing.cut(0, index))
        units = [(index + place) % 4 for place in range(2)]
        whole = dict(model.named_parameters())
        assert torch.equal(dict(small.named_parameters())["0.weight"], whole["0.weight"][units])
        run_round(sample, index)


@pytest.mark.parametrize("mode", ["fixed_dp", "quap_fl", "quap_fl_client"])
def test_seed_modes_refuse_slices(mode: str) -> None:
    with pytest.raises(InvalidValueError, match=f"mode='{mode}' must be one of 'fedavg'"):
        tiny(mode=mode, method="fedrolex")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "heterofl", "tiers": "1/8"}, "width=1/8 must keep at least one of the 4"),
        ({"method": "depthfl"}, "`blocks`, `heads` and `exits`"),
        ({"method": "fjord", "engine": "batched"}, "engine='batched' must be 'auto' or"),
        ({"method": "heterofl", "engine": "processes"}, "engine='processes' must be 'auto'"),
        ({"method": "heterofel"}, "did you mean 'heterofl'"),
        ({"method": "heterofl", "tiers": "wide"}, "tiers='wide' must hold widths"),
    ],
)
def test_what_cannot_be_sliced_changes_nothing(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    inputs, labels, clients = data()
    both = (inputs, labels)
    with pytest.raises(InvalidValueError, match=message):
        fedquilt.run(network(), both, both, clients, output_dir=str(tmp_path), **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_hidden_axis_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="must have an axis that can be cut"):
        build_method(*problem(nn.Linear(3, 3), method="heterofl"))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_the_model_with_exits_stops_anywhere(shape: tuple[int, int, int]) -> None:
    model, x = ExitNet(7, shape[0]), torch.rand(2, *shape)
    outputs = model.exits(x)
    assert [tuple(z.shape) for z in outputs] == [(2, 7)] * 4
    torch.testing.assert_close(model(x), torch.stack(outputs).mean(0))
