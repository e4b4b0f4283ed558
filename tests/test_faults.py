"""Faults at system calls: what a power cut may leave, and a short form of the campaign."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults_at_calls import BENCHMARKS, denying, load, needs_shim
from tiers import rest_is_slow

power_cut = load("power_cut")
OPEN, CLOSE, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, LINK, MKDIR, RMDIR = range(1, 11)
Record = tuple[int, int, int, str, bytes]


def disk_after(root: Path, *records: Record) -> Any:
    """Return the model of a folder after some calls, which are done to the folder, too."""
    disk = power_cut.Disk(root)
    log = root.parent / "log"
    packed = [
        struct.pack("=iiqII", op, handle, number, len(path.encode()), len(data))
        + path.encode()
        + data
        for op, handle, number, path, data in records
    ]
    log.write_bytes(b"".join(packed))
    disk.replay(log)
    return disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    return folder


def replaced(root: Path, *, sync: bool, sync_name: bool) -> list[Record]:
    """Return the calls that replace `file`, some without the waiting for the disk."""
    new, path = str(root / "new"), str(root / "file")
    calls: list[Record] = [(OPEN, 3, os.O_CREAT, new, b""), (WRITE, 3, 0, "", b"newer")]
    calls += [(SYNC, 3, 0, "", b"")] * sync
    calls += [(CLOSE, 3, 0, "", b""), (RENAME, -1, 0, new, path.encode())]
    calls += [(OPEN, 4, 0, str(root), b""), (SYNC, 4, 0, "", b"")] * sync_name
    return calls


def test_what_would_outlast_a_cut_is_known_before_it(root: Path) -> None:
    unsynced = disk_after(root, *replaced(root, sync=True, sync_name=False))
    assert unsynced.durable(str(root / "file")) == b"old"
    synced = disk_after(root, *replaced(root, sync=True, sync_name=True))
    assert synced.durable(str(root / "file")) == b"newer"
    assert synced.durable(str(root / "nothing")) is None


def test_what_was_synced_survives(root: Path) -> None:
    disk = disk_after(root, *replaced(root, sync=True, sync_name=True))
    disk.cut(None)
    assert (root / "file").read_bytes() == b"newer"
    assert [path.name for path in root.iterdir()] == ["file"]


def test_a_rename_without_its_folder_is_lost(root: Path) -> None:
    disk = disk_after(root, *replaced(root, sync=True, sync_name=False))
    disk.cut(None)
    assert (root / "file").read_bytes() == b"old"


def test_bytes_that_were_not_synced_are_lost_under_their_new_name(root: Path) -> None:
    disk = disk_after(root, *replaced(root, sync=False, sync_name=True))
    disk.cut(None)
    assert (root / "file").read_bytes() == b""


def test_chance_leaves_every_lawful_state_and_no_other(root: Path) -> None:
    seen = set()
    for seed in range(60):
        (root / "file").write_bytes(b"old")
        (root / "new").unlink(missing_ok=True)
        disk = disk_after(root, *replaced(root, sync=False, sync_name=False))
        disk.cut(random.Random(seed))
        seen.add((root / "file").read_bytes())
    assert seen == {b"old", b"newer", b"", bytes(5)}


def test_a_torn_write_is_torn_at_sectors(root: Path) -> None:
    path, new = root / "file", b"n" * 2048
    found = set()
    for seed in range(40):
        path.write_bytes(b"o" * 2048)
        calls = [(OPEN, 3, 0, str(path), b""), (WRITE, 3, 0, "", new)]
        disk = disk_after(root, *calls)
        disk.cut(random.Random(seed))
        found.add(path.read_bytes())
    pieces = {content[at : at + 512] for content in found for at in range(0, 2048, 512)}
    assert pieces == {b"o" * 512, b"n" * 512}
    assert len(found) > 3


def test_a_folder_whose_name_was_not_synced_goes_with_all_that_is_in_it(root: Path) -> None:
    folder = root / "runs"
    inside = str(folder / "file")
    calls = [
        (MKDIR, -1, 0, str(folder), b""),
        (OPEN, 3, os.O_CREAT, inside, b""),
        (WRITE, 3, 0, "", b"x"),
        (SYNC, 3, 0, "", b""),
        (OPEN, 4, 0, str(folder), b""),
        (SYNC, 4, 0, "", b""),
    ]
    disk = disk_after(root, *calls)
    disk.cut(None)
    assert not folder.exists()


@needs_shim
@pytest.mark.processes
@pytest.mark.parametrize("count", rest_is_slow([8, 24], [8]))
def test_faults_at_system_calls_lose_nothing(tmp_path: Path, count: int) -> None:
    """A short form of `kill_campaign.py --faults 1000`."""
    kinds = "fedavg;certified, seeded;certified, secret noise;certified, shared ledger"
    command = [sys.executable, str(BENCHMARKS / "kill_campaign.py"), "--faults", str(count)]
    ended = subprocess.run(
        [*command, "--kinds", kinds, "--seed", "3", "--folder", str(tmp_path)],
        env=denying(),  # the shim is built and preloaded: one start less
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    sums = re.search(r"^all +\d+ +(\d+) +\d+ +0$", ended.stdout, re.MULTILINE)
    assert sums is not None, ended.stdout
    assert int(sums[1]) >= 5 * count // 6, ended.stdout
    assert list(tmp_path.iterdir()) == []
