"""The folder of a run: with `record/checkpoint.py` the only place that knows its file names.

| file | content | written |
|---|---|---|
| config.toml | the whole configuration | once, at the start |
| rounds.jsonl | one JSON line a round | after every round |
| checkpoint.safetensors | model and state after some round | replaced, about once a second |
| checkpoint-base-*.safetensors | long arrays of that state | now and then |
| result.json | the finished run | once, at the end |
| private.jsonl | raw measurements of a mode that claims a bound, mode 0600 | after every round |
| ledger.json | where the account is, whose, what the claim rests on, mode 0600 | at the start |
| clients.json | digests of who holds what, of data and first weights, mode 0600 | at the start |
| client_vectors-N.safetensors | what clients keep after N rounds, mode 0600 | with checkpoints |
| client_metrics.jsonl | what each client measures on its own samples, mode 0600 | at evaluations |
| synthetic/round_0003.safetensors | a condensation's images after some round | at evaluations |
| condensed.safetensors | its final images | once, at the end |
| baselines.json | what stands beside a condensation | at the start, after each baseline |
| attacks.json, inversion.png | what attacks of the owner found, mode 0600 | by `fedquilt attack` |

A kill at any moment leaves the last checkpoint whole: files are written beside
their final name, flushed to disk and renamed.  Lines of rounds.jsonl beyond the
checkpoint are dropped on resume, because those rounds run again.

In a run on a ledger that others share, ledger.json is there before config.toml, and in any run
with an account before the first round: without it neither may go on (`has_released`).

A run folder may come from a stranger.  The folder itself may be reached through a link, but
what is in it must be its own: regular files and a real folder `synthetic`.  A link there would
have a resumed run append to, or delete, files anywhere else, or charge another ledger.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import shlex
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common import storage, untrusted
from fedquilt.common.errors import FedquiltError, RunFolderError, StorageError
from fedquilt.common.formatting import printable
from fedquilt.common.schema import Schema, check
from fedquilt.common.storage import storage_errors
from fedquilt.config import RunConfig, plain_config, write_config_file
from fedquilt.record.checkpoint import Checkpoint, CheckpointFiles, Expected, as_tensor
from fedquilt.record.schema import (
    ACCOUNT,
    ATTACKS,
    BASELINES,
    CLIENT_METRICS,
    CLIENTS,
    RESULT,
    ROUND,
    SCHEMA_VERSION,
    check_schema,
    readable,
)

if TYPE_CHECKING:  # whoever only reads a result or asks for its ledger needs no torch
    import torch
    from numpy.typing import NDArray

_OF_ROUNDS = (
    *("rounds.jsonl", "private.jsonl", "checkpoint.safetensors", "client_metrics.jsonl"),
    "condensed.safetensors",
)
_FILES = (
    *_OF_ROUNDS,
    *("config.toml", "result.json", "ledger.json", "clients.json", "baselines.json", ".lock"),
    *("attacks.json", "inversion.png"),
    *(f"ledger.sqlite{end}" for end in ("", "-journal", "-wal", "-shm")),
)

_VECTORS = "client_vectors-*.safetensors"
_JUST_MADE_SECONDS = 60.0


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: io.FileIO | None = None
        self._checkpoint = CheckpointFiles(path)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        output_dir: str,
        note: str = "",
        account: dict[str, Any] | None = None,
    ) -> RunFolder:
        """Make the folder `{dataset}_{mode}[_{method}]_seed{seed}_{timestamp}` and lock it.

        A note stands below the configuration as a comment.  An account that the run has
        already is written first: a configuration that names a ledger is never without it.
        """
        stem = run_stem(config)
        with storage_errors(output_dir):
            storage.make_folder(Path(output_dir))
            _remove_unbegun(Path(output_dir))
            folder = cls(make_fresh(Path(output_dir), stem))
            try:
                folder.acquire(is_new=True)
                if account is not None:
                    folder.write_account(account)
                text = io.StringIO()
                write_config_file(config, text)
                if note:
                    text.write(f"\n# {printable(note)}\n")
                storage.write_file(folder.path / "config.toml", text.getvalue().encode())
            except BaseException:
                folder.close()
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run, or raise when the folder is none."""
        folder = cls(Path(path))
        with readable(folder.path):
            is_folder = folder.path.is_dir()
            has_config = (folder.path / "config.toml").is_file()
        if not is_folder:
            found = "is a file" if folder.path.exists() else "does not exist"
            if found == "is a file" and folder.path.suffix == ".sqlite":
                found += f"; a ledger is shown by  fedquilt ledger show {shlex.quote(str(path))}"
            raise RunFolderError(f"run folder {str(path)!r} must be a folder; it {found}")
        if not has_config:
            raise RunFolderError(f"run folder {str(path)!r} must hold a config.toml; it has none")
        folder._check_own()
        return folder

    def _check_own(self) -> None:
        """Refuse a folder with links, pipes or devices in the place of its files."""
        with readable(self.path):
            images = self._images()
            names = (self.path / name for name in _FILES)
            own = (*names, *self._checkpoint.bases(), *self.path.glob(_VECTORS))
            for path in (*own, *images.glob("round_*")):
                storage.check_regular(path)

    def has_released(self) -> bool:
        """Tell whether anything is there that only a round, or its images, can have left."""
        with readable(self.path):
            files = [self.path / name for name in _OF_ROUNDS]
            left = any(path.exists() and path.stat().st_size for path in files)
            return left or any(self._checkpoint.bases()) or any(self._images().glob("round_*"))

    def _images(self) -> Path:
        """Return the folder of the images, which is in this one if it is there."""
        path = self.path / "synthetic"
        storage.check_own_folder(path)
        return path

    def acquire(self, *, is_new: bool = False) -> None:
        """Lock the folder for this process; two processes must not write one run."""
        with storage_errors(self.path):
            try:
                self._lock = storage.lock_file(self.path / ".lock")
            except BlockingIOError as error:
                raise RunFolderError(
                    f"run folder {str(self.path)!r} is in use by another process"
                ) from error
            except storage.NoLocksError as error:
                warnings.warn(
                    f"{error}: nothing keeps a second process from continuing this run at the "
                    "same time; take care that none does",
                    stacklevel=2,
                )
            if not is_new:
                self._make_names_durable()
        storage.remove_leftovers(self.path)

    def remove_leftovers(self) -> None:
        """Remove what a process has left that was killed while it drew a finished run."""
        if any(self.path.glob(".*.tmp")):
            with contextlib.suppress(FedquiltError):  # somebody writes, or nobody may
                self.acquire()
                self.close()

    def _make_names_durable(self) -> None:
        """Sync what a process that was killed has renamed, before anything is built on it.

        A kill between a rename and the sync of its folder leaves a checkpoint that everybody
        sees and that a power cut would take back.
        """
        for folder in (self.path, self._images()):
            if folder.is_dir():
                storage.sync_folder(folder)

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_config(self) -> RunConfig:
        """Return the configuration of the run."""
        storage.check_regular(self.path / "config.toml")
        return plain_config(file=self.path / "config.toml")

    def append_round(self, record: dict[str, Any], private: dict[str, Any] | None = None) -> None:
        """Add one line to rounds.jsonl, and one to private.jsonl when there is one."""
        if private is not None:
            self._append("private.jsonl", {"round": record["round"], **private}, 0o600)
        self._append("rounds.jsonl", record, 0o666)

    def _append(self, name: str, record: dict[str, Any], mode: int) -> None:
        line = json.dumps({"schema_version": SCHEMA_VERSION, **finite(record)})
        storage.append_line(self.path / name, line, mode)

    def append_client_metrics(self, rounds: int, rows: list[dict[str, Any]]) -> None:
        """Add what each client measured after so many rounds; for the owner only."""
        self._append("client_metrics.jsonl", {"rounds": rounds, "clients": rows}, 0o600)

    def read_client_metrics(self) -> dict[int, list[dict[str, Any]]]:
        """Return what clients measured, by the number of rounds before it.

        A round that ran again after a kill has two lines, of which the newer one counts.
        """
        path = self.path / "client_metrics.jsonl"
        storage.check_regular(path)
        # It is the owner's; whoever else may read the run does without.
        if path.exists() and not os.access(path, os.R_OK):
            return {}
        measured = {}
        for number, line in enumerate(untrusted.read_lines(path, RunFolderError)):
            where = f"{path}, line {number + 1}"
            record = untrusted.parse_json(line, where, RunFolderError, "one JSON object a line")
            check(record, CLIENT_METRICS, where, RunFolderError)
            measured[record["rounds"]] = record["clients"]
        return measured

    def amend_round(self, record: dict[str, Any], private: dict[str, Any] | None = None) -> None:
        """Replace the last line of rounds.jsonl, and that of private.jsonl when there is one."""
        if private is not None:
            self._amend("private.jsonl", {"round": record["round"], **private}, 0o600)
        self._amend("rounds.jsonl", record, 0o666)

    def _amend(self, name: str, record: dict[str, Any], mode: int) -> None:
        path = self.path / name
        line = json.dumps({"schema_version": SCHEMA_VERSION, **finite(record)})
        kept = untrusted.read_lines(path, RunFolderError)[:-1]
        storage.write_file(path, b"".join(kept) + line.encode() + b"\n", mode)

    def synthetic_path(self, rounds: int | None = None) -> Path:
        """Return where the synthetic set after so many rounds is; None: the final one."""
        if rounds is None:
            return self.path / "condensed.safetensors"
        return self.path / "synthetic" / f"round_{rounds:04d}.safetensors"

    def room_for_synthetic(self, rounds: int | None = None) -> Path:
        """Return where the synthetic set goes, its folder made."""
        path = self.synthetic_path(rounds)
        with storage_errors(path):
            if rounds is not None:
                storage.make_folder(self._images())
        return path

    def drop_images(self, count: int) -> None:
        """Remove images, and their pictures, of rounds after the first `count`, and torn files.

        Those rounds run again; with new noise their images will be others.
        """
        first, images = self.synthetic_path(count), self._images()
        later = [path for path in images.glob("round_*") if path.stem > first.stem]
        with storage_errors(images):
            for path in later:
                path.unlink()
        storage.remove_leftovers(images)

    def write_account(self, account: dict[str, Any]) -> None:
        """Write ledger.json: where this run's account is, whose it is, what its claim rests on.

        The digest of its clients depends on what they hold: it is for the owner only.
        """
        text = json.dumps({"schema_version": SCHEMA_VERSION, **account}, indent=1)
        storage.write_file(self.path / "ledger.json", text.encode(), 0o600)

    def note_basis(self, basis: dict[str, Any]) -> None:
        """Write into ledger.json what the claim rests on from here on."""
        kept = self._read_json("ledger.json", ACCOUNT, untrusted.NOTE_BYTES) or {}
        if kept.get("basis") != json.loads(json.dumps(basis)):
            self.write_account({**kept, "basis": basis})

    def write_clients(self, digests: dict[str, str]) -> None:
        """Write clients.json: what a resumed run compares its clients and data with.

        It depends on what clients hold, so it is for the owner only.
        """
        text = json.dumps({"schema_version": SCHEMA_VERSION, **digests}, indent=1)
        storage.write_file(self.path / "clients.json", text.encode(), 0o600)

    def read_clients(self) -> dict[str, Any] | None:
        """Return what clients.json says, None for a run of an older fedquilt."""
        return self._read_json("clients.json", CLIENTS, untrusted.NOTE_BYTES)

    def digests(self) -> dict[str, str]:
        """Return, for the owner, what tells own parts, data and first weights from others."""
        kept = self.read_clients() or {}
        data = f"{kept['clients']} {kept['tested']}" if "tested" in kept else ""
        return {"held": kept.get("held", ""), "data": data, "begins": kept.get("begins", "")}

    def read_account(self) -> dict[str, Any] | None:
        """Return what ledger.json says, None for a run without a ledger.

        A ledger in the folder itself is written down by its name alone, so that
        the folder may be moved.
        """
        account = self._read_json("ledger.json", ACCOUNT, untrusted.NOTE_BYTES)
        if account is not None:
            name = account["ledger"]
            if "\0" in name or not name.isprintable():
                raise RunFolderError(f"{self.path / 'ledger.json'}: ledger={name!r} is no path")
            account["ledger"] = str(self.path / name)
        return account

    def read_rounds(self, count: int) -> list[dict[str, Any]]:
        """Return the first `count` rounds and drop what comes after them."""
        path, private = self.path / "rounds.jsonl", self.path / "private.jsonl"
        lines, records = self._first_rounds(count)
        with readable(self.path):
            secrets = untrusted.read_lines(private, RunFolderError)
        if len(lines) > count:
            storage.write_file(path, b"".join(lines[:count]))
        if len(secrets) > count:
            storage.write_file(private, b"".join(secrets[:count]), 0o600)
        return records

    def check_rounds(self) -> None:
        """Refuse a folder without the rounds of its checkpoint; nothing is written."""
        self._first_rounds(self._checkpoint.rounds())

    def _first_rounds(self, count: int) -> tuple[list[bytes], list[dict[str, Any]]]:
        """Return all lines of rounds, and what the first `count` of them say."""
        path = self.path / "rounds.jsonl"
        with readable(self.path):
            lines = untrusted.read_lines(path, RunFolderError)
        records = [_round(line, number, path) for number, line in enumerate(lines[:count])]
        if len(records) < count:
            raise RunFolderError(f"{path} must hold {count} rounds; it holds {len(records)}")
        return lines, records

    def peek_rounds(self, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
        """Return the rounds that are written so far, also while the run goes on.

        Nothing is dropped or changed; a last line that is not whole yet is left out.
        """
        path = self.path / name
        with readable(self.path):
            lines = untrusted.read_lines(path, RunFolderError)
        records = []
        for number, line in enumerate(lines):
            if not line.endswith(b"\n"):
                break
            where = f"{path}, line {number + 1}"
            record = untrusted.parse_json(line, where, RunFolderError, "one JSON object a line")
            check_schema(record, path)
            del record["schema_version"]
            if name == "rounds.jsonl":
                check(record, ROUND, where, RunFolderError)
            records.append(record)
        return records

    def save_checkpoint(
        self,
        rounds: int,
        model: dict[str, torch.Tensor],
        state: dict[str, NDArray[Any]],
        ledger_head: str = "",
        *,
        run_id: str = "",
        whole: bool = False,
    ) -> None:
        """Replace the checkpoint by the state after `rounds` rounds; `whole`: in one file."""
        for name in ("rounds.jsonl", "private.jsonl"):
            storage.sync_file(self.path / name)
        self._checkpoint.save(rounds, model, state, ledger_head, run_id=run_id, whole=whole)

    def load_checkpoint(self, expected: Expected | None = None) -> Checkpoint | None:
        """Return the checkpoint, or None when there is none yet.

        `expected` is asked which state arrays to load, before any is; None loads all.
        """
        return self._checkpoint.load(expected)

    def save_vectors(self, rounds: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Write what clients keep after so many rounds, before the checkpoint of the same."""
        tensors = {key: as_tensor(array) for key, array in arrays.items()}
        content = storage.as_safetensors(tensors, {"rounds": str(rounds)})
        storage.write_file(self._vectors(rounds), content, 0o600)

    def drop_vectors(self, rounds: int) -> None:
        """Remove what clients kept after other rounds, once the checkpoint is written."""
        for path in self.path.glob(_VECTORS):
            if path != self._vectors(rounds):
                with contextlib.suppress(OSError):  # in nobody's way
                    path.unlink()

    def load_vectors(self, rounds: int) -> dict[str, NDArray[Any]]:
        """Return what clients kept after so many rounds."""
        path, wrong = self._vectors(rounds), "is not what clients keep of this run"
        with readable(self.path):
            storage.check_regular(path)
            if not path.exists():
                raise RunFolderError(f"{path} is missing: the run cannot go on without it")
        with untrusted.opened_tensors(path, wrong, RunFolderError, framework="np") as opened:
            if opened.metadata.get("rounds") != str(rounds):
                raise RunFolderError(f"{path} {wrong}")
            return {name: opened.get(name) for name in opened.specs}

    def _vectors(self, rounds: int) -> Path:
        return self.path / _VECTORS.replace("*", str(rounds))

    def checkpoint_head(self) -> str:
        """Return the ledger's head that the checkpoint has kept, "" when there is none."""
        return self._checkpoint.head()

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json; from then on the run is finished."""
        content = {"schema_version": SCHEMA_VERSION, **finite(result)}
        storage.write_file(self.path / "result.json", _json_parts(content))

    def write_baselines(self, rows: dict[str, Any], wanted: list[str] | None = None) -> None:
        """Write baselines.json: what stands beside a condensation, by name.

        `wanted` says which are asked for; None leaves what was said before.
        """
        asked = self.wanted_baselines() if wanted is None else wanted
        content = {"schema_version": SCHEMA_VERSION, "wanted": asked, "rows": finite(rows)}
        # Beside a claim they are the owner's alone: they come from raw data.
        mode = 0o600 if self.read_config().is_bounded(covered=True) else 0o666
        text = json.dumps(content, indent=1)
        storage.write_file(self.path / "baselines.json", text.encode(), mode)

    def wanted_baselines(self) -> list[str] | None:
        """Return the baselines that were asked for when the run began; None: not known."""
        content = self._read_json("baselines.json", BASELINES)
        wanted: list[str] | None = (content or {}).get("wanted")
        return wanted

    def read_baselines(self) -> dict[str, Any]:
        """Return the baselines computed so far."""
        content = self._read_json("baselines.json", BASELINES)
        return {} if content is None else dict(content["rows"])

    def write_attack(self, name: str, found: Any, picture: bytes | None = None) -> None:
        """Write what one attack found beside the others, for the owner alone."""
        content = {"schema_version": SCHEMA_VERSION, **self.read_attacks(), name: found}
        text = json.dumps(content, indent=1)
        storage.write_file(self.path / "attacks.json", text.encode(), 0o600)
        if picture is not None:
            storage.write_file(self.path / "inversion.png", picture, 0o600)

    def read_attacks(self) -> dict[str, Any]:
        """Return what attacks found, by their names; empty: nobody attacked."""
        content = self._read_json("attacks.json", ATTACKS) or {}
        return {key: value for key, value in content.items() if key != "schema_version"}

    def read_result(self) -> dict[str, Any] | None:
        """Return the result of a finished run, None while it is unfinished."""
        return self._read_json("result.json", RESULT)

    def _read_json(
        self, name: str, shape: Schema, most: int = untrusted.JSON_BYTES
    ) -> dict[str, Any] | None:
        """Return the object in a file when it has this shape; None when there is no file."""
        path = self.path / name
        with readable(self.path):
            storage.check_regular(path)
            if not path.exists():
                return None
        content = untrusted.read_json(path, RunFolderError, most)
        check_schema(content, path)
        check(content, shape, path, RunFolderError)
        return content


def _json_parts(content: dict[str, Any]) -> Iterator[bytes]:
    """Yield a JSON object with indents, in parts: a list of a million clients makes many."""
    texts = json.JSONEncoder(indent=1).iterencode(content)
    while part := "".join(itertools.islice(texts, 1 << 14)):
        yield part.encode()


def finite(value: Any) -> Any:
    """Return a JSON value with every NaN and Inf replaced by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {int}:  # one number a client
            return list(value)
        return [finite(item) for item in value]
    return value


def run_stem(config: RunConfig) -> str:
    """Return the name of a run that starts now."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    # A mode is `certified`, a method `heterofl`; whole models and condensation go without saying.
    method = "" if config.method in ("full", "condense") else f"_{config.method}"
    return f"{config.dataset}_{config.mode}{method}_seed{config.seed}_{stamp}"


def _round(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Return a round's line without its version, checked to the last key that is used."""
    where = f"{path}, line {number + 1}"
    record = untrusted.parse_json(line, where, RunFolderError, "one JSON object a line")
    check_schema(record, path)
    if record.pop("schema_version") and record.get("round") != number:
        raise RunFolderError(f"{where}: expected round {number}")
    check(record, ROUND, where, RunFolderError)
    return dict(record)


def _remove_unbegun(parent: Path) -> None:
    """Remove the folders of runs that were killed before they had a configuration.

    They hold a lock that nobody holds, and nothing else.
    """
    for lock in parent.glob("*_seed*/.lock"):
        folder = lock.parent
        if (folder / "config.toml").exists() or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):  # in nobody's way, or just being made
            if time.time() - lock.stat().st_mtime > _JUST_MADE_SECONDS:
                with storage.lock_file(lock):
                    storage.remove_leftovers(folder)
                    if [path.name for path in folder.iterdir()] == [lock.name]:
                        lock.unlink()
                        folder.rmdir()


def make_fresh(parent: Path, stem: str) -> Path:
    """Create the folder, numbering it when two runs start in the same second.

    It is its owner's: the length of a private file says something of the clients' data.
    """
    for number in range(1, 1000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
            storage.sync_folder(parent)
            return path
    raise StorageError(f"cannot create a run folder {str(parent / stem)!r}: all names are taken")
