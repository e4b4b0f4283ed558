"""Which units of an axis a slice keeps, and which slice a client gets in a round.

An axis has n units: channels, hidden features, heads or groups.  A selection is a frozen,
hashable record; every selection of width w keeps floor(w n) of them, and none is an error.

| record | units kept |
|---|---|
| `Prefix(w)` | the first ones |
| `Window(w, t)` | those from t mod n on, wrapping around |
| `RandomUnits(w, seed)` | a uniform choice, drawn anew for each axis |
| `Listed(kept)` | those that are listed for the axis |
| `FixedStructure(s, k, p)` | on axis a, piece number (digit a mod k of s in base p) of p pieces |

A schedule is a function that returns the selection of a client in a round:

| schedule | slice of a client of width w in round t | source |
|---|---|---|
| `fedrolex` | a window of w that starts at unit t step mod n | Alam et al. 2022 |
| `federated_dropout` | a random w of every axis | Caldas et al. 2018 |
| `fjord` | the first p, p drawn from the widths up to w | Horvath et al. 2021 |
| `important` | the w of every axis whose units have the largest scores | Wu et al. 2024 |
| `mfl` | structure (client + t) mod p^k of fixed ones | |

Rounds count from 0.

The width of a client is dealt out, listed, or read off what its device can hold
(`client_widths`).

The index algebra of one dimension: ranges as written, axes as computed.

A range is the part of a layer that a client holds, in fractions of its full size:

    '1/4'  '0'  '1'  '0.25'  0.25  Fraction(1, 4)  1          one bound
    ('0', '1/4')                                              one interval, half open
    [('3/4', '1'), ('0', '1/4')]                              several, packed in this order

Both ends of an interval are rounded by one rule: on an axis of size F the
interval [a, b) holds the positions floor(F a) .. floor(F b) - 1.  Disjoint
intervals therefore hold disjoint positions, and adjacent intervals leave no gap.

An `Axis` is an ordered set of positions, kept as runs of neighbours, so that a
prefix or a rolling window of a million positions is one pair or two pairs of
numbers.  Everything else in this package is made from these four operations:

| operation | meaning | where it is needed |
|---|---|---|
| `spread(k)` | every position becomes k neighbours | flatten of C x H x W; heads |
| `stacked(k)` | the same choice in k copies laid end to end | packed query, key, value |
| `end_to_end(a, b)` | axes laid end to end | concatenation of feature maps |
| `per_group(g)` | one choice that repeats in every held group | grouped convolution |
"""

from __future__ import annotations

import csv
import math
import numbers
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.common import checks, untrusted
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import shortened

Bound: TypeAlias = str | int | float | Fraction | Decimal
Interval: TypeAlias = tuple[Bound, Bound]
Intervals: TypeAlias = Sequence[Interval]
Layer_Range: TypeAlias = Interval | Intervals

Ranges: TypeAlias = tuple[tuple[Fraction, Fraction], ...]

FULL: Ranges = ((Fraction(0), Fraction(1)),)


_LONGEST = 400
_LARGE_EXPONENT = re.compile(r"[eE][-+]?[0-9_]{4,}")


def parse_bound(value: object, where: str = "bound") -> Fraction:
    """Return one bound as an exact fraction; a float counts as the decimal it prints.

    >>> parse_bound("2/8"), parse_bound(0.1), parse_bound(1)
    (Fraction(1, 4), Fraction(1, 10), Fraction(1, 1))
    """
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real | Decimal):
        raise InvalidValueError(
            f"{where}={value!r} must be a number such as '1/4', '0.25', 0.25 or Fraction(1, 4)"
        )
    try:
        if isinstance(value, numbers.Rational):
            return Fraction(int(value.numerator), int(value.denominator))
        text = str(value)
        if len(text) > _LONGEST or _LARGE_EXPONENT.search(text):
            raise ValueError("too many digits")  # 1e999999999 would take for ever to write out
        return Fraction(text)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise InvalidValueError(
            f"{where}={value!r} must be a fraction or decimal such as '1/4' or 0.25"
        ) from error


def parse_ranges(value: object, where: str = "ranges") -> Ranges:
    """Return one interval, or a list of them, as disjoint intervals inside [0, 1].

    The order is kept: it is the order in which a sub-layer packs the intervals.
    """
    pairs = _as_pairs(value, where)
    ranges = tuple((parse_bound(start, where), parse_bound(end, where)) for start, end in pairs)
    for start, end in ranges:
        if start < 0 or end > 1:
            raise InvalidValueError(f"{where}={value!r} must lie inside [0, 1]")
        if start >= end:
            raise InvalidValueError(
                f"{where}={value!r} must have start < end in every interval; "
                f"one runs from {start} to {end}"
            )
    _refuse_overlap(ranges, value, where)
    return ranges


def positions(ranges: Ranges, size: int, where: str = "ranges") -> tuple[tuple[int, int], ...]:
    """Return the half-open runs of positions the ranges hold on an axis of `size`.

    >>> positions(parse_ranges(('1/4', '1/2')), 10)
    ((2, 5),)
    """
    runs = ((math.floor(size * start), math.floor(size * end)) for start, end in ranges)
    held = tuple((start, end) for start, end in runs if start < end)
    if not held:
        raise InvalidValueError(
            f"{where}={format_ranges(ranges)} must hold a position of the {size} there"
        )
    return held


def format_ranges(ranges: Ranges) -> str:
    """Return the ranges as a user would write them."""
    pairs = [f"('{start}', '{end}')" for start, end in ranges]
    return pairs[0] if len(pairs) == 1 else f"[{', '.join(pairs)}]"


def _as_pairs(value: object, where: str) -> list[tuple[Any, Any]]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidValueError(
            f"{where}={value!r} must be an interval (start, end) or a list of intervals"
        )
    items = list(value)
    if len(items) == 2 and not any(_is_sequence(item) for item in items):
        return [(items[0], items[1])]
    if not items:
        raise InvalidValueError(f"{where}={value!r} must hold at least one interval")
    for item in items:
        if not _is_sequence(item) or len(item) != 2:
            raise InvalidValueError(f"{where}={value!r} must be made of intervals (start, end)")
    return [(item[0], item[1]) for item in items]


def _is_sequence(item: object) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str)


def _refuse_overlap(ranges: Ranges, value: object, where: str) -> None:
    ordered = sorted(ranges)
    for (_, end), (start, _) in pairwise(ordered):
        if start < end:
            raise InvalidValueError(
                f"{where}={value!r} must be disjoint intervals; two share "
                f"what lies between {start} and {end}"
            )


@dataclass(frozen=True)
class Axis:
    """Positions held on a dimension of `size`, in packed order.

    `runs` are half-open and disjoint; neighbours that continue one another are
    one run, so equal choices are equal objects.
    """

    size: int
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def full(cls, size: int) -> Axis:
        """Return the axis that holds everything."""
        return cls(size, ((0, size),))

    @classmethod
    def from_runs(cls, size: int, runs: Iterable[tuple[int, int]]) -> Axis:
        """Return the axis of disjoint half-open runs, in the order given."""
        joined: list[tuple[int, int]] = []
        for start, stop in runs:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return cls(size, tuple(joined))

    @classmethod
    def from_ranges(cls, size: int, ranges: Ranges, where: str = "ranges") -> Axis:
        """Return the positions that fractions hold, both ends rounded down."""
        return cls.from_runs(size, positions(ranges, size, where))

    @classmethod
    def from_index(cls, size: int, index: Sequence[int] | NDArray[np.int64]) -> Axis:
        """Return the axis of listed positions, in the order given."""
        listed = np.asarray(index, dtype=np.int64)
        if listed.size == 0 or listed.min() < 0 or listed.max() >= size:
            raise InvalidValueError(f"index={index!r} must list positions of 0..{size - 1}")
        if np.unique(listed).size != listed.size:
            raise InvalidValueError(f"index={index!r} must not list a position twice")
        breaks = np.flatnonzero(np.diff(listed) != 1) + 1
        runs = np.split(listed, breaks)
        return cls(size, tuple((int(run[0]), int(run[-1]) + 1) for run in runs))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    @cached_property
    def is_full(self) -> bool:
        """Whether everything is held, in its own order."""
        return self.runs == ((0, self.size),)

    def contains(self, other: Axis) -> bool:
        """Tell whether all positions of another choice on this dimension are held here too."""
        if self.is_full or self.runs == other.runs:
            return True
        mine = sorted(self.runs)
        starts = [start for start, _ in mine]
        for start, stop in other.runs:
            place = bisect_right(starts, start) - 1
            if place < 0 or stop > mine[place][1]:
                return False
        return True

    @cached_property
    def index(self) -> torch.Tensor:
        """The positions as int64, in packed order."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.runs])

    def spread(self, width: int) -> Axis:
        """Return the axis on which every position has become `width` neighbours."""
        runs = tuple((start * width, stop * width) for start, stop in self.runs)
        return Axis(self.size * width, runs)

    def stacked(self, copies: int) -> Axis:
        """Return the same choice in `copies` copies of the axis laid end to end."""
        return end_to_end([self] * copies)

    def per_group(self, groups: int) -> tuple[tuple[int, ...], Axis] | None:
        """Split into held groups and the choice that repeats inside each of them.

        Returns None when the groups do not all hold the same choice.
        """
        if groups == 1:
            return (0,), self
        width = self.size // groups
        index = self.index.numpy()
        held = list(dict.fromkeys((index // width).tolist()))
        if len(index) % len(held):
            return None
        inside = index.reshape(len(held), -1)
        same_group = (inside // width == np.asarray(held)[:, None]).all()
        same_choice = (inside % width == inside[:1] % width).all()
        if not (same_group and same_choice):
            return None
        return tuple(held), Axis.from_index(width, inside[0] % width)


def end_to_end(axes: Sequence[Axis]) -> Axis:
    """Return axes laid end to end as one."""
    starts = [0]
    for axis in axes:
        starts.append(starts[-1] + axis.size)
    runs = [
        (offset + start, offset + stop)
        for axis, (offset, _) in zip(axes, pairwise(starts), strict=True)
        for start, stop in axis.runs
    ]
    return Axis.from_runs(starts[-1], runs)


class Selection(Protocol):
    """A rule that says which units of every axis are kept."""

    def choose(self, units: int, axis: int) -> Axis:
        """Return the units kept on an axis of `units`; `axis` numbers the axes of a model."""
        ...


@dataclass(frozen=True)
class Prefix:
    """The first floor(w n) units: HeteroFL, ordered dropout."""

    width: Fraction

    def __init__(self, width: Bound) -> None:
        object.__setattr__(self, "width", parse_width(width))

    def choose(self, units: int, axis: int) -> Axis:
        """Return the first units."""
        return Axis(units, ((0, kept_units(units, self.width)),))


@dataclass(frozen=True)
class Window:
    """The floor(w n) units from `offset` mod n on, wrapping around: FedRolex."""

    width: Fraction
    offset: int

    def __init__(self, width: Bound, offset: int) -> None:
        object.__setattr__(self, "width", parse_width(width))
        object.__setattr__(self, "offset", checks.integer("offset", offset))

    def choose(self, units: int, axis: int) -> Axis:
        """Return the window; all of an axis is returned in its own order."""
        kept = kept_units(units, self.width)
        start = self.offset % units
        if kept == units:
            return Axis.full(units)
        runs = [(start, min(start + kept, units)), (0, max(0, start + kept - units))]
        return Axis.from_runs(units, [run for run in runs if run[0] < run[1]])


@dataclass(frozen=True)
class RandomUnits:
    """A uniform choice of floor(w n) units, in order: Federated Dropout."""

    width: Fraction
    seed: int

    def __init__(self, width: Bound, seed: int) -> None:
        object.__setattr__(self, "width", parse_width(width))
        object.__setattr__(self, "seed", checks.integer("seed", seed, at_least=0))

    def choose(self, units: int, axis: int) -> Axis:
        """Return the choice for one axis; the same seed and axis give the same choice."""
        generator = np.random.default_rng([self.seed, axis])
        kept = kept_units(units, self.width)
        return Axis.from_index(units, np.sort(generator.permutation(units)[:kept]))


@dataclass(frozen=True)
class Listed:
    """The units that are listed for each axis, in order: FIARSE."""

    kept: tuple[tuple[int, ...], ...]

    def choose(self, units: int, axis: int) -> Axis:
        """Return the units of this axis."""
        return Axis.from_index(units, self.kept[axis])


@dataclass(frozen=True)
class FixedStructure:
    """One of `pieces` ** `axes` structures that each keep one piece of every axis.

    Axis a keeps the units floor(d n / p) .. floor((d + 1) n / p) - 1, where d is
    the digit a mod `axes` of `structure` written in base p = `pieces`.
    """

    structure: int
    axes: int
    pieces: int = 2

    def __post_init__(self) -> None:
        checks.integer("axes", self.axes, at_least=1)
        checks.integer("pieces", self.pieces, at_least=1)
        most = self.pieces**self.axes - 1
        checks.integer("structure", self.structure, at_least=0, at_most=most)

    def choose(self, units: int, axis: int) -> Axis:
        """Return the piece of this axis."""
        digit = self.structure // self.pieces ** (axis % self.axes) % self.pieces
        run = (units * digit // self.pieces, units * (digit + 1) // self.pieces)
        if run[0] == run[1]:
            raise InvalidValueError(f"pieces={self.pieces} must be at most the {units} units there")
        return Axis(units, (run,))


def parse_width(width: object) -> Fraction:
    """Return a width as a fraction in (0, 1]."""
    parsed = parse_bound(width, "width")
    if not 0 < parsed <= 1:
        raise InvalidValueError(f"width={width!r} must be > 0 and <= 1")
    return parsed


def as_selection(width: Bound | Selection) -> Selection:
    """Return a selection: a plain width means that prefix."""
    return Prefix(width) if isinstance(width, Bound | numbers.Real) else width


def kept_units(units: int, width: Fraction) -> int:
    """Return floor(width x units), which must not be zero."""
    kept = math.floor(units * width)
    if kept == 0:
        raise InvalidValueError(f"width={width} must keep at least one of the {units} units there")
    return kept


def fedrolex(width: Bound, round_number: int, step: int = 1) -> Window:
    """Return the window that moves by `step` units a round and wraps around."""
    checks.integer("round_number", round_number, at_least=0)
    checks.integer("step", step, at_least=1)
    return Window(width, round_number * step)


def federated_dropout(width: Bound, generator: np.random.Generator) -> RandomUnits:
    """Return a random choice of units; one draw of the generator fixes it."""
    return RandomUnits(width, int(generator.integers(2**62)))


def fjord(limit: Bound, widths: Iterable[Bound], generator: np.random.Generator) -> Prefix:
    """Return ordered dropout: a width drawn evenly from those up to the client's limit.

    No width is zero, and the limit itself can be drawn.
    """
    most = parse_width(limit)
    allowed = [width for width in _sorted_widths(widths) if width <= most]
    if not allowed:
        raise InvalidValueError(f"limit={limit!r} must be at least one of the widths")
    return Prefix(allowed[int(generator.integers(len(allowed)))])


def mfl(client: int, round_number: int, axes: int, pieces: int = 2) -> FixedStructure:
    """Return one of pieces^axes fixed structures; client and round take turns through them."""
    checks.integer("client", client, at_least=0)
    checks.integer("round_number", round_number, at_least=0)
    number = pieces ** checks.integer("axes", axes, at_least=1)
    return FixedStructure((client + round_number) % number, axes, pieces)


def important(width: Bound, scores: Sequence[NDArray[np.float64]]) -> Listed:
    """Return the units of the largest scores of each axis; of equal ones the first."""
    share = parse_width(width)
    best = [np.argsort(-own, kind="stable")[: kept_units(len(own), share)] for own in scores]
    return Listed(tuple(tuple(np.sort(units).tolist()) for units in best))


def _sorted_widths(widths: Iterable[Bound]) -> list[Fraction]:
    parsed = sorted({parse_width(width) for width in widths})
    if not parsed:
        raise InvalidValueError("widths=[] must hold at least one width")
    return parsed


WIDTHS = tuple(Fraction(1, 2**power) for power in range(5))
"""The widths that a table of devices is matched with: 1, 1/2, 1/4, 1/8, 1/16."""

_EACH = "each:"
_MOST_DIGITS = 18  # of the number of a client

Needs = Callable[[Fraction], tuple[float, float]]
"""What a width takes: (megabytes while training, floating-point operations an example)."""


def client_widths(
    tiers: str, num_clients: int, random: np.random.Generator, needs: Needs
) -> tuple[Fraction, ...]:
    """Return one width a client.

    Parameters
    ----------
    tiers : str
        "1,1/2,1/4": the clients are dealt to these widths at random, as evenly as
        their number allows.  A path that ends in .csv: a table with one row for each
        client, either `client,width` or `client,memory_mb,flops`; with the latter a
        client gets the largest of `WIDTHS` that its device can train.
        "each:1,1/2": one width for each client, in order.
    needs : callable
        What a width takes; asked for a table of devices only.
    """
    if is_table(tiers):
        return _from_table(tiers, num_clients, needs)
    if tiers.startswith(_EACH):
        listed = tuple(listed_widths(tiers.removeprefix(_EACH)))
        if len(listed) != num_clients:
            raise InvalidValueError(
                f"tiers={tiers!r} must list one width for each of {num_clients} clients"
            )
        return listed
    widths = listed_widths(tiers)
    dealt = np.empty(num_clients, dtype=np.int64)
    dealt[random.permutation(num_clients)] = np.arange(num_clients) % len(widths)
    return tuple(widths[tier] for tier in dealt)


def is_table(tiers: str) -> bool:
    """Tell whether tiers are the path of a table."""
    return tiers.lower().endswith(".csv")


def one_for_each(widths: Iterable[Fraction]) -> str:
    """Return the tiers of clients whose widths are known, for `client_widths`."""
    return _EACH + ",".join(map(str, widths))


def listed_widths(tiers: str) -> list[Fraction]:
    """Return the widths of a comma-separated list, in its order."""
    return [_width(part, f"tiers={tiers!r}") for part in tiers.split(",")]


def _width(text: str, where: str) -> Fraction:
    try:
        return parse_width(text.strip())
    except InvalidValueError as error:
        raise InvalidValueError(
            f"{where} must hold widths > 0 and <= 1, such as 1,1/2,1/4, or be a FILE.csv: {error}"
        ) from error


def _from_table(path: str, num_clients: int, needs: Needs) -> tuple[Fraction, ...]:
    found: dict[int, Fraction] = {}
    costs = _Costs(needs)
    for line, row in _rows(path):
        where = f"tiers={path!r}, line {line}"
        client = _client(row["client"], num_clients, where)
        if client in found:
            raise InvalidValueError(f"{where}: client {client} must be listed once")
        if "width" in row:
            found[client] = _width(row["width"], where)
        else:
            found[client] = _fitting(row, costs, where)
    missing = [client for client in range(num_clients) if client not in found]
    if missing:
        raise InvalidValueError(
            f"tiers={path!r} must list all {num_clients} clients; client {missing[0]} is missing"
        )
    return tuple(found[client] for client in range(num_clients))


def _rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        content = untrusted.read_named(Path(path).expanduser(), untrusted.TABLE_BYTES)
        lines = content.decode("utf-8").splitlines()
        table = csv.DictReader(lines, skipinitialspace=True, restval="")
        columns = [name.strip() for name in table.fieldnames or ()]
    except (OSError, ValueError, csv.Error) as error:
        raise InvalidValueError(f"tiers={path!r} cannot be read: {error}") from error
    if columns not in (["client", "width"], ["client", "memory_mb", "flops"]):
        raise InvalidValueError(
            f"tiers={path!r} must have the columns client,width or client,memory_mb,flops; "
            f"it has {','.join(columns) or 'none'}"
        )
    table.fieldnames = columns
    try:
        for row in table:
            yield table.line_num, row
    except csv.Error as error:
        raise InvalidValueError(
            f"tiers={path!r}, line {table.line_num} cannot be read: {error}"
        ) from error


def _client(text: str, num_clients: int, where: str) -> int:
    plain = text.strip()
    if not plain.isdecimal() or len(plain) > _MOST_DIGITS or int(plain) >= num_clients:
        raise InvalidValueError(
            f"{where}: client={shortened(text)} must be a number of 0..{num_clients - 1}"
        )
    return int(plain)


class _Costs:
    """What each of `WIDTHS` takes, found out once and when it is asked for."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._known: dict[Fraction, tuple[float, float]] = {}

    def items(self) -> Iterator[tuple[Fraction, tuple[float, float]]]:
        """Yield the widths, widest first, as far as the model can be cut."""
        for width in WIDTHS:
            if width not in self._known:
                try:
                    self._known[width] = self._needs(width)
                except InvalidValueError:
                    if width == 1:
                        raise
                    return
            yield width, self._known[width]


def _fitting(row: dict[str, str], costs: _Costs, where: str) -> Fraction:
    """Return the largest width whose memory and operations a device has."""
    try:
        memory, flops = float(row["memory_mb"]), float(row["flops"])
    except ValueError as error:
        raise InvalidValueError(f"{where}: memory_mb and flops must be numbers: {error}") from error
    for width, (needed, operations) in costs.items():
        if needed <= memory and operations <= flops:
            return width
    raise InvalidValueError(
        f"{where}: memory_mb={memory:g} and flops={flops:g} must be at least "
        f"{needed:.3g} and {operations:.3g}, what width {width} takes"
    )
