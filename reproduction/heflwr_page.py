"""HeFlwr's comparison of methods, ours beside the README's, as Markdown from what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduction import heflwr
from reproduction.cells import Cell, Kept
from reproduction.heflwr import METHODS, SIZES, SPLITS, TABLE, TIERS
from reproduction.tables import (
    NONE_KEPT,
    accuracies,
    is_kept,
    listed,
    named,
    origin,
    preface,
    seeds_kept,
    spread,
    table,
)

WHY = (
    "The README scores every client's own part and prints the mean over clients, which is the "
    'column "clients\' mean", over all 8 (those who train only the whole model have the global '
    "one); the global model is what the server has in the end, and the other "
    "columns are the mean over the clients of a width, each with its own part. MFL has one width: "
    "every client holds one half of every layer, one of 2^k fixed choices in turn, and nobody the "
    "whole, so its like in the README is both its mean and its width 1/2. The README "
    "does not say with what its table was made. What is "
    "known to differ: its code puts a part of several pieces back at the wrong place and fills "
    "what nobody held with fresh random values, which fits what Federated Dropout shows there, and "
    "FedRolex has such parts too; its HeteroFL has neither the scaler nor the masked loss; its "
    "FjORD also trains parts of width zero; its Selective Client gives the two whole clients all "
    "the data, here they keep their quarter. Its CIFAR-10 is cropped and flipped at random, here "
    "nothing is. DepthFL needs a network with exits and has another one than the other rows; it "
    "and the smallest model for everybody are not in the README."
)


def markdown(scale: str, kept: Mapping[str, Kept]) -> str:
    """Return the section of one scale; a table none of whose cells is kept is left out."""
    if not kept:
        return NONE_KEPT
    parts = [_head(scale, kept)]
    parts += [
        _table(scale, dataset, split, kept) for dataset in SIZES[scale].datasets for split in SPLITS
    ]
    return "\n".join(part for part in (*parts, f"{WHY}\n") if part)


def _head(scale: str, kept: Mapping[str, Kept]) -> str:
    what = (
        "The embedded digits in the place of MNIST, with a network of their own (8,714 "
        "parameters) and batches of 8: the direction of differences, on any machine."
        if scale == "small"
        else "The README's data sets, networks and rounds."
    )
    measured = (
        "Accuracy in percent on the whole test set after the last round, mean and deviation over n "
        "seeds."
    )
    return preface(what, kept, heflwr.cells(scale), listed(SIZES[scale].seeds), measured)


def _table(scale: str, dataset: str, split: str, kept: Mapping[str, Kept]) -> str:
    rows, every = [], []
    for (data, parted, method), cells in heflwr.rows(scale).items():
        if (data, parted) == (dataset, split) and is_kept(cells, kept):
            every += cells
            theirs = TABLE.get((dataset, split, method))
            paper = "-" if theirs is None else f"{theirs:.2f}"
            seeds, whole = seeds_kept(cells, kept), spread(accuracies(cells, kept))
            own = [_own(cells, kept, tier) for tier in TIERS]
            rows.append((METHODS[method], paper, seeds, _clients(cells, kept), whole, *own))
    name = f"{named(SIZES[scale].datasets[dataset], dataset)}, {SPLITS[split]}"
    widths = (f"width {tier}" for tier in TIERS)
    head = ("method", "README", "n", "clients' mean", "global", *widths)
    return table(name, head, rows, origin(every, kept))


def _own(cells: Sequence[Cell], kept: Mapping[str, Kept], tier: str) -> str:
    """Return what a width's own model reaches; a dash where nobody trains it."""
    found = [kept[cell.name].record.get("tiers") for cell in cells if cell.name in kept]
    return spread([_percent(tiers[tier]) for tiers in found if tiers and tier in tiers])


def _clients(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> str:
    """Return the mean over clients of what their own part reaches, as the README's metric.

    Who trains the whole model has that.
    """
    values: list[float | None] = []
    for cell in cells:
        if cell.name in kept:
            tiers = (kept[cell.name].record.get("tiers") or {}).values()
            own = [(tier["clients"], _percent(tier)) for tier in tiers]
            known = [(number, value) for number, value in own if value is not None]
            total = sum(number for number, _ in known)
            values.append(
                sum(number * value for number, value in known) / total
                if total
                else 100 * kept[cell.name].accuracy
            )
    return spread(values)


def _percent(tier: Mapping[str, float | None]) -> float | None:
    return None if tier["accuracy"] is None else 100 * tier["accuracy"]
