"""The flat view: what travels, what stays, and that nothing is lost on the way."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.training.flat import FlatModel, matches, moving_buffers

SAMPLE = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Partly(nn.Module):
    """Frozen and trainable parameters, a constant buffer, float32 and float64 mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.fc = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.frozen(x) + self.table) * self.scale.float()


class Rebinding(nn.Module):
    """A buffer that the forward pass replaces by a new tensor instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.fc(x - self.mean)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "tied": Tied,
    "partly": Partly,
    "float64": lambda: nn.Linear(3, 2).double(),
    "bfloat16": lambda: nn.Linear(3, 2).bfloat16(),
    "float16": lambda: nn.Linear(3, 2).half(),
    "batchnorm": normalised,
    "rebinding": Rebinding,
}


def sample_for(name: str) -> torch.Tensor:
    return SAMPLE.to(getattr(torch, name)) if "float" in name else SAMPLE


@pytest.mark.parametrize("name", MODELS)
def test_writing_what_was_read_gives_the_same_model(name: str) -> None:
    model, sample = MODELS[name](), sample_for(name)
    one = FlatModel(model, sample)
    vector = one.read().clone()
    other = FlatModel(MODELS[name](), sample)
    if name == "partly":
        other.module.frozen.load_state_dict(model.frozen.state_dict())
        other.remember()  # what is not written is put back to what was remembered
    other.write(vector)
    assert torch.equal(other.read(), vector)
    assert torch.equal(other.module.eval()(sample), one.module.eval()(sample))
    state, again = one.module.state_dict(), other.module.state_dict()
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert all(state[key].dtype == model.state_dict()[key].dtype for key in state)


@pytest.mark.parametrize("name", MODELS)
def test_every_coordinate_of_a_new_vector_arrives(name: str) -> None:
    flat = FlatModel(MODELS[name](), sample_for(name))
    # Whole numbers below 256 are exact in every type here.
    vector = torch.arange(1.0, len(flat.vector) + 1).to(flat.vector.dtype)
    flat.write(vector)
    named = dict(flat.module.named_parameters()) | dict(flat.module.named_buffers())
    for segment in flat.segments:
        expected = vector[segment.start : segment.stop].view(segment.shape)
        assert torch.equal(named[segment.name].to(expected.dtype), expected)
    assert torch.equal(flat.read(), vector)
    assert flat.segments[-1].stop == len(vector)
    assert all(a.stop == b.start for a, b in zip(flat.segments, flat.segments[1:], strict=False))


def test_the_model_given_is_never_changed() -> None:
    model = normalised()
    before = copy.deepcopy(model.state_dict())
    flat = FlatModel(model, SAMPLE)
    flat.write(torch.ones_like(flat.vector))
    flat.module.train()(SAMPLE)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training


def test_parameters_are_views_so_steps_show_in_the_vector() -> None:
    flat = FlatModel(MODELS["plain"]())
    with torch.no_grad():
        flat.parameters[1].add_(7.0)
    segment = flat.segments[1]
    assert torch.equal(flat.vector[segment.start : segment.stop], flat.parameters[1].detach())
    assert not flat.is_lossy


def test_a_shared_weight_travels_once_and_stays_shared() -> None:
    flat = FlatModel(Tied())
    assert flat.names == ["first.weight", "first.bias", "second.bias"]
    assert len(flat.vector) == 9 + 3 + 3
    flat.write(torch.full_like(flat.vector, 2.0))
    assert flat.module.first.weight is flat.module.second.weight
    assert flat.module.second.weight.detach().unique().tolist() == [2.0]


def test_frozen_parameters_and_constant_buffers_stay_behind() -> None:
    flat = FlatModel(Partly(), SAMPLE)
    assert flat.names == ["scale", "fc.weight", "fc.bias"]
    assert flat.vector.dtype == torch.float64
    assert flat.is_lossy  # the float32 weights cannot hold float64 values
    assert flat.buffer_names == []


def test_low_precision_is_lossy_and_float64_is_not() -> None:
    assert FlatModel(MODELS["bfloat16"]()).is_lossy
    assert FlatModel(MODELS["bfloat16"]()).vector.dtype == torch.float32
    assert not FlatModel(MODELS["float64"]()).is_lossy
    assert FlatModel(MODELS["float64"]()).vector.dtype == torch.float64


def test_running_statistics_travel_and_whole_numbers_stay_whole() -> None:
    flat = FlatModel(normalised(), SAMPLE)
    assert flat.buffer_names == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    flat.module.train()(SAMPLE)
    first = flat.module[0]
    hidden = SAMPLE @ first.weight.T + first.bias
    vector = flat.read()
    segments = {segment.name: vector[segment.start : segment.stop] for segment in flat.segments}
    assert torch.allclose(segments["1.running_mean"], 0.1 * hidden.mean(0), atol=1e-6)
    assert torch.allclose(segments["1.running_var"], 0.9 + 0.1 * hidden.var(0), atol=1e-6)
    assert segments["1.num_batches_tracked"].tolist() == [1.0]
    average = vector.clone()
    average[flat.segments[-1].start] = 2.6  # the mean of unequal counts
    flat.write(average)
    count = flat.module[1].num_batches_tracked
    assert count.dtype == torch.int64
    assert count.item() == 3


def test_a_buffer_that_is_replaced_in_the_forward_pass_travels_too() -> None:
    flat = FlatModel(Rebinding(), SAMPLE)
    assert flat.buffer_names == ["mean"]
    flat.module.train()(SAMPLE)
    flat.module(SAMPLE)
    segment = flat.segments[-1]
    expected = 0.75 * SAMPLE.mean(0)
    assert torch.allclose(flat.read()[segment.start : segment.stop], expected)
    flat.write(torch.ones_like(flat.vector))
    assert flat.module.mean.tolist() == [1.0] * 3


def test_looking_for_moving_buffers_leaves_model_and_randomness_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert len(moving_buffers(model, SAMPLE)) == 3
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert moving_buffers(nn.BatchNorm1d(3, track_running_stats=False), SAMPLE) == []


def test_models_that_cannot_be_learned_or_flattened_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="no trainable parameter"):
        FlatModel(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(InvalidValueError, match="no trainable parameter"):
        FlatModel(nn.BatchNorm1d(3, affine=False), SAMPLE)
    with pytest.raises(InvalidValueError, match=r"weight of type torch.complex64 must be real"):
        FlatModel(nn.Linear(3, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("fc1.weight", "fc*", True),
        ("head.fc2.bias", "fc*", True),
        ("features.0.conv.weight", "conv", True),
        ("features.0.conv.weight", "features", True),
        ("features.0.conv.weight", "0.conv", True),
        ("features.0.conv.weight", "*.weight", True),
        ("features.0.conv.weight", "fc*", False),
        ("features.0.conv.weight", "feat", False),
        ("features.0.conv.weight", "*conv*", True),
        ("FC1.weight", "fc*", False),
    ],
)
def test_patterns_match_names_or_modules_of_them(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_matching_keeps_the_order_and_refuses_a_pattern_without_a_match() -> None:
    flat = FlatModel(Tied())
    assert [s.name for s in flat.matching(("second", "first.bias"))] == [
        "first.bias",
        "second.bias",
    ]
    assert [s.name for s in flat.matching(("all",))] == flat.names
    assert [s.name for s in flat.matching(("first", "*.bias"))] == flat.names
    with pytest.raises(InvalidValueError, match=r"noise_layers='fc\*' must match .*first.weight"):
        flat.matching(("first", "fc*"))


def test_a_model_without_a_plain_constructor_is_fine() -> None:
    class Needs(nn.Module):
        def __init__(self, width: int, *, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    flat = FlatModel(Needs(3, depth=2), SAMPLE)
    assert len(flat.vector) == 2 * 12
    expected = np.concatenate([p.detach().numpy().ravel() for p in flat.module.parameters()])
    assert np.array_equal(flat.read().numpy(), expected)


def test_twins_share_their_parameters_and_nothing_else() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.again = nn.Linear(3, 2), nn.Linear(3, 2)
            self.again.weight = self.linear.weight
            self.norm = nn.BatchNorm1d(2)
            self.narrow = nn.Parameter(torch.ones(2, dtype=torch.float16))
            self.calls = [0]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            return self.norm(self.linear(inputs) + self.again(inputs)) * self.narrow

    flat = FlatModel(Counting(), torch.randn(4, 3))
    twin = flat.twin()
    assert twin.names == flat.names
    assert twin.buffer_names == flat.buffer_names
    assert twin.vector is flat.vector
    assert twin.module.again.weight is twin.module.linear.weight
    assert twin.module.linear.weight is not flat.module.linear.weight
    values = torch.arange(float(flat.vector.numel()))
    twin.write(values)
    assert torch.equal(flat.module.linear.weight, twin.module.linear.weight)
    twin.module(torch.randn(4, 3))
    assert twin.module.calls != flat.module.calls
    assert torch.equal(flat.module.narrow, torch.ones(2, dtype=torch.float16))
    flat.write(values)
    assert torch.equal(flat.read(), values)
