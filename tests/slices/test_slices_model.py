"""Sub-networks of ordinary models.

The oracle: the whole model with zeros everywhere outside the slice computes what the
sub-network computes, because a hidden unit without weights stays at zero.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from holders_oracle import fill, snapshot
from sliceable_models import ZOO, Attention, LeNet, Residual, Text, ViT, images, tokens
from torch import Tensor, nn
from torch.nn import functional

from fedquilt.errors import InvalidValueError
from fedquilt.fed import aggregate, distribute, slice_model
from fedquilt.models.networks import ResNet18
from fedquilt.slices import (
    FixedStructure,
    ModelSlice,
    Prefix,
    RandomUnits,
    Selection,
    Slicer,
    Window,
    slice_between,
)
from run_samples import same_tensors

SELECTIONS: list[Selection] = [
    Prefix("1/2"),
    Prefix("3/4"),
    Window("1/2", 3),
    RandomUnits("1/2", 5),
    FixedStructure(5, 3),
]


def masked(model: nn.Module, held: ModelSlice) -> nn.Module:
    """Return a copy of a model with zeros outside a slice."""
    whole = copy.deepcopy(model)
    for name, tensor in whole.state_dict().items():
        part = held.maps[name].gather(tensor).clone()
        if tensor.dtype.is_floating_point:
            tensor.zero_()
            held.maps[name].scatter_(tensor, part)
    return whole


def sizes(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", ZOO)
def test_the_slice_computes_what_the_masked_model_does(name: str, selection: Selection) -> None:
    kind, inputs = ZOO[name]
    torch.manual_seed(0)
    model = kind()
    small = slice_model(model, selection, sample=inputs).eval()
    whole = masked(model, slice_between(model, small)).eval()
    torch.testing.assert_close(small(inputs), whole(inputs), rtol=1e-4, atol=1e-5)
    assert sizes(small) < sizes(model)


@pytest.mark.parametrize("selection", [Prefix("1/2"), Window("1/2", 12), FixedStructure(1, 2)])
def test_slices_of_whole_norm_groups_compute_what_the_masked_model_does(
    selection: Selection,
) -> None:
    torch.manual_seed(0)
    model, inputs = Text(), tokens(13, 7)
    small = slice_model(model, selection, sample=inputs)
    assert small.norm.num_groups == 2
    whole = masked(model, slice_between(model, small))
    torch.testing.assert_close(small(inputs), whole(inputs))
    assert slice_model(model, RandomUnits("1/2", 1), sample=inputs)(inputs).shape == (4, 3)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet18(norm: str) -> None:
    torch.manual_seed(0)
    model = ResNet18(norm=norm).eval()
    assert model.get_num_parameters() == 11_173_962
    plan = Slicer(model)
    inputs = images(3, 16)
    for width, parameters in (("1/2", 2_797_610), ("1/4", 701_466), ("1/8", 176_402)):
        small = plan.build(width)
        assert sizes(small) == parameters
        whole = masked(model, plan.slice(width))
        torch.testing.assert_close(small(inputs), whole(inputs), rtol=1e-4, atol=1e-4)


def test_a_written_width_is_followed_in_both_modes() -> None:
    model = LeNet()
    model.train()
    small = slice_model(model, "1/2")
    assert model.training
    assert small.training
    assert isinstance(small, LeNet)
    assert small.twice() == 2
    again = copy.deepcopy(small).eval()
    inputs = images(1, 28)
    assert torch.equal(again(inputs), again(inputs))
    torch.manual_seed(0)
    assert not torch.equal(small(inputs), small(inputs))  # dropout is on in training
    assert small(inputs).shape == (4, 10)


def test_full_width_is_the_model_itself() -> None:
    model = Residual().eval()
    small = slice_model(model, 1).eval()
    assert torch.equal(small(images(3, 8)), model(images(3, 8)))
    assert same_tensors(snapshot(small), snapshot(model))
    assert slice_between(model, small).is_full


def test_the_model_is_neither_changed_nor_shared() -> None:
    model = Residual()
    model.fc.bias.requires_grad_(False)
    before = snapshot(model)
    small = slice_model(model, "1/2")
    fill(small, 3)
    assert same_tensors(before, snapshot(model))
    assert not dict(small.named_parameters())["fc.bias"].requires_grad
    assert dict(small.named_parameters())["conv.weight"].requires_grad


def test_extract_then_merge_of_untouched_slices_is_the_identity() -> None:
    for kind, inputs in ZOO.values():
        model = kind()
        fill(model, 2)
        before = snapshot(model)
        plan = Slicer(model, inputs)
        clients = [plan.build(one) for one in ("1/2", "3/4", Window("1/2", 7), Window("1/4", 7))]
        fill(clients[0], 9)
        distribute(clients[0], model)
        aggregate(model, clients, [1, 5, 2, 7])
        assert same_tensors(before, snapshot(model))


def test_tied_tensors_stay_tied() -> None:
    model = Attention()
    small = slice_model(model, "1/2", sample=ZOO["attention"][1])
    assert small.head.weight is small.embed.weight
    fill(small, 4)
    aggregate(model, [small], [1])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight[:, :8], small.embed.weight)


def test_standard_transformer_encoder() -> None:
    torch.manual_seed(0)
    model = ViT().eval()
    small = slice_model(model, "1/2").eval()
    assert small(images(3, 8)).shape == (4, 3)
    assert small.token.shape == (1, 1, 8)
    assert small.place.shape == (1, 5, 8)
    block = small.encoder.layers[0]
    assert (block.self_attn.num_heads, block.linear1.out_features) == (2, 16)
    assert block.norm1.normalized_shape == (8,)
    # what the block computes from its own tensors, step by step
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    attended = block.self_attn(x, x, x, need_weights=False)[0]
    y = functional.layer_norm(x + attended, (8,), block.norm1.weight, block.norm1.bias)
    z = y + block.linear2(torch.relu(block.linear1(y)))
    expected = functional.layer_norm(z, (8,), block.norm2.weight, block.norm2.bias)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-5)


def test_axes_are_tied_by_sums_and_pinned_by_the_output() -> None:
    plan = Slicer(Residual())
    assert [(a.origin, a.units, a.pinned) for a in plan.axes] == [
        ("stem.0", 16, False),
        ("fc", 5, True),
    ]
    mobile = Slicer(ZOO["mobile"][0]())
    units = {axis.origin: axis.units for axis in mobile.axes}
    assert units["point"] == 4  # 24 channels in the 4 groups of the grouped convolution
    assert units["stem"] == 16


def test_what_is_added_to_the_input_stays_whole_and_so_does_what_is_added_to_it() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Conv2d(4, 4, 1)
            self.wide = nn.Conv2d(4, 8, 1)
            self.back = nn.Conv2d(8, 4, 1)
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.same(x)
            x = x + self.back(torch.relu(self.wide(x)))
            return self.fc(x.mean((2, 3)))

    model = Skip()
    small = slice_model(model, "1/2")
    assert (small.same.out_channels, small.wide.out_channels, small.back.out_channels) == (4, 4, 4)
    whole = masked(model, slice_between(model, small))
    torch.testing.assert_close(small(images(4, 3)), whole(images(4, 3)))


def test_the_scaler_acts_in_training_only() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plain, scaled = slice_model(model, "1/4"), slice_model(model, "1/4", scaled=True)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    hidden = plain[0](x)
    torch.testing.assert_close(scaled[0](x), 4 * hidden)
    torch.testing.assert_close(scaled[2](hidden.relu()), plain[2](hidden.relu()))
    torch.testing.assert_close(scaled.eval()(x), plain.eval()(x))
    assert list(scaled.state_dict()) == list(model.state_dict())


class Apply(nn.Module):
    """A convolution, then something, then a classifier."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.function = function
        self.fc: nn.Module = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function(self, self.conv(x), x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, y, x: torch.cumsum(y, 1).mean((2, 3)), "'cumsum'.*not known"),
        (lambda m, y, x: torch.cat([y, x], 1).mean((2, 3))[:, :8], "may be indexed"),
        (lambda m, y, x: y[:, :4].repeat(1, 2, 1, 1).mean((2, 3)), "may be indexed"),
        (lambda m, y, x: y.chunk(2, dim=1)[0].mean((2, 3)), "must not be split"),
        (lambda m, y, x: y.view(4, 2, 4, 8, 8).mean((3, 4)), "use flatten"),
        (lambda m, y, x: y.permute(0, 2, 3, 1).flatten(1), "must be the first"),
        (lambda m, y, x: functional.pad(y, (0, 0, 0, 0, 1, 1)).mean((2, 3)), "along the cut"),
        (lambda m, y, x: (y if y.sum() > 0 else -y).mean((2, 3)), "torch.fx can trace"),
        (lambda m, y, x: (y + m.fc(y.permute(0, 2, 3, 1))).mean((2, 3)), "same dimension"),
    ],
)
def test_what_is_not_understood_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        slice_model(Apply(function), "1/2")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, y, x: y.permute(0, 2, 3, 1).mean(dim=(1, 2)),
        lambda m, y, x: (y * y.mean(1, keepdim=True)).mean((2, 3)),
        lambda m, y, x: functional.adaptive_max_pool2d(y, 1).squeeze(-1).squeeze(-1),
        lambda m, y, x: y[:, :, 0, 1:].amax(-1),
        lambda m, y, x: functional.avg_pool2d(y, 2).chunk(2, dim=3)[1].mean((2, 3)),
        lambda m, y, x: y.reshape(y.size(0), y.size(1), -1).mean(2),
        lambda m, y, x: functional.interpolate(y, scale_factor=2).unsqueeze(1)[:, 0].mean((2, 3)),
        lambda m, y, x: (2 - y / y.shape[1]).mean((2, 3)),
    ],
)
def test_ways_from_channels_to_features(function: Any) -> None:
    torch.manual_seed(0)
    model = Apply(function)
    small = slice_model(model, "1/2")
    assert small.conv.out_channels == 4
    assert small(images(3, 8)).shape == (4, 2)


def test_layers_that_cannot_be_cut_are_refused_or_kept_whole() -> None:
    def paired(m: Apply, y: Tensor, x: Tensor) -> Tensor:
        flat = y.flatten(2).transpose(1, 2)
        return m.pair(flat, flat).mean(1)

    model = Apply(paired)
    model.pair = nn.Bilinear(8, 8, 8)
    model.fc = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(InvalidValueError, match=r"layer 'pair' \(Bilinear\).*name it in `whole`"):
        slice_model(model, "1/2")
    small = slice_model(model, "1/2", whole=["pair"])
    assert small.conv.out_channels == 8
    assert small.fc[0].out_features == 3
    assert small(images(3, 8)).shape == (4, 2)


def test_a_width_that_keeps_nothing_names_the_layer() -> None:
    with pytest.raises(InvalidValueError, match=r"layer 'stem\.0': width=1/32 must keep"):
        slice_model(Residual(), "1/32")
    with pytest.raises(InvalidValueError, match="layer 'embed': width=1/8"):
        slice_model(Attention(), "1/8", sample=ZOO["attention"][1])
    with pytest.raises(InvalidValueError, match="width=0 must be > 0"):
        slice_model(Residual(), 0)
    with pytest.raises(InvalidValueError, match="width='2' must be"):
        slice_model(Residual(), "2")


def test_a_model_without_a_hidden_axis_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="must have an axis"):
        slice_model(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "1/2")


def test_reparametrised_layers_are_refused() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    with pytest.raises(InvalidValueError, match="parametrizations"):
        slice_model(nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 2)), "1/2")


def test_a_layer_used_twice_is_cut_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8)
            self.middle = nn.Linear(8, 8)
            self.last = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            x = torch.relu(self.middle(x))
            return self.last(torch.relu(self.middle(x)))

    model = Twice()
    small = slice_model(model, Window("1/2", 6))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(small(x), masked(model, slice_between(model, small))(x))


def test_slices_of_a_plan_are_remembered() -> None:
    plan = Slicer(Residual())
    assert plan.slice("1/2") is plan.slice(0.5)
    assert plan.slice(Window("1/2", 1)) is not plan.slice(Window("1/2", 2))
