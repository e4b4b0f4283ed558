"""Operations are counted as torch's own counter counts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.training.hardware import OperationCount


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(5, 3), (2, 5)),
        (nn.Linear(5, 3, bias=False), (2, 4, 5)),
        (nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 9, 8)),
        (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
        (nn.MultiheadAttention(8, 2), (5, 2, 8)),
        (nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU()), (2, 4, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@torch.no_grad()
def test_operations_are_counted_as_torch_counts_them(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    x = torch.rand(shape)
    arguments = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    with OperationCount() as ours:
        module(*arguments)
    with FlopCounterMode(display=False) as theirs:
        module(*arguments)
    assert ours.total == theirs.get_total_flops()
    assert (ours.total > 0) != isinstance(module, nn.Sequential)


@torch.no_grad()
def test_attention_counts_as_its_two_products() -> None:
    q, k, v = torch.rand(2, 3, 7, 8), torch.rand(2, 3, 5, 8), torch.rand(2, 3, 5, 8)
    with OperationCount() as one_call:
        functional.scaled_dot_product_attention(q, k, v)
    with OperationCount() as by_hand:
        torch.softmax(q @ k.mT, -1) @ v
    assert one_call.total == by_hand.total == 2 * 2 * 3 * 7 * 5 * (8 + 8)
