"""How two tensors with cut dimensions become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedquilt.errors import InvalidValueError
from fedquilt.subnet.graph.layout import Layout, RawTensor, Value
from fedquilt.subnet.graph.records import Records


def combine(records: Records, one: Value, other: Value, where: str) -> Value:
    """Return the result of an element-wise operation on two values.

    Two cut tensors are cut alike from then on.  A parameter of the model's own
    is cut with what it meets, unless it is broadcast there.  A whole tensor
    keeps what it meets whole.
    """
    if isinstance(other, RawTensor) and isinstance(one, Layout):
        return _with_raw(records, one, other, where)
    if isinstance(one, RawTensor) and isinstance(other, Layout):
        return _with_raw(records, other, one, where)
    if not isinstance(one, Layout) or not isinstance(other, Layout):
        return next((value for value in (one, other) if isinstance(value, Layout)), Layout())
    if one.axis is None or other.axis is None:
        cut, whole = (other, one) if one.axis is None else (one, other)
        if cut.axis is None or whole.thin != cut.axis:
            records.pin(cut.parts)
        return replace(cut, rank=_rank(one, other))
    return _tied(records, one, other, where)


def concatenate(records: Records, values: Sequence[Value], dim: int, where: str) -> Value:
    """Return the concatenation of tensors; along the cut dimension the features follow."""
    layouts = [value for value in values if isinstance(value, Layout)]
    cut = next((value for value in layouts if value.axis is not None), None)
    if cut is None:
        return Layout(layouts[0].rank if layouts else None)
    if cut.position(dim, where) != cut.axis:
        result: Value = cut
        for value in values:
            result = combine(records, result, value, where)
        return result
    if any(not isinstance(v, Layout) or v.axis != cut.axis or v.inner != 1 for v in values):
        raise InvalidValueError(
            f"{where}: tensors joined along the cut dimension must all be cut there, before any "
            "flatten; an input or a whole tensor cannot be joined with them"
        )
    return replace(cut, parts=tuple(part for layout in layouts for part in layout.parts))


def _with_raw(records: Records, value: Layout, raw: RawTensor, where: str) -> Value:
    if value.axis is None:
        return value
    rank = len(raw.shape)
    if rank < -value.axis or raw.shape[value.axis] == 1:
        return value
    features = records.features(value, raw.shape[value.axis], where)
    records.cut_raw(raw, value.axis, features)
    return value


def _tied(records: Records, one: Layout, other: Layout, where: str) -> Layout:
    sizes = [sum(records.table.size(part) for part in v.parts) for v in (one, other)]
    if 1 in sizes and sizes[0] != sizes[1] and one.inner == other.inner == 1:
        narrow, wide = (one, other) if sizes[0] == 1 else (other, one)
        records.pin(narrow.parts)
        return wide
    if one.axis != other.axis or one.inner != other.inner:
        raise InvalidValueError(
            f"{where}: both tensors must be cut on the same dimension to be combined"
        )
    records.tie(one.parts, other.parts, where)
    return replace(one, rank=_rank(one, other))


def _rank(one: Layout, other: Layout) -> int | None:
    ranks = [value.rank for value in (one, other) if value.rank is not None]
    return max(ranks) if ranks else None
