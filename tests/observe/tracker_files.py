"""Reads what trackers wrote, without the code that wrote it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file.

    After 7 bytes of header the file is a LevelDB log: blocks of 32 KiB with chunks of
    (checksum, length, kind), where kinds 1 and 4 end a record and a block that has no
    room for another chunk is filled with zeros.
    """
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        room = BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if room < 7 or kind == 0:
            at += room
            continue
        if at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_files(folder: Path) -> list[Path]:
    """Return the .wandb files of a run's folder, oldest first, once they are whole.

    wandb's own process may write the end of a file just after the run was closed.
    """
    found = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    limit = time.monotonic() + 10
    while not all(_is_whole(file) for file in found) and time.monotonic() < limit:
        time.sleep(0.01)
    return sorted(found, key=_started)


def _started(file: Path) -> tuple[int, int]:
    start = next(r.run.start_time for r in wandb_records(file) if r.HasField("run"))
    return start.seconds, start.nanos


def _is_whole(file: Path) -> bool:
    return any(record.HasField("exit") for record in wandb_records(file))


def wandb_rows(file: Path) -> dict[int, dict[str, float]]:
    """Return the rows of a run by step, without the keys wandb adds."""
    return {
        step: {key: value for key, value in row.items() if not key.startswith("_")}
        for step, row in wandb_stamped_rows(file).items()
    }


def wandb_stamped_rows(file: Path) -> dict[int, dict[str, float]]:
    """Return the rows of a run by step, with wandb's clock times."""
    rows: dict[int, dict[str, float]] = {}
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            assert record.history.step.num not in rows
            rows[record.history.step.num] = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
    return rows


def tensorboard_events(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, value, clock time) of every scalar, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def tensorboard_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) of every scalar."""
    return {
        tag: [(step, value) for step, value, _ in events]
        for tag, events in tensorboard_events(folder).items()
    }
