"""Kinds of layers and calls that models are written with: cut rightly, or refused with advice.

The oracle is that of `test_slices_model`: the whole model with zeros outside the slice.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from sliceable_models import LeNet
from test_slices_model import masked
from torch import Tensor, nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.fed import aggregate, distribute, slice_model
from fedquilt.nn import SSBatchNorm2d
from fedquilt.slices import Prefix, RandomUnits, Slicer, Window, slice_between

SELECTIONS = [Prefix("1/2"), Window("1/2", 3), RandomUnits("1/2", 5)]


class Recurrent(nn.Module):
    """Words, a recurrent network of two layers, the last step or the last state."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool, last_state: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.rnn = kind(8, 12, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.last_state = last_state
        width = 12 * (2 if bidirectional and not last_state else 1)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.rnn(self.words(x))
        if not self.last_state:
            return self.out(outputs[:, -1])
        hidden = state[0] if isinstance(self.rnn, nn.LSTM) else state
        return self.out(hidden[-1])


class SqueezeExcite(nn.Module):
    """The gate as it is usually written, with views there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.Sigmoid())
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        b, c, _, _ = x.size()
        gate = self.gate(self.pool(x).view(b, c)).view(b, c, 1, 1)
        return self.out((x * gate).mean((2, 3)))


class Pointwise(nn.Module):
    """Maxima over points, in their three spellings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x))
        if self.how == "index":
            return self.two(x.max(1)[0])
        if self.how == "name":
            return self.two(torch.max(x, dim=1).values)
        return self.two(torch.max(x, x * 0.5).sum(1))


class SkipFromInput(nn.Module):
    """The input joined to hidden features, as in radiance fields and U-Nets."""

    def __init__(self, images: bool) -> None:
        super().__init__()
        self.images = images
        kind: Any = nn.Conv2d if images else nn.Linear
        size = {"kernel_size": 1} if images else {}
        self.one, self.two = kind(3, 8, **size), kind(11, 6, **size)
        self.out = kind(9, 4, **size)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.two(torch.cat([torch.relu(self.one(x)), x], 1)))
        hidden = self.out(torch.cat([x, hidden], 1))
        return hidden.mean((2, 3)) if self.images else hidden


class TwoRanks(nn.Module):
    """A vector and a set of points: two inputs of different rank."""

    def __init__(self) -> None:
        super().__init__()
        self.vector, self.points, self.out = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, vector: Tensor, points: Tensor) -> Tensor:
        return self.out(torch.relu(self.vector(vector)) + torch.relu(self.points(points)).sum(1))


class Constants(nn.Module):
    """A non-persistent buffer and a plain attribute of the width that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.arange(1.0, 9.0), persistent=False)
        self.shift = torch.arange(8.0)[None]

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)) * self.scale + self.shift)


def matrices(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


KINDS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    **{
        f"{kind.__name__}-{both}-{last}": (
            Recurrent(kind, both, last),
            (torch.arange(10).view(2, 5),),
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for both in (False, True)
        for last in (False, True)
    },
    "squeeze-excite": (SqueezeExcite(), (matrices(2, 3, 6, 6),)),
    **{f"max-{how}": (Pointwise(how), (matrices(2, 7, 3),)) for how in ("index", "name", "two")},
    "skip-vector": (SkipFromInput(False), (matrices(2, 3),)),
    "skip-image": (SkipFromInput(True), (matrices(2, 3, 4, 4),)),
    "two-ranks": (TwoRanks(), (matrices(2, 3), matrices(2, 6, 2))),
}


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", KINDS)
def test_the_slice_computes_what_the_masked_model_does(name: str, selection: Any) -> None:
    model, inputs = KINDS[name]
    plan = Slicer(model.eval(), inputs if len(inputs) > 1 else inputs[0])
    small = plan.build(selection)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    whole = masked(model, plan.slice(selection))
    torch.testing.assert_close(small(*inputs), whole(*inputs))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(1.0)
    aggregate(model, [small], [1])
    moved = {n: model.state_dict()[n] - before[n] for n in before}
    held = slice_between(model, small)
    for key, difference in moved.items():
        assert int(difference.ne(0).sum()) == held.maps[key].numel
    model.load_state_dict(before)


def test_a_vector_as_the_only_sample_does_not_speak_for_the_other_input() -> None:
    model, inputs = KINDS["two-ranks"]
    with pytest.raises(InvalidValueError, match="a tuple where it has several"):
        slice_model(model, "1/2", sample=inputs[0])


def test_rms_norm_normalises_over_what_is_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, 4))
    small = slice_model(model, Window("1/2", 6))
    assert small[1].normalized_shape == (4,)
    x = matrices(5, 3)
    hidden = model[0](x)[:, [6, 7, 0, 1]]
    wanted = hidden / hidden.square().mean(-1, keepdim=True).add(torch.finfo().eps).sqrt()
    torch.testing.assert_close(small[:2](x), wanted)


def test_tensors_of_no_state_dict_are_cut_with_the_width() -> None:
    model, x = Constants(), matrices(5, 3)
    plan = Slicer(model)
    for selection in SELECTIONS:
        small = plan.build(selection)
        whole = masked(model, plan.slice(selection))
        torch.testing.assert_close(small(x), whole(x))
    small = slice_model(model, "1/2")
    assert isinstance(small.scale, Tensor)
    assert "scale" not in small.state_dict()
    assert model.scale.shape == (8,)


def test_computed_constants_are_refused() -> None:
    class Computed(Constants):
        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) + 2 * self.shift)

    with pytest.raises(InvalidValueError, match="register it as a buffer"):
        slice_model(Computed(), "1/2")


def test_windows_of_constants_are_those_of_their_round() -> None:
    model, x = Constants(), matrices(12, 3)
    y = torch.arange(12) % 4
    clients = [range(6), range(6, 12)]
    common = {"num_rounds": 3, "tiers": "1/2", "quiet": True, "output_dir": None}
    done = fedquilt.run(model, (x, y), (x, y), clients, method="fedrolex", **common)
    assert done.final_accuracy is not None


def test_slices_with_a_written_width_can_be_pickled() -> None:
    small = slice_model(LeNet(), "1/2").eval()
    x = matrices(2, 1, 28, 28)
    for again in (pickle.loads(pickle.dumps(small)), copy.deepcopy(small)):
        torch.testing.assert_close(again(x), small(x))
        assert again.twice() == 2
        assert slice_between(LeNet(), again) == slice_between(LeNet(), small)
        again.train()
        assert not torch.equal(again(x), again(x))  # dropout: the graph of training mode


@pytest.mark.parametrize("plain_child", [False, True])
def test_batch_norms_with_and_without_statistics_fit(plain_child: bool) -> None:
    father: nn.Module = nn.BatchNorm2d(8)
    child: nn.Module = SSBatchNorm2d(8, features_ranges=("0", "1/2"))
    if plain_child:
        father = SSBatchNorm2d(8)
        child = SSBatchNorm2d(8, track_running_stats=True, features_ranges=("0", "1/2"))
    with torch.no_grad():
        father.weight.copy_(torch.arange(8.0))
    child.reset_parameters_from_father_layer(father)
    assert child.weight.tolist() == [0.0, 1.0, 2.0, 3.0]
    whole, part = nn.Sequential(father), nn.Sequential(child)
    distribute(part, whole)
    with torch.no_grad():
        child.weight.add_(1.0)
    aggregate(whole, [part], [3])
    assert father.weight.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0]
    for layer in (father, child):
        if layer.running_mean is not None:
            assert not layer.running_mean.any()  # nobody's statistics moved


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


class OwnTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 8), OwnAttention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(x)
        return self.head((x + self.mlp(x)).mean(1))


def test_the_advice_about_attention_of_ones_own_can_be_followed() -> None:
    x = matrices(4, 6, 3)
    with pytest.raises(InvalidValueError, match="whole='attention'") as caught:
        slice_model(OwnTransformer(), "1/2", sample=x)
    assert "nn.MultiheadAttention" in str(caught.value)
    small = slice_model(OwnTransformer(), "1/2", sample=x, whole=["attention"])
    assert small(x).shape == (4, 4)
    assert small.mlp[0].out_features == 8
    y, clients = torch.tensor([0, 1, 2, 3]), [[0, 1], [2, 3]]
    common = {"num_rounds": 1, "quiet": True, "output_dir": None, "method": "heterofl"}
    done = fedquilt.run(
        *(OwnTransformer(), (x, y), (x, y), clients), tiers="1,1/2", whole="attention", **common
    )
    assert done.result["slices"]["tiers"][1]["parameters"] < 1000


def test_a_first_state_of_ones_own_is_refused() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x, torch.zeros(1, x.shape[0], 8))[0][:, -1])

    with pytest.raises(InvalidValueError, match="a first state of its own has a width"):
        slice_model(Started(), "1/2", sample=matrices(2, 5, 3))


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="call the model once on a batch"):
        slice_model(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)), "1/2")
