"""What a slice costs the client that trains it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from fedquilt.slicing.slices import Slicing

COSTS = ("parameters", "bytes_up", "bytes_down", "multiply_adds")
"""What is counted for a client."""


def multiply_adds(model: nn.Module, sample: Tensor) -> int:
    """Return the multiply-adds of one forward pass of one example.

    Matrix products, convolutions and attention count; element-wise work does not.
    A training step takes about three times as many.
    """
    from torch.utils.flop_counter import FlopCounterMode

    was_training = model.training
    model.eval()
    with FlopCounterMode(display=False) as counter:
        model(sample)
    model.train(was_training)
    return int(counter.get_total_flops()) // (2 * len(sample))


def cost_table(slicing: Slicing) -> dict[str, Any]:
    """Return what a client of each width sends, receives and computes, and the means.

    Bytes are those of the travelling values in a round in which the client takes part.
    Slices are those of round 0; other rounds differ only where pieces of an axis do.
    """
    tiers = []
    for width, client in slicing.first_of_each_width().items():
        cut = slicing.cut(client, 0)
        size, model = slicing.place_of(cut).size, slicing.sub_model(cut)
        cost = _cost(size, slicing.element_size, model, slicing.sample)
        tiers.append({"width": str(width), "clients": slicing.widths.count(width), **cost})
    return _with_means(slicing.method, tiers)


def cost_of_everybody(
    method: str, width: str, clients: int, vector: Tensor, model: nn.Module, sample: Tensor
) -> dict[str, Any]:
    """Return the same table where all clients train one model, whose values are `vector`."""
    cost = _cost(vector.numel(), vector.element_size(), model, sample)
    return _with_means(method, [{"width": width, "clients": clients, **cost}])


def _cost(size: int, element_size: int, model: nn.Module, sample: Tensor) -> dict[str, Any]:
    return {
        "parameters": size,
        "bytes_up": size * element_size,
        "bytes_down": size * element_size,
        "multiply_adds": multiply_adds(model, sample[:1]),
    }


def _with_means(method: str, tiers: list[dict[str, Any]]) -> dict[str, Any]:
    count = sum(tier["clients"] for tier in tiers)
    means = {key: sum(t["clients"] * t[key] for t in tiers) / count for key in COSTS}
    return {"method": method, "tiers": tiers, "mean": means}
