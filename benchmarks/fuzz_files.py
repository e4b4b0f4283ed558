"""Hostile files: runs, ledgers and their journals, sweeps, federations, data, mutated.

    python benchmarks/fuzz_files.py [--inputs 20000] [--seed 0] [--folder FOLDER]

Each input is a copy of good files with something done to one of them, and one command, or
reader of the Python interface, on it.  Half of what is done knows the format: a value in JSON
becomes something else, a tensor gets another type or shape, an entry of the ledger says
something else and the hashes are made to fit.  The rest turns bits, cuts, repeats, and puts
links, folders and pipes where files were.

An input is *accepted* (exit 0, or the run would have gone on), or *refused* (one message).
What must not happen: a traceback, a process that still runs after ten seconds, a change to any
file outside the copy, half a gigabyte of memory, an escape sequence on the screen.  The table
counts all of these by kind of file.

Inputs are drawn from the seed and their number, so `--first 1234 --inputs 1` does one again.
Processes are forked from this one, which has everything imported; training itself is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LIMIT_SECONDS = 10
"""Of computing; a machine that is busy with other things is no hang."""

WAITING_SECONDS = 60
"""Of the clock, for whoever waits for something that never comes."""

MOST_MEMORY = 512 << 10
"""How much an input may add to a process, in KiB: no file of a campaign is larger than 1 MiB."""

BATCH = 25
# Raw JSON that json.dumps would not write; stands in quotes until the text is made.
RAW = {
    "@nan@": "NaN",
    "@inf@": "Infinity",
    "@large@": "1e999",
    "@digits@": "9" * 6000,
    "@many@": "9" * 500,
    "@deep@": "[" * 100_000 + "]" * 100_000,
    "@nested@": "[" * 500 + "]" * 500,
}
NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63 - 1, 2**63, -(2**63), 10**19, 0.5, -0.5, 1e308),
    *("", "inf", "nan", "\x1b[31mred", "a\nb", "\ud800", "\x00", "x" * 5000, "$\\bad{$", "[/]"),
    *([], {}, [None], [[]], {"a": 1}, [1, 2, 3], [1e400], ["a"], {"": {}}, "../../outside/victim"),
    *RAW,
]


class WentOnError(Exception):
    """The run would have gone on from here."""


@dataclass
class Tally:
    """What became of the inputs, by kind of file."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, outcome: str, what: str) -> None:
        """Count one input; keep a few of those that went wrong."""
        self.counts.setdefault(kind, Counter())[outcome] += 1
        if outcome not in ("accepted", "refused"):
            self.examples.setdefault(outcome, []).append(f"{kind}: {what}")
            print(f"{outcome}: {kind}: {what}", file=sys.stderr, flush=True)

    @property
    def total(self) -> int:
        """How many inputs there were."""
        return sum(sum(counter.values()) for counter in self.counts.values())

    @property
    def bad(self) -> int:
        """How many of them did what must not happen."""
        return sum(counter[name] for counter in self.counts.values() for name in BAD)

    def table(self) -> str:
        """Return one line a kind of file and the sums."""
        columns = ("accepted", "refused", *BAD)
        lines = [f"{'file':<24}{'inputs':>8}" + "".join(f"{name:>12}" for name in columns)]
        sums: Counter[str] = Counter()
        for kind, counter in sorted(self.counts.items()):
            sums += counter
            lines.append(_row(kind, counter, columns))
        lines.append(_row("all", sums, columns))
        seen: Counter[str] = Counter()
        for outcome, found in self.examples.items():
            for text in found:
                seen[f"{outcome}: {text.splitlines()[-1][:100]}"] += 1
                if seen[f"{outcome}: {text.splitlines()[-1][:100]}"] == 1:
                    lines.append(f"\n{outcome}\n{text}")
        return "\n".join(lines)


BAD = ("traceback", "hang", "outside", "memory", "escape")


def _row(kind: str, counter: Counter[str], columns: tuple[str, ...]) -> str:
    cells = "".join(f"{counter[name]:>12}" for name in columns)
    return f"{kind:<24}{sum(counter.values()):>8}{cells}"


# What is done to a file


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """Turn bits, cut, repeat, insert."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(data) + 1)
        end = min(len(data), place + draw.choice((1, 2, 8, 64, 1024)))
        what = draw.randrange(6)
        if what == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif what == 1:
            del data[place:end]
        elif what == 2:
            data[place:place] = data[place:end] * draw.choice((1, 2, 100))
        elif what == 3:
            data[place:place] = draw.randbytes(draw.choice((1, 4, 100)))
        elif what == 4:
            data[place:end] = draw.choice((b"\xff", b"\x00", b"[", b'"', b"\x1b")) * (end - place)
        else:
            del data[place:]
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value inside a JSON value."""
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places(inner, (*path, key))


def mutate_value(value: Any, draw: random.Random) -> Any:
    """Put something else in one place of a JSON value, or take it away."""
    path = draw.choice(list(places(value)))
    if not path:
        return draw.choice(NASTY)
    *outer, last = path
    inside = value
    for key in outer:
        inside = inside[key]
    what = draw.randrange(5)
    if what == 0:
        del inside[last]
    elif what == 1 and isinstance(inside, dict):
        inside[str(draw.choice(("", "x", "\x1b", "model/x", "round")))] = draw.choice(NASTY)
    else:
        inside[last] = draw.choice(NASTY)
    return value


def as_json(value: Any) -> bytes:
    """Write JSON that may hold what JSON does not allow."""
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def mutate_json(content: bytes, draw: random.Random) -> bytes:
    """Change one value of a JSON file."""
    return as_json(mutate_value(json.loads(content), draw))


def mutate_lines(content: bytes, draw: random.Random) -> bytes:
    """Change, drop, repeat or exchange lines of JSON."""
    lines = content.splitlines()
    place, what = draw.randrange(len(lines)), draw.randrange(6)
    if what == 0:
        del lines[place]
    elif what == 1:
        lines.insert(place, lines[draw.randrange(len(lines))])
    else:
        lines[place] = mutate_json(lines[place], draw)
    return b"\n".join(lines) + b"\n"


TOML = (
    *("true", "-1", "0", "1e999", "nan", "inf", '""', '"\\u001b[31m"', '"\\u0000"', "1979-05-27"),
    *("[]", "{}", "[[1]]", "9" * 6000, "9" * 300, "[" * 20_000 + "]" * 20_000, '"' + "x" * 70_000),
    *("9223372036854775807", "9223372036854775808", '"certified"', '"condense"', '"custom"'),
    *('"/"', '"../../outside/victim"', "1e-300", "3.0", '"all"', "0x7f", '"$\\\\bad$"'),
)


def mutate_toml(content: bytes, draw: random.Random) -> bytes:
    """Change, drop or add lines of a configuration."""
    lines = content.decode().splitlines()
    place, what = draw.randrange(len(lines)), draw.randrange(5)
    key = lines[place].split(" =")[0]
    if what == 0:
        del lines[place]
    elif what == 1:
        lines.append(draw.choice(("[a]", "a.b.c = 1", ".".join("a" * 9000) + " = 1", "x", "[[a]]")))
    elif what == 2:
        lines.append(lines[place])
    else:
        lines[place] = f"{key} = {draw.choice(TOML)}"
    return "\n".join(lines).encode()


def mutate_tensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a safetensors file, or tensors and header together."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    if draw.random() < 0.4:
        text = as_json(mutate_value(header, draw))
        return struct.pack("<Q", len(text)) + text + data
    names = [name for name in header if name != "__metadata__"]
    tensors = {
        name: (header[name]["dtype"], header[name]["shape"], _span(header[name], data))
        for name in names
    }
    name = draw.choice(names)
    dtype, shape, raw = tensors[name]
    what = draw.randrange(6)
    if what == 0:
        del tensors[name]
    elif what == 1:
        tensors[name] = (dtype, [*shape, 2], raw * 2)
    elif what == 2:
        tensors[name] = (dtype, [0], b"")
    elif what == 3:
        filling = draw.choice((np.nan, np.inf, -1.0, 1e300, 1e9))
        tensors[name] = (
            "F64",
            [max(1, len(raw) // 8)],
            np.full(max(1, len(raw) // 8), filling).tobytes(),
        )
    elif what == 4:
        other = draw.choice(
            (("BF16", 2), ("F16", 2), ("I64", 8), ("U8", 1), ("BOOL", 1), ("F8_E4M3", 1))
        )
        count = max(1, len(raw) // other[1])
        tensors[name] = (other[0], [count], (raw + bytes(8))[: count * other[1]])
    else:
        tensors[draw.choice(("state/x", "model/x", "\x1b[31m", "y" * 2000, ""))] = tensors[name]
    if draw.random() < 0.2:
        header["__metadata__"] = mutate_value(header["__metadata__"], draw)
    return _tensor_file(header.get("__metadata__"), tensors)


def _span(entry: dict[str, Any], data: bytes) -> bytes:
    start, end = entry["data_offsets"]
    return data[start:end]


def _tensor_file(metadata: Any, tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = as_json(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


SQL_VALUES = (None, "text", "\x1b[31m", -1, 0, 1, 2**63 - 1, 1.5, b"", b"\xff" * 9, b"\x01" * 40)
COLUMNS = [
    "seq",
    "kind",
    "time",
    "population",
    "run",
    "round",
    "reservation",
    "name",
    "digest",
    "body",
    "clients",
    "charges",
]


def mutate_ledger(path: Path, draw: random.Random) -> None:
    """Change rows of a ledger; half of the time the hashes are made to fit."""
    from fedquilt.privacy.ledger.entries import GENESIS, Entry

    connection = sqlite3.connect(path, isolation_level=None)
    count = connection.execute("SELECT max(seq) FROM entries").fetchone()[0]
    what, seq = draw.randrange(8), draw.randint(1, count)
    with contextlib.suppress(sqlite3.Error, OverflowError):
        if what == 0:
            column = draw.choice(("population", "seq", "spent", "joins", "last_entry", "open"))
            connection.execute(f"UPDATE snapshots SET {column} = ?", (draw.choice(SQL_VALUES),))
        elif what == 1:
            column = draw.choice(("seq", "hash"))
            connection.execute(f"UPDATE head SET {column} = ?", (draw.choice(SQL_VALUES),))
        elif what == 2:
            connection.execute("DELETE FROM entries WHERE seq = ?", (seq,))
        elif what in (3, 4):
            rows = connection.execute("SELECT seq, body FROM entries WHERE body IS NOT NULL")
            seq, body = draw.choice(rows.fetchall())
            changed = as_json(mutate_value(json.loads(body), draw)).decode()
            connection.execute("UPDATE entries SET body = ? WHERE seq = ?", (changed, seq))
        else:
            column, value = draw.choice(COLUMNS[1:]), draw.choice(SQL_VALUES)
            connection.execute(f"UPDATE entries SET {column} = ? WHERE seq = ?", (value, seq))
    if draw.random() < 0.7:
        previous = GENESIS
        rows = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM entries ORDER BY seq")
        with contextlib.suppress(Exception):  # an entry that cannot be hashed keeps its old hash
            for row in rows.fetchall():
                previous = Entry(*row).chained(previous)
                connection.execute("UPDATE entries SET hash = ? WHERE seq = ?", (previous, row[0]))
            connection.execute("UPDATE head SET seq = ?, hash = ?", (row[0], previous))
    connection.close()


TABLE_EDITS = (
    *("DROP TABLE points", "ALTER TABLE points ADD COLUMN x", "CREATE TABLE x (y)", "SELECT 1"),
    "CREATE TRIGGER t AFTER UPDATE ON points BEGIN DELETE FROM points; END",
    "ALTER TABLE points RENAME TO p; CREATE VIEW points AS SELECT * FROM p",
    *("PRAGMA user_version = -1", "DELETE FROM points WHERE point = 0", "DELETE FROM points"),
    *("UPDATE points SET state = 'waiting'", "UPDATE points SET point = point + 9"),
    "INSERT INTO points (point, state) SELECT value, 'done' FROM generate_series(1, 9)",
)
CELLS = (
    *("state", "accuracy", "loss", "rounds", "stopped", "claimed_epsilon", "claimed_delta"),
    *("charged", "message", "folder", "seed", "epsilon"),
)


def mutate_table(content: bytes, draw: random.Random) -> bytes:
    """Change cells, rows or the make of a sweep's table."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.deserialize(content)
        with contextlib.suppress(sqlite3.Error):
            if draw.random() < 0.3:
                database.executescript(draw.choice(TABLE_EDITS))
            else:
                value = draw.choice((*SQL_VALUES, "done", "refused", float("inf"), -float("inf")))
                change = f"UPDATE points SET {draw.choice(CELLS)} = ? WHERE point = ?"
                database.execute(change, (value, draw.randrange(3)))
        return database.serialize()


def mutate_archive(content: bytes, draw: random.Random) -> bytes:
    """Change an archive inside its packing, or the packing."""
    if draw.random() < 0.3:
        return mutate_bytes(content, draw)
    return gzip.compress(mutate_bytes(gzip.decompress(content), draw), 1)


def put_something_else(path: Path, draw: random.Random, outside: Path) -> None:
    """Put a link, a folder, a pipe or a file without an end in the place of a file."""
    path.unlink()
    what = draw.randrange(6)
    if what == 0:
        path.symlink_to(outside / "victim")
    elif what == 1:
        path.symlink_to("/dev/zero")
    elif what == 2:
        path.mkdir()
    elif what == 3:
        os.mkfifo(path)
    elif what == 4:
        with path.open("wb") as stream:
            stream.truncate(1 << 33)


def put_beside(path: Path, draw: random.Random, outside: Path) -> None:
    """Put a journal beside a database: a pipe, a link, a page that is far away, any bytes."""
    beside = path.with_name(path.name + draw.choice(("-journal", "-journal", "-wal", "-shm")))
    beside.unlink(missing_ok=True)
    what = draw.randrange(6)
    if what == 0:
        os.mkfifo(beside)
    elif what == 1:
        beside.symlink_to(draw.choice(("/dev/zero", "/dev/tty", str(outside / "victim"))))
    elif what == 2:
        beside.mkdir()
    elif what == 3:
        beside.write_bytes(draw.randbytes(draw.choice((1, 512, 5000))))
    else:
        page = draw.choice((0, 1, 2, 6_000_000, 2**31, 2**32 - 1))
        head = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
        sizes = (draw.choice((1, -1, 2**31 - 1)), 7, draw.choice((1, 4, 2**32 - 1)), 512, 512)
        fields = struct.pack(">iIIII", *sizes).ljust(504, b"\0")
        beside.write_bytes(head + fields + struct.pack(">I", page) + bytes(512) + bytes(4))


def link_outwards(path: Path, draw: random.Random, outside: Path) -> None:
    """Let a name of the folder lead to a file or folder outside of it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    target = draw.choice(("victim", "folder", "ledger.sqlite", "ledger.sqlite"))
    path.symlink_to(outside / target)


# The good files


def make_sources(folder: Path) -> None:
    """Make small runs, a shared ledger and data files to start from."""
    from fedquilt.config import build_config
    from fedquilt.experiment.api import run_config
    from fedquilt.record.folder import RunFolder

    tiny = {
        "dataset": "digits",
        "model": "linear",
        "num_clients": 6,
        "clients_per_round": 3,
        "availability": "always",
        "num_rounds": 3,
        "local_epochs": 1,
        "eval_every": 1,
    }
    small: dict[str, Any] = {"dataset": "digits", "method": "condense", "num_clients": 4}
    small |= {"num_rounds": 2, "eval_every": 1, "ipc": 1, "dc_iterations": 2}
    small |= {"model_epochs": 1, "model_n": 1, "min_group": 4}
    runs: dict[str, dict[str, Any]] = {
        "fedavg": {**tiny, "mode": "fedavg", "server_optimizer": "adam"},
        "quap_fl": {**tiny, "mode": "quap_fl"},
        "certified": {**tiny, "mode": "certified"},
        "heterofl": {**tiny, "model": "mlp", "method": "heterofl", "mode": "fedavg"},
    }
    for name, settings in runs.items():
        config = build_config({**settings, "output_dir": str(folder / "made")})
        _keep(run_config(config).folder, folder, name)
    made = run_config(build_config({**small, "output_dir": str(folder / "made")})).folder
    assert made is not None
    RunFolder(made).write_baselines({}, ["coreset"])
    RunFolder(made).write_attack(
        "inversion", {"client": 0, "images": 1, "psnr": {"tv": 9.0}, "blank": 9.0, "png": ""}
    )
    _keep(made, folder, "condense")
    make_ledger(folder / "ledger")
    make_data(folder / "data")
    make_sweep(folder / "sweep", {**tiny, "mode": "certified"})
    if FLOWER:
        make_federation(folder / "federation")
        make_site(folder / "site")


def _keep(made: Path | None, folder: Path, name: str) -> None:
    assert made is not None
    shutil.copytree(made, folder / f"{name}.finished")
    shutil.move(made, folder / f"{name}.open")
    (folder / f"{name}.open" / "result.json").unlink()


def make_ledger(folder: Path) -> None:
    """Make a ledger of two populations with settled, open and unbounded rounds."""
    from fedquilt.privacy.ledger import Ledger

    folder.mkdir()
    with Ledger.open(folder / "l.sqlite", create=True) as ledger:
        numbered = ledger.population("by number", num_clients=9, epsilon=6.0, delta=1e-5)
        named = ledger.population("by id", client_ids=["a", "b", "c"], epsilon=3.0, delta=1e-5)
        first = numbered.start_run("first", epsilon=3.0)
        for index in range(4):
            first.settle(first.reserve(index, [1, 3, 8], 0.01), f"release {index}")
        first.reserve(4, [2, 3], [0.01, 0.02])
        second = named.start_run("second", epsilon=None, client_ids=["c", "a"])
        second.record_unbounded(0, [0], "other")
        second.finish()
        account = numbered._account
        account.unsaved_bytes = 1 << 30
        with ledger.transaction():
            account.refresh(ledger._store)
            account.save_snapshot(ledger._store)


def make_federation(folder: Path) -> None:
    """Make the folder of a federation that was up, of two nodes and a seat, and its app."""
    from fedquilt.flower.federation import LocalFederation
    from fedquilt.flower.template import write_app

    federation = LocalFederation(folder)
    federation.prepare(write_app(folder.with_name("app")), 2, reserved_slots=1)
    jobs = {"superlink": {"pid": 4_000_000, "began": "77", "restarts": 0}}
    status = {"state": "running", "pid": 4_000_001, "began": "76", "processes": jobs}
    (folder / "status.json").write_text(json.dumps(status))
    make_notes(folder)


def make_notes(folder: Path) -> None:
    """Make what a run of a federation notes: how it stands, its nodes, what its operator did."""
    from fedquilt.common.storage import append_line
    from fedquilt.flower import journal
    from fedquilt.flower.run_notes import RUNNING, RunNotes

    results = folder / "results"
    shutil.copytree(folder.with_name("certified.open"), results / "run")
    notes = RunNotes(results, 7)
    copied = folder.parents[1] / "case" / "results" / "run"  # what is mutated (`Place.case`)
    notes.write(RUNNING, folder=copied)
    written = notes.path / "note.json"  # by this process; the run that it speaks of is gone
    written.write_text(json.dumps(json.loads(written.read_text()) | {"pid": 4_000_002}))
    append_line(notes.path / "words.log", "round 1 of 3")
    told = [
        {"asked": [0, 1], "round": 0, "at": 1.0},
        {"sent": [0, 1], "round": 0, "at": 2.0},
        {"client": 0, "round": 0, "refused": "by its site: closed", "seconds": 1.5},
    ]
    lines = "".join(f"{json.dumps(line)}\n" for line in told)
    (results / "run" / "nodes.jsonl").write_text(lines)
    for place in (folder, results):
        for number in range(3):
            journal.note(place, "up", nodes=number)


def make_site(folder: Path) -> None:
    """Make a policy and an account of two rounds, one of them not confirmed."""
    from fedquilt.flower.policy import read_policy, write_policy
    from fedquilt.flower.site import account_path, site_account

    folder.mkdir()
    path = folder / "site.toml"
    write_policy(path, apps=("a" * 64,), epsilon=4.0, delta=1e-5)
    policy = read_policy(path)
    ledger, population = site_account(account_path(path, policy), policy)
    with ledger:
        run = population.start_run("first", epsilon=2.0)
        run.settle(run.reserve(0, [0], 0.01), "release 0")
        run.reserve(1, [0], 0.02)
    (folder / "refused.log").write_text("closed\n")


def make_sweep(folder: Path, settings: dict[str, Any]) -> None:
    """Make a sweep of which one run has ended, one was stopped and one waits."""
    from fedquilt.config import build_config
    from fedquilt.sweep import make_plan, parse_axis, run_sweep

    plan = make_plan(build_config(settings).as_dict(), [parse_axis("epsilon=1,2,3")], [0])
    run_sweep(folder, plan, only=[0, 1])
    for name in ("result.json", "checkpoint.safetensors"):
        for path in folder.glob(f"points/00001/*/{name}"):
            path.unlink()
    (folder / "sweep.sqlite").unlink()
    run_sweep(folder, only=[])


def make_data(folder: Path) -> None:
    """Make IDX files, archives, files of LEAF, tables of clients."""
    from fedquilt.data import files

    folder.mkdir()
    idx = files.header("uint8", (5, 4)) + bytes(range(20))
    (folder / "idx").write_bytes(idx)
    (folder / "idx.gz").write_bytes(gzip.compress(idx))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("p/other", "p/idx"):
            info = tarfile.TarInfo(name)
            info.size = len(idx)
            tar.addfile(info, io.BytesIO(idx))
    (folder / "a.tar.gz").write_bytes(packed.getvalue())
    make_published(folder)
    (folder / "trace.csv").write_text("round,client\n0,1\n0,2\n1,0\n")
    (folder / "widths.csv").write_text("client,width\n0,1\n1,1/2\n2,0.25\n")
    (folder / "energy.csv").write_text("client,joules,battery,charge\n0,1,4,1\n1,2,,\n2,3,9,0\n")
    (folder / "devices.csv").write_text("client,memory_mb,flops\n0,9,9\n1,8,8\n2,7,1e3\n")


def make_published(folder: Path) -> None:
    """Make data sets in published forms: CIFAR-100, Tiny ImageNet and LEAF, of few pixels."""
    from PIL import Image

    with tarfile.open(folder / "cifar100.tar.gz", "w:gz") as tar:
        for name in ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"):
            info = tarfile.TarInfo(name)
            info.size = 28
            tar.addfile(info, io.BytesIO(bytes(range(28))))
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), (9, 99, 199)).save(picture, "JPEG")
    with zipfile.ZipFile(folder / "tiny.zip", "w") as packed:
        root = "tiny-imagenet-200"
        packed.writestr(f"{root}/wnids.txt", "n1\nn2\n")
        packed.writestr(f"{root}/train/n1/images/n1_0.JPEG", picture.getvalue())
        packed.writestr(f"{root}/val/images/val_0.JPEG", picture.getvalue())
        packed.writestr(f"{root}/val/val_annotations.txt", "val_0.JPEG\tn2\t0\t0\n")
    people = {"a": {"x": [[0, 0.5, 1, 0.25]] * 2, "y": [0, 61]}, "b": {"x": [], "y": []}}
    for part in ("train", "test"):
        (folder / "femnist" / part).mkdir(parents=True)
        content = {"users": ["a", "b"], "num_samples": [2, 0], "user_data": people}
        (folder / "femnist" / part / "x.json").write_text(json.dumps(content))


# What is done with it

Action = Callable[[Path], object]


def command(*arguments: str) -> Action:
    """Return the call of a command; `@` stands for the folder of the input."""

    def call(case: Path) -> object:
        from fedquilt.cli import main

        sys.argv = ["fedquilt", *(part.replace("@", str(case)) for part in arguments)]
        return main()

    return call


def read_folder(case: Path) -> object:
    """Read all there is in a run folder, as Python does."""
    import fedquilt
    from fedquilt.record.folder import RunFolder

    folder = RunFolder.open(case)
    folder.read_config()
    folder.read_account()
    folder.read_baselines()
    folder.read_attacks()
    folder.load_checkpoint()
    folder.read_rounds(1)
    return None if folder.read_result() is None else fedquilt.load(case).summary()


def use_ledger(case: Path) -> object:
    """Start a run in a ledger and go on with another, as Python does."""
    from fedquilt.privacy.ledger import Ledger

    with Ledger.open(case / "l.sqlite") as ledger:
        population = ledger.population("by number")
        population.start_run("first", epsilon=3.0)
        run = population.start_run("new", epsilon=1.0, if_exhausted="sit_out")
        run.settle(run.reserve(0, [4, 5], 0.001), "fresh")
        run.finish()
        return [(p.summary(), p.spent(), list(p.rows())) for p in ledger.populations()]


def build_from(case: Path) -> object:
    """Read a configuration as a run would."""
    from fedquilt.config import build_config

    return build_config(file=case / "config.toml")


def read_condensed(case: Path) -> object:
    """Read a condensed set."""
    from fedquilt.data import condensed_info, load_condensed

    return condensed_info(case / "condensed.safetensors"), load_condensed(
        case / "condensed.safetensors"
    )


def read_idx(name: str) -> Action:
    """Return the reader of a small IDX file, packed or not."""

    def read(case: Path) -> object:
        from fedquilt.data import files
        from fedquilt.data.specs import FileSpec

        content = files.header("uint8", (5, 4)) + bytes(range(20))
        sha256 = hashlib.sha256(content).hexdigest()
        spec = FileSpec("idx.gz", (5, 4), "uint8", len(content), sha256, 50, "0" * 32)
        return files.parse(files.read_verified(case / name, spec), "uint8", (5, 4))

    return read


def unpack(case: Path) -> object:
    """Unpack an archive whose checksum is taken for right."""
    from fedquilt.data import files
    from fedquilt.data.specs import ArchiveSpec, FileSpec

    content = (case / "idx").read_bytes()
    file = FileSpec("idx", (5, 4), "uint8", len(content), hashlib.sha256(content).hexdigest())
    (case / "scratch").mkdir()
    return files._extract(
        case / "a.tar.gz", ArchiveSpec("a.tar.gz", 0, "", "p"), [file], case / "scratch"
    )


def read_published(name: str, file: str, shape: tuple[int, int, int]) -> Action:
    """Return the reader of an archive whose checksum is taken for right."""

    def read(case: Path) -> object:
        from fedquilt.data.load import read_archive
        from fedquilt.data.specs import DATASETS

        spec = dataclasses.replace(DATASETS[name], image_shape=shape)
        return read_archive(spec, case / file)

    return read


def read_leaf(case: Path) -> object:
    """Read what LEAF's scripts write."""
    from fedquilt.data.load import load_leaf
    from fedquilt.data.specs import DATASETS

    return load_leaf(dataclasses.replace(DATASETS["femnist"], image_shape=(1, 2, 2)), [case])


def read_trace(case: Path) -> object:
    """Read a table of who is there."""
    from fedquilt.population import load_trace

    return load_trace(case / "trace.csv", 3)


def read_widths(name: str) -> Action:
    """Return the reader of a table of devices."""

    def read(case: Path) -> object:
        from fedquilt.slices.selection import client_widths

        random_ = np.random.default_rng(0)
        return client_widths(str(case / name), 3, random_, lambda width: (float(width), 1.0))

    return read


def read_energy(case: Path) -> object:
    """Read a table of what rounds cost clients."""
    from fedquilt.population.fleet import load_energy

    return load_energy(case / "energy.csv", 3)


def read_notes(case: Path) -> object:
    """Read what a federation's runs have noted, as its commands and its gate do."""
    from fedquilt.flower import journal
    from fedquilt.flower.federation import LocalFederation
    from fedquilt.flower.metrics import ServerFigures
    from fedquilt.flower.run_notes import submitted

    for place in (case, case / "results"):
        journal.events(place)
        journal.broken(place)
        journal.note(place, "down", nodes=1)
    for notes in submitted(case / "results"):
        for look in (notes.is_alive, notes.is_finished, notes.words, notes.asked):
            look()
    config = LocalFederation.config
    LocalFederation.config = lambda self: {**config(self), "output": str(case / "results")}
    LocalFederation(case)._waited_for()
    return ServerFigures(case / "results")()


def read_site(case: Path) -> object:
    """Read a site's figures."""
    from fedquilt.flower.metrics import site_metrics

    return site_metrics(case / "site.toml")


Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is, how its format is changed, what is done with it.

    `place` puts something beside the file or in its place instead.
    """

    name: str
    sources: tuple[str, ...]
    file: str
    change: Change | None
    actions: tuple[Action, ...]
    weight: int = 1
    place: Callable[[Path, random.Random, Path], None] | None = None


FINISHED = ("fedavg.finished", "certified.finished", "heterofl.finished", "quap_fl.finished")
OPEN = ("fedavg.open", "certified.open", "heterofl.open", "quap_fl.open")
RESUME = command("run", "--resume", "@", "--quiet")
SHOW = command("ledger", "show", "@")
VERIFY = command("ledger", "verify", "@")
LINKED = (
    RESUME,
    command("run", "--resume", "@", "--quiet", "--tracker", "tensorboard"),
    command("ledger", "show", "@"),
    command("report", "@", "--output", "@/page.html", "--no-look"),
)
STATEMENT = (command("statement", "@"), command("statement", "@", "--json"))
LEDGER = "@/l.sqlite"
ON_LEDGER = (
    command("ledger", "show", LEDGER),
    command("ledger", "show", LEDGER, "--json"),
    command("ledger", "export", LEDGER),
    command("ledger", "export", LEDGER, "--csv", "--population", "by number"),
    command("ledger", "verify", LEDGER),
    command("ledger", "backup", LEDGER, "@/copy.sqlite"),
    use_ledger,
)
REPORT = command("report", "@", "--output", "@/page.html", "--no-look")
SWEEP = command("sweep", "--resume", "@", "--quiet")
ON_SWEEP = (SWEEP, command("sweep", "--resume", "@", "--json"), REPORT)
FLOWER = importlib.util.find_spec("flwr") is not None
ON_FEDERATION = (
    command("flower", "status", "--folder", "@"),
    command("flower", "down", "--folder", "@"),
    command("flower", "run", "--folder", "@"),
    command("flower", "resume", "--folder", "@"),
    command("flower", "leave", "node0", "--folder", "@"),
    command("flower", "join", "late", "--node-config", "x=1", "--folder", "@"),
    command("flower", "rotate", "node1", "--folder", "@"),
    command("flower", "seats", "2", "--roster", "@/roster.json"),
)
ON_SITE = (
    *(command("site", name, "@/site.toml") for name in ("show", "verify", "statement")),
    command("site", "show", "@/site.toml", "--json"),
    command("site", "page", "@/site.toml", "-o", "@/page.html"),
    read_site,
)
CONDENSE = command("condense", "--resume", "@", "--quiet")
KINDS = [
    Kind(
        "result.json",
        FINISHED,
        "result.json",
        mutate_json,
        (*STATEMENT, RESUME, read_folder, VERIFY),
        4,
    ),
    Kind("rounds.jsonl", OPEN, "rounds.jsonl", mutate_lines, (RESUME, read_folder), 3),
    Kind(
        "private.jsonl", ("certified.open",), "private.jsonl", mutate_lines, (RESUME, read_folder)
    ),
    Kind(
        "checkpoint",
        (*OPEN, *FINISHED),
        "checkpoint.safetensors",
        mutate_tensors,
        (RESUME, read_folder, VERIFY),
        5,
    ),
    Kind(
        "ledger.json",
        ("certified.open", "certified.finished"),
        "ledger.json",
        mutate_json,
        (RESUME, SHOW, VERIFY),
        2,
    ),
    Kind("ledger of a run", ("certified.open",), "ledger.sqlite", None, (RESUME, SHOW, VERIFY), 3),
    Kind("ledger", ("ledger",), "l.sqlite", None, ON_LEDGER, 5),
    Kind("journal", ("ledger",), "l.sqlite", None, ON_LEDGER, 2, put_beside),
    Kind(
        "journal of a run",
        ("certified.open",),
        "ledger.sqlite",
        None,
        (RESUME, SHOW, VERIFY, REPORT),
        2,
        put_beside,
    ),
    *(
        Kind(f"{name}, a link", ("certified.open",), name, None, LINKED, 1, link_outwards)
        for name in (
            "ledger.sqlite",
            "tensorboard",
            "mlruns",
            "client_metrics.jsonl",
            "ledger.json",
        )
    ),
    Kind("journal of a sweep", ("sweep",), "sweep.sqlite", None, ON_SWEEP, 1, put_beside),
    *(
        Kind(f"{name}, a link", ("sweep",), name, None, ON_SWEEP, 1, link_outwards)
        for name in ("sweep.sqlite", "sweep.json", "points", "points/00000")
    ),
    Kind("config.toml of a run", OPEN, "config.toml", mutate_toml, (RESUME, read_folder)),
    Kind(
        "config file",
        ("fedavg.open", "condense.open"),
        "config.toml",
        mutate_toml,
        (
            build_from,
            command("run", "--config", "@/config.toml", "--quiet", "--output-dir", "@/out"),
        ),
        4,
    ),
    Kind(
        "result of condense",
        ("condense.finished",),
        "result.json",
        mutate_json,
        (CONDENSE, read_folder),
    ),
    Kind(
        "checkpoint of condense",
        ("condense.open",),
        "checkpoint.safetensors",
        mutate_tensors,
        (CONDENSE,),
        2,
    ),
    Kind(
        "baselines.json",
        ("condense.open", "condense.finished"),
        "baselines.json",
        mutate_json,
        (CONDENSE, read_folder),
    ),
    Kind("attacks.json", ("condense.finished",), "attacks.json", mutate_json, (read_folder,)),
    Kind(
        "condensed set",
        ("condense.finished",),
        "condensed.safetensors",
        mutate_tensors,
        (read_condensed, CONDENSE),
        3,
    ),
    Kind("sweep.json", ("sweep",), "sweep.json", mutate_json, ON_SWEEP, 3),
    Kind("sweep.sqlite", ("sweep",), "sweep.sqlite", mutate_table, ON_SWEEP, 3),
    Kind("IDX", ("data",), "idx", mutate_bytes, (read_idx("idx"),), 2),
    Kind("IDX, packed", ("data",), "idx.gz", mutate_archive, (read_idx("idx.gz"),), 2),
    Kind("archive", ("data",), "a.tar.gz", mutate_archive, (unpack,), 3),
    Kind(
        "CIFAR-100",
        ("data",),
        "cifar100.tar.gz",
        mutate_archive,
        (read_published("cifar100", "cifar100.tar.gz", (3, 2, 2)),),
        2,
    ),
    Kind(
        "Tiny ImageNet",
        ("data",),
        "tiny.zip",
        mutate_bytes,
        (read_published("tiny-imagenet", "tiny.zip", (3, 8, 8)),),
        2,
    ),
    Kind("LEAF", ("data",), "femnist/train/x.json", mutate_json, (read_leaf,), 3),
    Kind("table of presence", ("data",), "trace.csv", mutate_bytes, (read_trace,)),
    Kind("table of widths", ("data",), "widths.csv", mutate_bytes, (read_widths("widths.csv"),)),
    Kind("table of energy", ("data",), "energy.csv", mutate_bytes, (read_energy,)),
    Kind("table of devices", ("data",), "devices.csv", mutate_bytes, (read_widths("devices.csv"),)),
]
if FLOWER:
    KINDS += [
        Kind(f"{name} (Flower)", ("federation",), name, mutate_json, ON_FEDERATION)
        for name in ("federation.json", "status.json", "roster.json")
    ]
    KINDS += [
        Kind(f"{name} (Flower)", ("federation",), f"results/{name}", change, (read_notes,), 2)
        for name, change in (
            ("run/nodes.jsonl", mutate_lines),
            ("run/rounds.jsonl", mutate_lines),
            ("audit.jsonl", mutate_lines),
            (".submitted/7/note.json", mutate_json),
        )
    ]
    KINDS += [
        Kind("site.toml", ("site",), "site.toml", mutate_toml, ON_SITE, 3),
        Kind("account of a site", ("site",), "site.sqlite", None, ON_SITE, 3),
        Kind("journal of a site", ("site",), "site.sqlite", None, ON_SITE, 1, put_beside),
    ]


@dataclass(frozen=True)
class Place:
    """The folders of a campaign."""

    root: Path

    @property
    def sources(self) -> Path:
        """The good files."""
        return self.root / "sources"

    @property
    def outside(self) -> Path:
        """Files that nobody may touch."""
        return self.root / "outside"

    @property
    def case(self) -> Path:
        """The copy that is mutated."""
        return self.root / "case"

    def prepare(self) -> None:
        """Make the folders, and point everything that a run writes elsewhere into them."""
        for name in ("outside", "state", "tmp", "here"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.outside / "victim").write_bytes(b"precious\n" * 9)
        (self.outside / "folder").mkdir(exist_ok=True)
        make_ledger(self.outside / "precious")
        (self.outside / "precious" / "l.sqlite").rename(self.outside / "ledger.sqlite")
        (self.outside / "folder" / "round_0009.jpg").write_bytes(b"a photograph")
        os.environ["XDG_STATE_HOME"] = str(self.root / "state")
        os.environ["TMPDIR"] = str(self.root / "tmp")
        os.environ["HOME"] = str(self.root / "here")
        os.environ["FEDQUILT_DATA"] = str(self.root / "here")
        tempfile.tempdir = None
        os.chdir(self.root / "here")

    def renew(self, source: str) -> None:
        """Make a fresh copy of good files; what was noted of the last one is forgotten."""
        for folder in (self.case, self.root / "state", self.root / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
        (self.root / "tmp").mkdir()
        shutil.copytree(self.sources / source, self.case)

    def fingerprint(self) -> list[tuple[str, int, int, int]]:
        """Return what changes when anything outside the copy is written, moved or removed."""
        found = []
        for folder in (self.outside, self.sources, self.root / "here"):
            for path in sorted(folder.rglob("*")):
                status = path.lstat()
                found.append((str(path), status.st_mode, status.st_size, status.st_mtime_ns))
        return found


def make_case(place: Place, number: int, seed: int) -> tuple[Kind, Action]:
    """Make the files of one input; return its kind and what is to be done with it."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choices(KINDS, [kind.weight for kind in KINDS])[0]
    place.renew(draw.choice(kind.sources))
    path = place.case / kind.file
    if kind.place is not None:
        kind.place(path, draw, place.outside)
    elif draw.random() < 0.04:
        put_something_else(path, draw, place.outside)
    elif kind.change is None and draw.random() < 0.75:
        mutate_ledger(path, draw)
    elif kind.change is not None and draw.random() < 0.65:
        path.write_bytes(kind.change(path.read_bytes(), draw))
    else:
        path.write_bytes(mutate_bytes(path.read_bytes(), draw))
    if draw.random() < 0.03 and (place.case / "config.toml").exists():
        name = draw.choice((".lock", "synthetic", "private.jsonl", "baselines.json"))
        with contextlib.suppress(OSError):
            (place.case / name).symlink_to(place.outside / draw.choice(("victim", "folder")))
    if kind.sources == ("sweep",) and draw.random() < 0.2:
        name = draw.choice(("points", "points/00001", "points/00002", "points/00002/x"))
        name = draw.choice((name, ".lock", "sweep.sqlite-journal", "sweep.png"))
        shutil.rmtree(place.case / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # where another file was put in a folder's place
            (place.case / name).parent.mkdir(exist_ok=True)
            (place.case / name).symlink_to(place.outside / draw.choice(("victim", "folder", ".")))
    return kind, draw.choice(kind.actions)


def act(action: Action, case: Path) -> tuple[str, str]:
    """Do it; return the outcome and, where it went wrong, how."""
    from fedquilt.errors import FedquiltError

    try:
        action(case)
    except (FedquiltError, WentOnError) as error:
        return ("accepted" if isinstance(error, WentOnError) else "refused"), ""
    except SystemExit as stopped:
        return ("refused" if stopped.code else "accepted"), ""
    except BaseException:
        return "traceback", traceback.format_exc()
    return "accepted", ""


def without_training() -> None:
    """Let a run end where its first round would begin, and draw nothing."""
    from fedquilt.cli import run
    from fedquilt.experiment.loop import Experiment
    from fedquilt.papers.fednum import pictures
    from fedquilt.sweep import run as sweep
    from fedquilt.sweep import table as sweep_table

    def go_on(*_: object, **__: object) -> None:
        raise WentOnError

    def kill(process: int, signal: int) -> None:
        raise RuntimeError(f"process {process} would have been killed")

    os.kill = kill  # nothing runs that a folder could name
    Experiment.run = go_on  # type: ignore[method-assign, assignment]
    run.draw_history = lambda finished: None
    pictures.draw_pictures = lambda run_folder: []
    if FLOWER:
        from fedquilt.flower import federation

        federation.subprocess = SimpleNamespace(run=go_on, Popen=go_on, DEVNULL=-3)
        federation.Control.submit = go_on  # type: ignore[method-assign, assignment]
        # What is not the user's own is refused before it is read: go on as if all were.
        federation.LocalFederation._is_said = lambda self: True  # type: ignore[method-assign]
    sweep_table.plot_sweep = lambda *given: []
    # Runs are refused or begun in processes of their own; a sweep whose runs fail ends with 1.
    begin = sweep._Worker.run

    def go_on_too(worker: Any, plan: Any, point: Any, folder: Any) -> Any:
        worker._started = go_on
        return begin(worker, plan, point, folder)

    sweep._Worker.run = go_on_too  # type: ignore[method-assign]


def check_harness(place: Place) -> None:
    """Raise unless everything is accepted as long as nothing was done to the files."""
    for kind in KINDS:
        for source in kind.sources:
            for action in kind.actions:
                place.renew(source)
                outcome, how = act(action, place.case)
                without_ledger = action in (SHOW, VERIFY) and not source.startswith("certified")
                if outcome != "accepted" and not without_ledger:
                    raise RuntimeError(f"{kind.name} of {source} is {outcome} as it is: {how}")


def peak_memory() -> int:
    """Return the most memory that this process has held, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child(place: Place, numbers: range, seed: int, report: int) -> None:
    """Do a batch of inputs, and say of each what became of it."""
    quiet = os.open(os.devnull, os.O_RDONLY)
    screen = os.open(place.root / "screen", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream, target in ((0, quiet), (1, screen), (2, screen)):
        os.dup2(target, stream)
    without_training()
    if numbers.start == numbers.stop:
        check_harness(place)
    for number in numbers:
        before = place.fingerprint()
        kind, action = make_case(place, number, seed)
        os.ftruncate(screen, 0)
        os.lseek(screen, 0, os.SEEK_SET)
        memory = peak_memory()
        os.write(report, f"{json.dumps([number, kind.name, 'begun', ''])}\n".encode())
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
        signal.alarm(WAITING_SECONDS)
        outcome, how = act(action, place.case)
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.flush()
        if place.fingerprint() != before:
            outcome, how = "outside", "a file outside the copy was touched"
        elif b"\x1b" in (shown := os.pread(screen, 1 << 20, 0)):
            outcome, how = "escape", repr(shown[-2000:])
        elif peak_memory() - memory > MOST_MEMORY:
            outcome, how = "memory", f"{(peak_memory() - memory) >> 10} MiB"
        os.write(report, f"{json.dumps([number, kind.name, outcome, how[-3000:]])}\n".encode())
        if outcome == "memory":  # the peak stays with the process
            break
    os._exit(0)


def campaign(place: Place, first: int, inputs: int, seed: int, tally: Tally) -> None:
    """Do inputs `first` up to `first + inputs` in forked processes."""
    number, end, checked = first, first + inputs, False
    while number < end:
        batch = range(number, min(end, number + BATCH) if checked else number)
        receive, send = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(receive)
            try:
                child(place, batch, seed, send)
            except BaseException:
                broken = json.dumps([-1, "harness", "traceback", traceback.format_exc()])
                os.write(send, f"{broken}\n".encode())
            finally:
                os._exit(3)
        os.close(send)
        with open(receive, encoding="utf-8") as stream:
            lines = [json.loads(line) for line in stream]
        _, status = os.waitpid(process, 0)
        for index, kind, outcome, how in lines:
            if outcome != "begun":
                tally.add(kind, outcome, f"input {index}\n{how}")
        if lines and lines[-1][0] == -1:
            raise RuntimeError(lines[-1][3])
        if not checked:
            checked = True
            continue
        last = lines[-1] if lines else [number, "?", "begun", ""]
        if last[2] == "begun":
            why = signal.Signals(status & 0x7F).name if status & 0x7F else f"exit {status >> 8}"
            tally.add(last[1], "hang", f"input {last[0]} ended by {why}")
        number = last[0] + 1
        shown = f"{number - first} of {inputs}, {tally.bad} bad"
        print(shown, end="\r", file=sys.stderr, flush=True)


def warm() -> None:
    """Import what the inputs need before forking, and keep what is the same for all."""
    import typer.main

    import fedquilt.cli.app
    import fedquilt.experiment.api
    import fedquilt.report.ledger
    from fedquilt.data import load

    load.load_digits = functools.cache(load.load_digits)  # nothing trains on them
    load.load_dataset("digits")
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(fedquilt.cli.app.app)


def main() -> None:
    """Run a campaign and print its table; exit 1 when something must not have happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="Number of the first input.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Kinds of file that have this in their name.")
    parser.add_argument("--folder", help="Where to work; a temporary folder, by default.")
    options = parser.parse_args()
    KINDS[:] = [kind for kind in KINDS if options.only in kind.name]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place, tally, began = Place(Path(folder)), Tally(), time.monotonic()
        place.prepare()
        make_sources(place.sources)
        warm()
        campaign(place, options.first, options.inputs, options.seed, tally)
        os.chdir("/")
    print(tally.table())
    print(f"\n{tally.total} inputs in {time.monotonic() - began:.0f} s, {tally.bad} bad")
    sys.exit(1 if tally.bad else 0)


if __name__ == "__main__":
    main()
