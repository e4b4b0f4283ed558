"""What anybody may see of a run: every public file, and what an observer was told.

Two views are compared value by value.  What the clock or a random name decides is named
here, by file and key; everything else counts, files that nobody thought of included.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedquilt.config import RunConfig

VOLATILE = {
    "result.json": ("metadata.timestamp", "ledger.head"),
    "checkpoint.safetensors": ("__metadata__.ledger_head",),
    "ledger.sqlite": ("entries.time", "entries.hash", "head.hash"),
    "": ("summary.ledger.head",),  # what a run returns
}
"""Decided by the clock: times, and the hashes that the ledger's entries are chained by."""

FROM_RELEASE = {"ledger.sqlite": ("entries.digest",)}
"""Computed from the release: equal where the releases are."""

Values = dict[str, Any]
"""Public values by name."""


class Recorder:
    """An observer that notes whatever it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __call__(self, config: RunConfig, line: dict[str, Any]) -> None:
        """Note a finished round."""
        self.told.append(["round", repr(config), json.loads(json.dumps(line))])

    def opened(self, config: RunConfig, folder: Path) -> None:
        """Note the folder."""
        self.told.append(["opened", repr(config), str(folder)])

    def working(self, what: str, share: float) -> None:
        """Note progress within a round."""
        self.told.append(["working", what, share])

    def kept(self, path: Path) -> None:
        """Note where images were written."""
        self.told.append(["kept", str(path)])


def folder_values(folder: Path, ledger: Path | None = None) -> tuple[Values, Values]:
    """Return the public values of a run's folder, and those that follow from the release.

    The names of folder and run are random or the clock's: they are replaced in every text.
    """
    names = _random_names(folder)
    public: Values = {}
    released: Values = {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if ledger is not None:
        paths.append(ledger)
    for path in paths:
        name = path.name if path == ledger else path.relative_to(folder).as_posix()
        public[f"{name}: rights"] = oct(stat.S_IMODE(path.stat().st_mode))
        for key, value in _file_values(path):
            where = _without_places(key)
            if where in VOLATILE.get(name, ()):
                continue
            into = released if where in FROM_RELEASE.get(name, ()) else public
            into[f"{name}: {key}"] = _renamed(value, names)
    return public, released


def renamed(values: Values, folder: Path | None) -> Values:
    """Return flat values in which the random names of a run are replaced."""
    names = {} if folder is None else _random_names(folder)
    return {
        key: _renamed(value, names)
        for key, value in flat(values)
        if _without_places(key) not in VOLATILE[""]
    }


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries and lists, `a.b[3]` by name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield f"{name}.length", len(value)
        for place, item in enumerate(value):
            yield from flat(item, f"{name}[{place}]")
    else:
        yield name, value


def differing(ours: Values, theirs: Values) -> list[str]:
    """Return the names of the values that differ, or are there in one world only."""
    return [key for key in {**ours, **theirs} if not same(ours.get(key), theirs.get(key))]


def same(ours: Any, theirs: Any) -> bool:
    """Tell whether two values are equal to the bit; NaN is NaN."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return struct.pack("d", ours) == struct.pack("d", theirs) or (
            math.isnan(ours) and math.isnan(theirs)
        )
    return type(ours) is type(theirs) and bool(ours == theirs)


def _file_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what a file says; the bytes of one in no known format."""
    if path.suffix == ".sqlite":
        yield from _table_values(path)
    elif not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return  # the owner's own: that it is there, and for whom, is all that shows
    elif path.suffix == ".json":
        yield from flat(json.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        yield from flat([json.loads(line) for line in lines])
    elif path.suffix == ".safetensors":
        yield from _tensor_values(path.read_bytes())
    else:
        yield "content", path.read_bytes()


def _tensor_values(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield header and tensors of a safetensors file, in the order they are laid out in."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    yield from flat(header)
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            yield f"{name}.content", content[8 + size + begin : 8 + size + end]


def _table_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every cell of every table of a ledger, but the random mark of its first entry."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        tables = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        yield from flat([list(table) for table in tables], "schema")
        for (table,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall():
            cursor = connection.execute(f'SELECT * FROM "{table}" ORDER BY 1')
            columns = [column[0] for column in cursor.description]
            for place, row in enumerate(cursor.fetchall()):
                cells = dict(zip(columns, row, strict=True))
                if table == "entries" and place == 0:
                    del cells["digest"]
                for column, value in cells.items():
                    yield f"{table}.{column}[{place}]", value


def _random_names(folder: Path) -> dict[str, str]:
    account = folder / "ledger.json"
    names = {str(folder): "FOLDER", folder.name: "FOLDER"}
    if account.exists():
        names[json.loads(account.read_text(encoding="utf-8"))["run_id"]] = "RUN"
    return names


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, str):
        return value
    for name in sorted(names, key=len, reverse=True):
        value = value.replace(name, names[name])
    return value


def _without_places(key: str) -> str:
    """Return `entries.time` for `entries.time[4]`: a key names all rows of a file."""
    return "".join(part.split("]")[-1] for part in key.split("["))
