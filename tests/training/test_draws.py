"""The numbers that random layers draw: uniform, keyed, and the same as in plain integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedquilt.training.draws import ClientDraws, bits_of, draw_keys, hashed_bits


def by_hand(k1: int, k2: int, place: int) -> int:
    """Return one number with Python's integers."""
    full = 0xFFFFFFFF
    x = (place * 0x9E3779B9 + k1) & full
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & full
    x ^= k2
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & full
    return x ^ (x >> 16)


def test_bits_are_those_of_plain_integers() -> None:
    keys = draw_keys([7, 2**63 - 1], 12, 3)
    unsigned = keys.view(np.uint32).tolist()
    bits = hashed_bits(torch.from_numpy(keys), 50).numpy().view(np.uint32)
    for row, (k1, k2) in enumerate(unsigned):
        assert bits[row].tolist() == [by_hand(k1, k2, place) for place in range(50)]


def test_keys_differ_by_seed_step_and_draw() -> None:
    keys = {
        tuple(draw_keys(seed, step, draw).tolist())
        for seed in range(20)
        for step in range(20)
        for draw in range(5)
    }
    assert len(keys) == 20 * 20 * 5
    assert draw_keys(5, np.arange(4), 1)[2].tolist() == draw_keys(5, 2, 1).tolist()


def test_bits_are_uniform_and_independent_of_one_another() -> None:
    bits = torch.stack(
        [bits_of(seed, 0)(0, torch.Size([4096]), torch.device("cpu")) for seed in range(64)]
    )
    values = (bits.to(torch.float64) + 2**31) / 2**32
    # Mean 1/2 with error sqrt(1/12/n); neighbours, clients and single bits uncorrelated.
    assert abs(float(values.mean()) - 0.5) < 5 * (1 / 12 / values.numel()) ** 0.5
    centred = values - 0.5
    for other in (centred.roll(1, 1), centred.roll(1, 0), centred.roll(64, 1)):
        assert abs(float((centred * other).mean() * 12)) < 5 / values.numel() ** 0.5
    for place in range(32):
        share = ((bits >> place) & 1).to(torch.float64).mean()
        assert abs(float(share) - 0.5) < 5 * 0.5 / values.numel() ** 0.5


def drawn(function, *arguments, **options):  # type: ignore[no-untyped-def]
    draws = ClientDraws()
    draws.begin(bits_of(1, 0))
    with draws:
        return function(*arguments, **options)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_right_share_and_scales_it(p: float) -> None:
    x = torch.ones(1000, 50)
    out = drawn(functional.dropout, x, p, True)
    kept = float((out != 0).float().mean())
    assert kept == pytest.approx(1 - p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert p == 1 or torch.equal(out[out != 0].unique(), torch.tensor([1 / (1 - p)]))
    assert torch.equal(drawn(functional.dropout, x, p, False), x)


def test_dropout2d_drops_whole_channels() -> None:
    out = drawn(functional.dropout2d, torch.ones(40, 30, 3, 3), 0.5, True)
    assert set(out.flatten(2).sum(2).unique().tolist()) == {0.0, 18.0}


def test_normal_and_uniform_numbers() -> None:
    x = torch.zeros(400, 100)
    normal, uniform = drawn(torch.randn_like, x), drawn(torch.rand_like, x)
    assert abs(float(normal.mean())) < 5 / 200
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    assert float((normal.abs() > 2).float().mean()) == pytest.approx(0.0455, abs=0.006)
    assert 0 <= float(uniform.min()) < 0.001
    assert 0.999 < float(uniform.max()) < 1


def test_rows_of_a_batch_do_not_depend_on_how_many_follow() -> None:
    short = drawn(functional.dropout, torch.ones(3, 7), 0.5, True)
    long = drawn(functional.dropout, torch.ones(9, 7), 0.5, True)
    assert torch.equal(short, long[:3])


def test_gradients_flow_through_what_is_kept() -> None:
    x = torch.ones(5, 8, requires_grad=True)
    out = drawn(functional.dropout, x, 0.5, True)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())
