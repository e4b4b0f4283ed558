"""Which papers can be run again, and their place on the page of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.schema import NUMBER, MapOf, Object, check
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import NOTE_BYTES, read_json
from reproduction import (
    fednum,
    fednum_page,
    heflwr,
    heflwr_page,
    quap_fl,
    quap_fl_page,
)
from reproduction.cells import Cell, kept_cells

BYTES_FILE = "table1.json"
HEAD_FILE = "noisy_head.json"


@dataclass(frozen=True)
class Paper:
    """One paper: its cells, and its section of the page from what is kept of them.

    Parameters
    ----------
    parts, scales
        What can be asked for.
    cells
        The runs of some parts at a scale.
    markdown
        The section of a scale from the folder of kept cells; with a name for it, the figure is
        shown.
    draw
        Draws the figures of a scale from the folder of kept cells, if there is anything to draw.
    prepare
        What some parts need that is no run.
    cpu_engine
        What trains fastest in one process on a CPU.
    """

    parts: tuple[str, ...]
    scales: tuple[str, ...]
    cells: Callable[[str, Sequence[str]], list[Cell]]
    markdown: Callable[[str, Path, str], str]
    draw: Callable[[str, Path, Path], None] = lambda scale, folder, path: None
    prepare: Callable[[Path, Sequence[str]], None] = lambda folder, parts: None
    cpu_engine: str = "sequential"


def _count_bytes(folder: Path, parts: Sequence[str]) -> None:
    """Keep what a client of ResNet-18 sends in each mode (Table 1 of QuAP-FL)."""
    if "table1" in parts and not (folder / BYTES_FILE).is_file():
        sent = {mode: quap_fl.bytes_sent(mode) for mode in quap_fl.MODES}
        write_file(folder / BYTES_FILE, f"{json.dumps(sent)}\n".encode(), parents=True)


def _quap_fl(scale: str, folder: Path, figure: str) -> str:
    sent: dict[str, int] = {}
    if (folder / BYTES_FILE).is_file():
        read = read_json(folder / BYTES_FILE, DataError, NOTE_BYTES)
        if set(read) != set(quap_fl.MODES) or not all(type(v) is int for v in read.values()):
            raise DataError(f"{folder / BYTES_FILE} must say the bytes of every mode")
        sent = read
    kept = kept_cells(folder, quap_fl.cells(scale))
    return quap_fl_page.markdown(scale, kept, sent, figure, _arms_of_head(folder / HEAD_FILE))


def _arms_of_head(path: Path) -> dict[str, dict[str, Any]]:
    """Read what `benchmarks/noisy_head.py` kept; nothing where it has kept nothing."""
    if not path.is_file():
        return {}
    arms = read_json(path, DataError, NOTE_BYTES)
    number = dict.fromkeys(("half", "end", "length"), NUMBER)
    check(arms, MapOf(Object(number)), path, DataError)
    return dict(arms)


def _draw_quap_fl(scale: str, folder: Path, path: Path) -> None:
    quap_fl_page.draw(scale, kept_cells(folder, quap_fl.cells(scale)), path)


def _heflwr(scale: str, folder: Path, figure: str) -> str:
    return heflwr_page.markdown(scale, kept_cells(folder, heflwr.cells(scale)))


def _fednum(scale: str, folder: Path, figure: str) -> str:
    return fednum_page.markdown(scale, kept_cells(folder, fednum.cells(scale)))


PAPERS: dict[str, Paper] = {
    "quap-fl": Paper(
        quap_fl.PARTS,
        quap_fl.SCALES,
        quap_fl.cells,
        _quap_fl,
        _draw_quap_fl,
        _count_bytes,
        cpu_engine="batched",
    ),
    "heflwr": Paper(heflwr.PARTS, heflwr.SCALES, heflwr.cells, _heflwr),
    "fednum": Paper(tuple(fednum.PARTS), fednum.SCALES, fednum.cells, _fednum),
}
"""What `python -m reproduction` knows, by name."""


def write_page(page: Path, paper: str, scale: str, text: str) -> None:
    """Put a section between its marks on a page: `<!-- results: quap-fl small -->`."""
    head, begin, end, rest = page_around(page, paper, scale)
    write_file(page, f"{head}{begin}\n\n{text}\n{end}{rest}".encode())


def page_around(page: Path, paper: str, scale: str) -> tuple[str, str, str, str]:
    """Return what stands before a section of a page, its two marks, and what stands after."""
    begin, end = f"<!-- results: {paper} {scale} -->", f"<!-- end: {paper} {scale} -->"
    written = page.read_text() if page.is_file() else ""
    if written.count(begin) != 1 or written.count(end) != 1:
        raise InvalidValueError(f"page={str(page)!r} must have {begin} and {end}, each once")
    head, rest = written.split(begin)
    return head, begin, end, rest.split(end)[1]
