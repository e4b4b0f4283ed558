"""Slices of flat vectors, against the element index and against the layout of a round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from holders_oracle import fill
from sliceable_models import ZOO, Residual, images
from torch import nn

from fedquilt.errors import InvalidValueError
from fedquilt.nn import SSLinear
from fedquilt.slices import (
    Prefix,
    RandomUnits,
    Selection,
    SliceMap,
    Slicer,
    Window,
    depth_slice,
    merge_states,
)
from fedquilt.slices.slicer import Blocks
from fedquilt.training.flat import FlatModel

SELECTIONS: list[Selection] = [Prefix("1/2"), Window("1/2", 13), RandomUnits("1/2", 2), Prefix(1)]


def labelled(model: nn.Module, buffers: list[str]) -> torch.Tensor:
    """Number the travelling elements of a model, in the model, and return the flat numbers."""
    names = [n for n, p in model.named_parameters() if p.requires_grad] + buffers
    state, start = model.state_dict(), 0
    for name in names:
        count = state[name].numel()
        numbers = torch.arange(start, start + count, dtype=torch.float32)
        state[name].copy_(numbers.reshape(state[name].shape))
        start += count
    return torch.arange(start, dtype=torch.float32)


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", ZOO)
def test_index_says_where_each_element_comes_from(name: str, selection: Selection) -> None:
    kind, inputs = ZOO[name]
    model = kind()
    vector = labelled(model, [])
    small = Slicer(model, inputs).build(selection)
    slice_map = SliceMap.between(model, small)
    flat = torch.cat([p.detach().reshape(-1) for p in small.parameters()])
    assert torch.equal(slice_map.index().float(), flat)
    assert torch.equal(slice_map.gather(vector), flat)
    assert (slice_map.size, slice_map.whole_size) == (flat.numel(), vector.numel())


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: type(s).__name__)
def test_scatter_and_cover_are_those_of_the_index(selection: Selection) -> None:
    model = Residual()
    slice_map = SliceMap.between(model, Slicer(model).build(selection))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(slice_map.whole_size, generator=generator)
    part = torch.randn(slice_map.size, generator=generator)
    index = slice_map.index()
    assert torch.equal(slice_map.gather(whole), whole[index])
    total = whole.clone()
    slice_map.scatter_add_(total, part, 0.25)
    torch.testing.assert_close(total, whole.index_add(0, index, part, alpha=0.25))
    written = whole.clone()
    slice_map.scatter_(written, part)
    assert torch.equal(written, whole.index_copy(0, index, part))
    coverage = torch.zeros(slice_map.whole_size)
    slice_map.cover_(coverage, 3.0)
    assert torch.equal(coverage, torch.zeros_like(coverage).index_fill(0, index, 3.0))


def test_the_layout_is_that_of_a_round() -> None:
    model, inputs = Residual(), images(3, 8)
    fill(model, 5)
    model.conv.bias.requires_grad_(False)
    small = Slicer(model).build(Window("1/2", 3))
    whole, part = FlatModel(model, inputs), FlatModel(small, inputs)
    slice_map = SliceMap.between(whole.module, part.module, whole.buffer_names)
    assert whole.buffer_names
    assert torch.equal(slice_map.gather(whole.read()), part.read())


def test_full_width_is_one_segment() -> None:
    model = Residual()
    slice_map = SliceMap.between(model, Slicer(model).build(1))
    assert slice_map.is_full
    assert len(slice_map.segments) == 1
    assert not SliceMap.between(model, Slicer(model).build("1/2")).is_full


def test_equal_slices_are_equal_keys() -> None:
    model = Residual()
    plan = Slicer(model)
    one, other = (SliceMap.between(model, plan.build("1/2")) for _ in range(2))
    assert one == other
    assert len({one, other, SliceMap.between(model, plan.build("1/4"))}) == 2


def test_networks_of_subset_layers_have_maps_too() -> None:
    whole = nn.Sequential(SSLinear(4, 8), SSLinear(8, 2))
    part = nn.Sequential(
        SSLinear(4, 8, out_features_ranges=("1/2", "1")),
        SSLinear(8, 2, in_features_ranges=("1/2", "1")),
    )
    vector = labelled(whole, [])
    slice_map = SliceMap.between(whole, part)
    weight = vector[:32].reshape(8, 4)[4:]
    assert torch.equal(slice_map.gather(vector)[:16], weight.reshape(-1))


def test_slices_by_depth() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    held = depth_slice(model, [["0"], ["1"], ["2"]], Blocks((0, 1), 3))
    assert list(held.maps) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    state = model.state_dict()
    client = {name: state[name] + 1 for name in held.maps}
    merged = merge_states(state, [client], [held], [2])
    assert torch.equal(merged["2.weight"], state["2.weight"])
    assert torch.equal(merged["3.bias"], state["3.bias"] + 1)

    class Shallow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("0", "1", "3"):
                self.add_module(name, nn.Linear(4, 2 if name == "3" else 4))

    slice_map = SliceMap.between(model, Shallow(), model_slice=held)
    vector = labelled(model, [])
    expected = np.r_[np.arange(40), np.arange(60, 70)]
    assert np.array_equal(slice_map.gather(vector).numpy(), expected)
    with pytest.raises(InvalidValueError, match="must be a module"):
        depth_slice(model, [["7"]], Blocks((0,), 1))


def test_vectors_and_names_must_fit() -> None:
    model = Residual()
    slice_map = SliceMap.between(model, Slicer(model).build("1/2"))
    with pytest.raises(InvalidValueError, match=r"whole of shape \(3,\) must be a vector"):
        slice_map.gather(torch.zeros(3))
    with pytest.raises(InvalidValueError, match=r"part of shape"):
        slice_map.scatter_add_(torch.zeros(slice_map.whole_size), torch.zeros(3))
    with pytest.raises(InvalidValueError, match=r"buffers=\['stats'\]"):
        SliceMap.between(model, model, ["stats"])
