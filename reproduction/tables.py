"""Markdown tables of kept cells: what the papers' pages share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedquilt.config.modes import MODE_TABLE
from reproduction.cells import Cell, Kept

TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "digits"}
"""Data sets as they are printed."""
NONE_KEPT = "No run of this size is kept yet.\n"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], why: str = "") -> str:
    """Return a table with its heading and, if there is one, a text below; "" without rows."""
    if not rows:
        return ""
    lines = [f"#### {title}", "", *map(_line, (head, ["---"] * len(head), *rows)), ""]
    return "\n".join([*lines, why, ""] if why else lines)


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def is_kept(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> bool:
    """Tell whether any of the cells is kept."""
    return any(cell.name in kept for cell in cells)


def accuracies(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> list[float]:
    """Return the accuracies of the cells that are kept, in percent."""
    return [100 * kept[cell.name].accuracy for cell in cells if cell.name in kept]


def spread(values: Sequence[float | None]) -> str:
    """Return mean and sample deviation; a dash when there is none, or one is not finite.

    >>> spread([70.0, 72.0]), spread([70.0]), spread([])
    ('71.00 ± 1.41', '70.00', '-')
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) != len(values):
        return "-"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{np.mean(known):.2f} ± {np.std(known, ddof=1):.2f}"


def extent(values: Sequence[float]) -> str:
    """Return mean, least and largest to a tenth: runs whose noise is secret repeat to no more.

    >>> extent([86.64, 86.62, 87.4]), extent([86.64]), extent([])
    ('86.9 (86.6 to 87.4)', '86.6', '-')
    """
    if not values or not all(map(math.isfinite, values)):
        return "-"
    least = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{least}"


def mean(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> str:
    """Return the accuracies' mean over the cells that are kept, and how far they lie apart.

    Where they are not all, how many is said.
    """
    values = accuracies(cells, kept)
    few = 0 < len(values) < len(cells)
    noised = any(MODE_TABLE[cell.settings["mode"]].noised for cell in cells)
    shown = extent(values) if noised else spread(values)
    return shown + (f" ({seeds_kept(cells, kept)} seeds)" if few else "")


def origin(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> str:
    """Return from which state of the code the kept cells of a table come."""
    return origin_of([kept[cell.name].record for cell in cells if cell.name in kept])


def origin_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Return from which state of the code records come: a digest stands for a state.

    The same state may have been committed more than once.
    """
    states: dict[str, set[str]] = {}
    for record in records:
        said = record.get("commit") or "commit not recorded"
        states.setdefault(record.get("source") or "", set()).add(
            said[:12] + "-dirty" * said.endswith("-dirty") if record.get("commit") else said
        )
    named = [
        ", ".join(sorted(commits)) + (f" (source {digest[:12]})" if digest else "")
        for digest, commits in sorted(states.items())
    ]
    if len(states) > 1:
        return f"Cells of {len(states)} states of the code: {'; '.join(named)}."
    return f"Code: {''.join(named)}." if named else ""


def seeds_kept(cells: Sequence[Cell], kept: Mapping[str, Kept]) -> str:
    """Return over how many seeds a figure is: 3, or "2 of 3" where one is not kept."""
    number = sum(cell.name in kept for cell in cells)
    return f"{number}" if number == len(cells) else f"{number} of {len(cells)}"


def preface(
    what: str, kept: Mapping[str, Kept], cells: Sequence[Cell], seeds: str, measured: str
) -> str:
    """Return what stands above the tables: what was run, how much is kept, what is measured."""
    return f"{what} {len(kept)} of {len(cells)} cells, {computing(kept)}; {seeds}. {measured}\n"


def listed(seeds: Sequence[int]) -> str:
    """Return seeds by name.

    >>> listed([0, 1, 2]), listed([0])
    ('seeds 0, 1, 2', 'seed 0')
    """
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def named(used: str, stands_for: str) -> str:
    """Return the name of a data set, and of the one it stands for.

    >>> named("digits", "mnist"), named("mnist", "mnist")
    ('digits for MNIST', 'MNIST')
    """
    return TITLES[used] + ("" if used == stands_for else f" for {TITLES[stands_for]}")


def computing(kept: Mapping[str, Kept]) -> str:
    """Return how long the kept cells took, all together, on what and in which precision."""
    hours = sum(one.record.get("seconds") or 0.0 for one in kept.values()) / 3600
    where = _said(kept, "device")
    return f"{hours:.2g} hours of computing{where and f' on {where}'} in {_said(kept, 'precision')}"


def _said(kept: Mapping[str, Kept], key: str) -> str:
    """Return the values that cells say of one of their options, joined by "and"."""
    values = {str((one.record.get("how") or {}).get(key, "auto")) for one in kept.values()}
    return " and ".join(sorted(values - {"auto"}))
