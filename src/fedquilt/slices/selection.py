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
"""

from __future__ import annotations

import csv
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import checks, untrusted
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import shortened
from fedquilt.slices.ranges import Axis, Bound, parse_bound


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
