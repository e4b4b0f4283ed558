"""Gather and scatter against NumPy's open index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquilt.errors import InvalidValueError
from fedquilt.slices import Axis, TensorMap
from fedquilt.slices.tensor_map import MAX_BLOCKS


@st.composite
def maps(draw: st.DrawFn) -> tuple[TensorMap, list[list[int]]]:
    """Draw a map of 0 to 4 dimensions: whole, in runs, or scattered on each."""
    axes, index = [], []
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(1, 9))
        kind = draw(st.sampled_from(["full", "run", "wrap", "scattered"]))
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size))
        if kind == "full":
            one = list(range(size))
        elif kind == "run":
            one = list(range(start, min(size, start + length)))
        elif kind == "wrap":
            one = [(start + k) % size for k in range(length)]
        else:
            one = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
        axes.append(Axis.from_index(size, one))
        index.append(one)
    return TensorMap(tuple(axes)), index


def arrays(tensor_map: TensorMap, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    whole = generator.normal(size=tensor_map.shape)
    return np.asarray(whole), np.asarray(generator.normal(size=tensor_map.packed_shape))


@given(maps())
def test_gather_is_the_open_index(drawn: tuple[TensorMap, list[list[int]]]) -> None:
    tensor_map, index = drawn
    whole, _ = arrays(tensor_map)
    expected = whole[np.ix_(*index)] if index else whole
    assert np.array_equal(tensor_map.gather(torch.tensor(whole)).numpy(), expected)
    assert tensor_map.packed_shape == expected.shape
    flat = tensor_map.flat_index().numpy()
    assert np.array_equal(whole.reshape(-1)[flat], expected.reshape(-1))


@given(maps(), st.booleans())
def test_scatter_and_scatter_add(
    drawn: tuple[TensorMap, list[list[int]]], transposed: bool
) -> None:
    tensor_map, index = drawn
    whole, packed = arrays(tensor_map)
    expected, added, counted = whole.copy(), whole.copy(), whole.copy()
    place = np.ix_(*index) if index else ()
    expected[place] = packed
    added[place] += 0.5 * packed
    counted[place] += 3.0

    def copy_of_whole() -> torch.Tensor:
        tensor = torch.tensor(whole)
        if transposed and tensor.dim() > 1:  # same values, not contiguous
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return tensor

    result = copy_of_whole()
    tensor_map.scatter_(result, torch.tensor(packed))
    assert np.array_equal(result.numpy(), expected)
    result = copy_of_whole()
    tensor_map.scatter_add_(result, torch.tensor(packed), 0.5)
    np.testing.assert_allclose(result.numpy(), added, rtol=1e-14)
    result = copy_of_whole()
    tensor_map.scatter_add_(result, 3.0)
    np.testing.assert_allclose(result.numpy(), counted, rtol=1e-14)


def test_scattered_choices_beyond_the_blocks_are_indexed() -> None:
    every_second = Axis.from_index(20, list(range(0, 20, 2)))
    tensor_map = TensorMap((every_second, every_second, Axis.full(3)))
    assert tensor_map._number_of_blocks > MAX_BLOCKS
    whole, packed = arrays(tensor_map)
    result = torch.tensor(whole)
    tensor_map.scatter_(result, torch.tensor(packed))
    whole[::2, ::2] = packed
    assert np.array_equal(result.numpy(), whole)


def test_a_prefix_is_a_view_and_gather_is_differentiable() -> None:
    tensor_map = TensorMap((Axis(4, ((0, 2),)), Axis.full(3)))
    whole = torch.zeros(4, 3, requires_grad=True)
    part = tensor_map.gather(whole)
    assert part.data_ptr() == whole.data_ptr()
    part.sum().backward()
    assert whole.grad is not None
    assert whole.grad.sum(1).tolist() == [3, 3, 0, 0]


def test_wrong_shapes_are_refused() -> None:
    tensor_map = TensorMap((Axis(4, ((0, 2),)),))
    with pytest.raises(InvalidValueError, match=r"whole tensor of shape \(5,\) must have"):
        tensor_map.gather(torch.zeros(5))
    with pytest.raises(InvalidValueError, match="packed tensor"):
        tensor_map.scatter_(torch.zeros(4), torch.zeros(3))


def test_equal_choices_are_equal_maps() -> None:
    one = TensorMap((Axis.from_runs(6, [(0, 2), (2, 3)]),))
    other = TensorMap((Axis.from_index(6, [0, 1, 2]),))
    assert one == other
    assert hash(one) == hash(other)
    assert one != TensorMap((Axis.from_index(6, [2, 1, 0]),))
