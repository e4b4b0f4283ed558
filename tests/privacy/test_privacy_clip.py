"""Clipping: the bound holds to the last bit, and the rule is Algorithm 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from examples import examples
from fedquilt.common.vectors import norm
from fedquilt.errors import FedquiltError, InvalidValueError, NotReadyError
from fedquilt.privacy.clip import FixedClipper, QuantileClipper, clip

finite_rows = st.lists(
    hnp.arrays(np.float64, 4, elements=st.floats(-1e6, 1e6)), min_size=1, max_size=8
)


def with_norms(*norms: float) -> list[np.ndarray]:
    """Vectors of these lengths."""
    return [np.array([value, 0.0, 0.0]) for value in norms]


@pytest.mark.parametrize(
    "vector",
    [
        np.array([3.0, -4.0]),
        np.array([[3.0], [-4.0]], dtype=np.float32),
        np.array([3, -4]),
        torch.tensor([3.0, -4.0]),
        torch.tensor([[3.0, -4.0]], dtype=torch.bfloat16),
        torch.tensor([3, -4]),
    ],
)
def test_norm_and_clip_take_arrays_and_tensors(vector: Any) -> None:
    assert norm(vector) == 5.0
    clipped = clip(vector, 1.0)
    assert type(clipped) is type(vector)
    assert clipped.shape == vector.shape
    tolerance = 2e-2 if getattr(vector, "dtype", None) == torch.bfloat16 else 1e-6
    flat = np.asarray(torch.as_tensor(clipped).double()).ravel()
    assert flat == pytest.approx([0.6, -0.8], rel=tolerance)
    assert clip(vector, 5.0) is vector
    assert clip(vector, 7.0) is vector


def test_norms_are_taken_in_float64() -> None:
    small = np.full(1_000_000, 1e-4, dtype=np.float32)
    assert norm(small) == pytest.approx(0.1, rel=1e-7)
    assert norm(torch.from_numpy(small)) == pytest.approx(0.1, rel=1e-7)
    assert norm(np.array([3e38, 3e38], dtype=np.float32)) == pytest.approx(3e38 * 2**0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_becomes_zero(bad: float) -> None:
    for vector in (np.array([1.0, bad]), torch.tensor([1.0, bad])):
        clipped = clip(vector, 100.0)
        assert type(clipped) is type(vector)
        assert clipped.tolist() == [0.0, 0.0]


kinds = ["float64", "float32", "float16", "torch.float64", "torch.float32", "torch.bfloat16"]


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 200),
    scale=st.floats(1e-2, 1e2),
    bound=st.floats(1e-2, 1e2),
)
@pytest.mark.parametrize("kind", kinds)
def test_no_rounding_carries_a_vector_beyond_the_bound(
    kind: str, seed: int, size: int, scale: float, bound: float
) -> None:
    values = scale * np.random.default_rng(seed).standard_normal(size)
    vector: Any
    if kind.startswith("torch."):
        vector = torch.from_numpy(values).to(getattr(torch, kind.removeprefix("torch.")))
        exact = vector.double().numpy()
    else:
        vector = values.astype(kind)
        exact = vector.astype(np.float64)
    length = np.linalg.norm(exact)
    clipped = clip(vector, bound)
    as_float64 = np.asarray(torch.as_tensor(clipped).double())
    assert np.linalg.norm(as_float64) <= bound
    expected = exact * min(1.0, bound / length) if length else exact
    coarse = {"float16": 4e-3, "torch.bfloat16": 4e-2}.get(kind, 1e-6)
    assert np.allclose(as_float64, expected, rtol=coarse, atol=coarse * bound)


def test_the_first_value_is_the_target_then_momentum() -> None:
    """Algorithm 1: C_0 = target, C_t = gamma C_(t-1) + (1 - gamma) target."""
    clipper = QuantileClipper(quantile=0.9, momentum=0.95, min_clip=0.1, max_clip=10.0)
    assert clipper.get_current_clip_value() is None
    # Ten norms 1 .. 10: the 0.9 quantile lies 0.1 of the way from 9 to 10.
    assert clipper.update_clip_value(with_norms(*range(1, 11))) == pytest.approx(9.1)
    assert clipper.update_clip_value(with_norms(2.0)) == pytest.approx(0.95 * 9.1 + 0.05 * 2.0)
    third = 0.95 * (0.95 * 9.1 + 0.05 * 2.0) + 0.05 * 10.0
    assert clipper.update_clip_value(with_norms(500.0)) == pytest.approx(third)
    assert clipper.clip_history == pytest.approx([9.1, 0.95 * 9.1 + 0.1, third])


@pytest.mark.parametrize(("length", "expected"), [(1e-9, 0.5), (0.0, 0.5), (3.0, 3.0), (1e9, 5.0)])
def test_targets_stay_between_the_limits(length: float, expected: float) -> None:
    clipper = QuantileClipper(min_clip=0.5, max_clip=5.0)
    assert clipper.update_clip_value(with_norms(length)) == expected


def test_an_initial_value_takes_part_in_the_first_round() -> None:
    clipper = QuantileClipper(momentum=0.5, initial_clip=4.0)
    assert clipper.clip_gradient(np.array([8.0])) == pytest.approx([4.0])
    assert clipper.update_clip_value(with_norms(2.0)) == pytest.approx(3.0)
    clipper.reset()
    assert clipper.get_current_clip_value() == 4.0
    assert clipper.clip_history == []


def test_norms_that_are_not_finite_are_left_out() -> None:
    clipper = QuantileClipper(quantile=0.5)
    bad = [np.array([np.nan, 1.0]), np.array([np.inf]), torch.tensor([-np.inf, 0.0])]
    assert clipper.update_clip_value([*bad, *with_norms(2.0, 4.0)]) == pytest.approx(3.0)


def test_without_a_finite_norm_the_last_value_or_min_clip_comes_back_unrecorded() -> None:
    clipper = QuantileClipper(min_clip=0.2)
    assert clipper.update_clip_value([np.array([np.nan])]) == 0.2
    assert clipper.get_current_clip_value() is None
    assert clipper.clip_history == []
    clipper.update_clip_value(with_norms(2.0))
    assert clipper.update_clip_value([np.array([np.inf])]) == 2.0
    assert clipper.clip_history == [2.0]
    started = QuantileClipper(initial_clip=1.5)
    assert started.update_clip_value([np.array([np.nan])]) == 1.5


def test_clipping_needs_a_value_first() -> None:
    for call in (
        lambda: QuantileClipper().clip_gradient(np.ones(2)),
        lambda: QuantileClipper().clip_gradients([np.ones(2)]),
    ):
        with pytest.raises(RuntimeError, match="update_clip_value") as caught:
            call()
        assert isinstance(caught.value, NotReadyError)
        assert isinstance(caught.value, FedquiltError)


@pytest.mark.parametrize("empty", [[], np.empty((0, 3)), torch.empty(0, 3)])
def test_a_round_without_updates_is_an_error_and_changes_nothing(empty: Any) -> None:
    clipper = QuantileClipper()
    clipper.update_clip_value(with_norms(1.0))
    with pytest.raises(ValueError, match="at least one update"):
        clipper.update_clip_value(empty)
    assert clipper.clip_history == [1.0]


@pytest.mark.parametrize(
    "options",
    [
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"quantile": 1.5},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"min_clip": 0.0},
        {"min_clip": -0.1},
        {"min_clip": 10.0, "max_clip": 5.0},
        {"min_clip": 1.0, "max_clip": 1.0},
        {"initial_clip": 0.0},
        {"initial_clip": 20.0},
        {"initial_clip": float("nan")},
        {"quantile": "0.9"},
    ],
)
def test_bad_construction_is_a_value_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        QuantileClipper(**options)
    assert isinstance(caught.value, InvalidValueError)


def test_the_statistics_have_the_documented_keys() -> None:
    clipper = QuantileClipper(momentum=0.0)
    assert clipper.get_statistics() == {"current_clip": None, "num_updates": 0}
    for length in (1.0, 2.0, 6.0):
        clipper.update_clip_value(with_norms(length))
    assert clipper.get_statistics() == {
        "current_clip": 6.0,
        "num_updates": 3,
        "mean_clip": 3.0,
        "std_clip": pytest.approx(np.std([1.0, 2.0, 6.0])),
        "min_clip_observed": 1.0,
        "max_clip_observed": 6.0,
    }
    assert clipper.compute_gradient_norms(with_norms(1.0, 2.0)).tolist() == [1.0, 2.0]


@settings(max_examples=examples(60))
@given(
    rounds=st.lists(finite_rows, min_size=1, max_size=5),
    quantile=st.floats(0.01, 0.99),
    momentum=st.floats(0, 0.99),
)
def test_the_bound_stays_inside_and_everything_obeys_it(
    rounds: list[list[np.ndarray]], quantile: float, momentum: float
) -> None:
    clipper = QuantileClipper(quantile, momentum, min_clip=0.3, max_clip=7.0)
    value: float | None = None
    for updates in rounds:
        bound = clipper.update_clip_value(updates)
        norms = sorted(float(np.sqrt(np.sum(update**2))) for update in updates)
        place = quantile * (len(norms) - 1)
        low = int(place)
        high = min(low + 1, len(norms) - 1)
        target = norms[low] + (place - low) * (norms[high] - norms[low])
        target = min(max(target, 0.3), 7.0)
        value = target if value is None else momentum * value + (1 - momentum) * target
        assert bound == pytest.approx(value, rel=1e-9)
        assert 0.3 * (1 - 1e-12) <= bound <= 7.0 * (1 + 1e-12)
        clipped = clipper.clip_gradients(updates)
        assert all(np.linalg.norm(update) <= bound for update in clipped)


def test_a_saved_state_continues_alike() -> None:
    one, other = QuantileClipper(), QuantileClipper()
    other.load_state(one.state())
    assert other.get_current_clip_value() is None
    one.update_clip_value(with_norms(3.0))
    other.load_state(one.state())
    assert other.update_clip_value(with_norms(1.0)) == one.update_clip_value(with_norms(1.0))
    assert other.clip_history == one.clip_history


def test_the_fixed_clipper_never_moves() -> None:
    clipper = FixedClipper(2.0)
    assert clipper.update_clip_value(with_norms(100.0)) == 2.0
    assert clipper.update_clip_value([]) == 2.0
    assert clipper.get_current_clip_value() == 2.0
    clipped = clipper.clip_gradients([np.array([0.0, 4.0]), np.array([1.0, 0.0])])
    assert np.allclose(clipped, [[0.0, 2.0], [1.0, 0.0]])
    clipper.load_state(clipper.state())
    for value in (0.0, -1.0, float("nan"), "1"):
        with pytest.raises(InvalidValueError, match="clip_norm"):
            FixedClipper(value)  # type: ignore[arg-type]
