"""FedNum beside what it is compared with, as Markdown from what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reproduction import fednum
from reproduction.cells import Cell, Kept
from reproduction.fednum import BASELINES, PARTS, PUBLISHED, SIZES
from reproduction.tables import (
    NONE_KEPT,
    TITLES,
    is_kept,
    listed,
    origin,
    preface,
    seeds_kept,
    spread,
    table,
)

WHY = (
    "The FedNum document prints no accuracy, and FedDM's are of another federation (10 clients, "
    "Dirichlet 0.5); DM's and those of random real images are for the same network and number of "
    "images, on pooled data. FedDM and FedAvg get as many rounds as the bytes of the first row pay "
    "for, both ways together, and one where they pay for none (the columns say what it cost). "
    "What differs from the published code of FedNum: it may send groups of one sample, and it "
    "begins with its clients' own images, which the defaults here do not; the published settings, "
    "in the last row, do, and deal every client few classes. DM's published figure comes of 20,000 "
    "steps. Nothing in this table has a bound: the statement of each run says epsilon infinity."
)


def markdown(scale: str, kept: Mapping[str, Kept]) -> str:
    """Return the section of one scale; a table none of whose cells is kept is left out."""
    if not kept:
        return NONE_KEPT
    parts = [_head(scale, kept)]
    parts += [_table(scale, dataset, kept) for dataset in SIZES[scale].datasets]
    parts.append(colour_table(scale, kept))
    return "\n".join(part for part in (*parts, f"{WHY}\n") if part)


def _head(scale: str, kept: Mapping[str, Kept]) -> str:
    what = (
        "The embedded digits, 10 clients, Dirichlet 0.1, a ConvNet of width 32; half of the "
        "default's matching steps, of the published a tenth and a fifth of the epochs. 355 test "
        "images and one seed: differences of a point or two say nothing."
        if scale == "small"
        else "50 clients, Dirichlet 0.1, a ConvNet of width 128."
    )
    measured = (
        "The time is that of FedNum, without the rows beside it. 10 images of a class. Accuracy in "
        "percent after the last round, mean and deviation over n seeds; megabytes over all clients "
        "and rounds, the first seed's."
    )
    return preface(what, kept, fednum.cells(scale), listed(SIZES[scale].seeds), measured)


def _table(scale: str, dataset: str, kept: Mapping[str, Kept]) -> str:
    every = fednum.rows(scale)
    cells = every[dataset, "default"]
    default, seeds = _records(cells, kept), seeds_kept(cells, kept)
    rows = []
    if default:
        rows.append(_row(PARTS["default"], "-", seeds, default, raw="no"))
        for name, title in BASELINES.items():
            beside = [record["beside"][name] for record in default]
            raw = "yes" if beside[0]["raw"] else "no"
            published = PUBLISHED.get((dataset, name), "-")
            rows.append(_row(title, published, seeds, beside, raw=raw))
    document = every[dataset, "document"]
    if is_kept(document, kept):
        seeds = seeds_kept(document, kept)
        rows.append(_row(PARTS["document"], "-", seeds, _records(document, kept), raw="yes"))
    columns = ("method", "published", "n", "here", "MB up", "MB down", "rounds", "raw images leave")
    return table(TITLES[dataset], columns, rows, origin([*cells, *document], kept))


def colour_table(scale: str, kept: Mapping[str, Kept]) -> str:
    """Return what the defaults for colour reach, by images of a class."""
    rows, every = [], []
    for ipc, cells in fednum.colour(scale).items():
        found = _records(cells, kept)
        if found:
            every += cells
            values = [100 * record["accuracy"] for record in found]
            up = sorted(record["bytes_up"] for record in found)
            sent = f"{_megabytes(up[0])} to {_megabytes(up[-1])}"
            each = ", ".join(f"{value:.1f}" for value in values)
            rows.append((str(ipc), seeds_kept(cells, kept), spread(values), each, sent))
    columns = ("images of a class", "n", "here", "by seed", "MB up")
    title = "CIFAR-10, the defaults for colour with more models"
    return table(title, columns, rows, origin(every, kept))


def _records(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> list[Mapping[str, Any]]:
    return [kept[cell.name].record for cell in cells if cell.name in kept]


def _row(
    name: str, published: str, seeds: str, records: Sequence[Mapping[str, Any]], *, raw: str
) -> tuple[str, ...]:
    values = [None if r["accuracy"] is None else 100 * r["accuracy"] for r in records]
    up, down = (_megabytes(records[0][key]) for key in ("bytes_up", "bytes_down"))
    return name, published, seeds, spread(values), up, down, str(records[0]["rounds"]), raw


def _megabytes(count: int) -> str:
    """Return bytes in megabytes, three figures of what is small.

    >>> _megabytes(259_840), _megabytes(298_123_456), _megabytes(0)
    ('0.26', '298', '0')
    """
    return f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.3g}"
