"""The mean over holders, against a brute-force mean in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from holders_oracle import mean_over_holders as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fedquilt.slices import Axis, TensorMap, mean_over_holders

Client = tuple[list[list[int]], float]


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Client]]:
    """Draw clients of one tensor: nested, crossing, equal or disjoint slices, weights >= 0."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    kind = draw(st.sampled_from(["prefix", "any"]))
    clients: list[Client] = []
    for _ in range(draw(st.integers(0, 6))):
        index = []
        for size in shape:
            if kind == "prefix":
                index.append(list(range(draw(st.integers(1, size)))))
            else:
                index.append(draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)))
        clients.append((index, draw(st.sampled_from([0.0, 1.0, 2.0, 0.5, 600.0]))))
    return shape, clients


def parts_of(
    shape: tuple[int, ...], clients: list[Client], seed: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    previous = torch.randn(shape, generator=generator)
    sizes = [[len(one) for one in index] for index, _ in clients]
    return previous, [torch.randn(size, generator=generator) for size in sizes]


def merge(
    previous: torch.Tensor, clients: list[Client], values: list[torch.Tensor]
) -> torch.Tensor:
    groups: dict[TensorMap, list[tuple[torch.Tensor, float]]] = {}
    for (index, weight), value in zip(clients, values, strict=True):
        axes = (Axis.from_index(n, one) for n, one in zip(previous.shape, index, strict=True))
        if weight > 0:
            groups.setdefault(TensorMap(tuple(axes)), []).append((value, weight))
    return mean_over_holders(previous, groups)


@settings(max_examples=examples(60))
@given(cohorts(), st.integers(0, 5))
def test_equals_the_brute_force_mean(
    cohort: tuple[tuple[int, ...], list[Client]], seed: int
) -> None:
    shape, clients = cohort
    previous, values = parts_of(shape, clients, seed)
    result = merge(previous, clients, values)
    parts = [(index, v.numpy(), w) for (index, w), v in zip(clients, values, strict=True)]
    np.testing.assert_allclose(result.numpy(), oracle(previous.numpy(), parts), atol=1e-6)


@given(cohorts(), st.integers(0, 5))
def test_what_nobody_holds_keeps_its_bits(
    cohort: tuple[tuple[int, ...], list[Client]], seed: int
) -> None:
    shape, clients = cohort
    previous, values = parts_of(shape, clients, seed)
    result = merge(previous, clients, values)
    held = np.zeros(shape, dtype=bool)
    for index, weight in clients:
        held[np.ix_(*index)] |= weight > 0
    assert np.array_equal(
        result.numpy()[~held].view(np.uint32), previous.numpy()[~held].view(np.uint32)
    )


@given(cohorts(), st.permutations(range(6)), st.integers(0, 5))
def test_order_of_clients_is_irrelevant(
    cohort: tuple[tuple[int, ...], list[Client]], order: list[int], seed: int
) -> None:
    shape, clients = cohort
    previous, values = parts_of(shape, clients, seed)
    result = merge(previous, clients, values)
    order = [position for position in order if position < len(clients)]
    again = merge(previous, [clients[k] for k in order], [values[k] for k in order])
    torch.testing.assert_close(again, result, rtol=0, atol=1e-6)


@given(cohorts(), st.integers(0, 5))
def test_untouched_slices_give_back_the_same_bits(
    cohort: tuple[tuple[int, ...], list[Client]], seed: int
) -> None:
    shape, clients = cohort
    previous, _ = parts_of(shape, clients, seed)
    values = [torch.tensor(previous.numpy()[np.ix_(*index)]) for index, _ in clients]
    assert torch.equal(merge(previous, clients, values), previous)


def test_a_hundred_clients_stay_within_rounding() -> None:
    shape, prefix = (40, 500), list(range(20))
    clients: list[Client] = [
        ([list(range(40)) if k % 2 else prefix, list(range(500))], 1.0 + k % 7) for k in range(100)
    ]
    previous, values = parts_of(shape, clients, 3)
    result = merge(previous, clients, values)
    total, weight = np.zeros(shape), np.zeros(shape)
    for (index, w), value in zip(clients, values, strict=True):
        total[np.ix_(*index)] += w * value.numpy().astype(np.float64)
        weight[np.ix_(*index)] += w
    np.testing.assert_allclose(result.numpy(), total / weight, atol=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("crossing", [False, True])
def test_a_broken_old_value_is_replaced_where_it_is_held(broken: float, crossing: bool) -> None:
    previous = torch.full((3,), broken)
    clients: list[Client] = [([[0, 1]], 1.0), ([[1] if not crossing else [1, 2]], 3.0)]
    values = [torch.tensor([2.0, 2.0]), torch.tensor([6.0, 8.0])[: 2 if crossing else 1]]
    result = merge(previous, clients, values)
    assert result[:2].tolist() == [2.0, 5.0]
    assert torch.equal(result[2:], torch.tensor([8.0]) if crossing else previous[2:]) or (
        not crossing and result[2:].isnan().all()
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_types_are_kept(kind: torch.dtype) -> None:
    previous = torch.tensor([1, 7]).to(kind)
    clients: list[Client] = [([[0]], 1.0), ([[0]], 1.0), ([[0]], 1.0)]
    values = [torch.tensor([value]).to(kind) for value in (2, 3, 5)]
    result = merge(previous, clients, values)
    assert result.dtype == kind
    expected = [3, 7] if kind == torch.int64 else torch.tensor([10 / 3, 7], dtype=kind).tolist()
    assert result.tolist() == expected


def test_half_precision_does_not_pile_up_rounding() -> None:
    clients: list[Client] = [([[0]], 1.0)] * 2000
    values = [torch.tensor([1.0 + (k % 2) * 0.5], dtype=torch.float16) for k in range(2000)]
    assert merge(torch.zeros(1, dtype=torch.float16), clients, values).item() == 1.25


def test_scalars_and_nothing_at_all() -> None:
    assert mean_over_holders(torch.tensor(4.0), {}).item() == 4.0
    groups = {TensorMap(()): [(torch.tensor(2.0), 1.0), (torch.tensor(5.0), 2.0)]}
    assert mean_over_holders(torch.tensor(0.0), groups).item() == 4.0


def test_the_result_shares_memory_with_nothing() -> None:
    previous, value = torch.zeros(3), torch.ones(3)
    result = mean_over_holders(previous, {TensorMap.full((3,)): [(value, 1.0)]})
    result.add_(1)
    assert value.tolist() == [1, 1, 1]
    assert previous.tolist() == [0, 0, 0]
