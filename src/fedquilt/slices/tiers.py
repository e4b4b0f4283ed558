"""The width of every client: dealt out, listed, or read off what its device can hold."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from fedquilt.common import untrusted
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.printable import shortened
from fedquilt.slices.selection import parse_width

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
