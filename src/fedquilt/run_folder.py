"""The folder of a run: the only place that knows its file names and formats.

| file | content | written |
|---|---|---|
| config.toml | the whole configuration | once, at the start |
| rounds.jsonl | one JSON line a round | after every round |
| checkpoint.safetensors | model and state after some round | replaced, about once a second |
| result.json | the finished run | once, at the end |
| private.jsonl | raw measurements of a mode that claims a bound, mode 0600 | after every round |
| ledger.json | where the run's account is, a digest of its clients, mode 0600 | at the start |
| synthetic/round_0003.safetensors | a condensation's images after some round | at evaluations |
| condensed.safetensors | its final images | once, at the end |
| baselines.json | what stands beside a condensation | at the start, after each baseline |

A kill at any moment leaves the last checkpoint whole: files are written beside
their final name, flushed to disk and renamed.  Lines of rounds.jsonl beyond the
checkpoint are dropped on resume, because those rounds run again.

A run folder may come from a stranger.  The folder itself may be reached through a link, but
what is in it must be its own: regular files and a real folder `synthetic`.  A link there would
have a resumed run append to, or delete, files anywhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common import storage
from fedquilt.common.errors import RunFolderError, StorageError
from fedquilt.common.storage import storage_errors
from fedquilt.config import RunConfig, build_config, write_config_file

if TYPE_CHECKING:  # whoever only reads a result or asks for its ledger needs no torch
    import torch
    from numpy.typing import NDArray

SCHEMA_VERSION = 1

_FILES = (
    *("config.toml", "rounds.jsonl", "checkpoint.safetensors", "result.json", "private.jsonl"),
    *("ledger.json", "condensed.safetensors", "baselines.json", ".lock"),
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after some round: model tensors, state arrays, the ledger's head then."""

    rounds: int
    model: dict[str, torch.Tensor]
    state: dict[str, NDArray[Any]]
    ledger_head: str


class RunFolder:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: io.FileIO | None = None

    @classmethod
    def create(cls, config: RunConfig, output_dir: str) -> RunFolder:
        """Make the folder `{dataset}_{mode}_seed{seed}_{timestamp}` and lock it."""
        stem = run_stem(config)
        with storage_errors(output_dir):
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            folder = cls(make_fresh(Path(output_dir), stem))
            try:
                folder.acquire()
                text = io.StringIO()
                write_config_file(config, text)
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
        if not folder.path.is_dir():
            raise RunFolderError(f"run folder {str(path)!r} must be a folder, which it is not")
        if not (folder.path / "config.toml").is_file():
            raise RunFolderError(f"run folder {str(path)!r} must hold a config.toml; it has none")
        folder._check_own()
        return folder

    def _check_own(self) -> None:
        """Refuse a folder with links, pipes or devices in the place of its files."""
        images = self._images()
        for path in (*(self.path / name for name in _FILES), *images.glob("round_*")):
            storage.check_regular(path)

    def _images(self) -> Path:
        """Return the folder of the images, which is in this one if it is there."""
        path = self.path / "synthetic"
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise RunFolderError(f"{str(path)!r} must be a folder of its own, not a link or a file")
        return path

    def acquire(self) -> None:
        """Lock the folder for this process; two processes must not write one run."""
        with storage_errors(self.path):
            try:
                self._lock = storage.lock_file(self.path / ".lock")
            except BlockingIOError as error:
                raise RunFolderError(
                    f"run folder {str(self.path)!r} is in use by another process"
                ) from error
        storage.remove_leftovers(self.path)

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_config(self) -> RunConfig:
        """Return the configuration of the run."""
        storage.check_regular(self.path / "config.toml")
        return build_config(file=self.path / "config.toml")

    def append_round(self, record: dict[str, Any], private: dict[str, Any] | None = None) -> None:
        """Add one line to rounds.jsonl, and one to private.jsonl when there is one."""
        if private is not None:
            self._append("private.jsonl", {"round": record["round"], **private}, 0o600)
        self._append("rounds.jsonl", record, 0o666)

    def _append(self, name: str, record: dict[str, Any], mode: int) -> None:
        line = json.dumps({"schema_version": SCHEMA_VERSION, **finite(record)})
        storage.append_line(self.path / name, line, mode)

    def amend_round(self, record: dict[str, Any]) -> None:
        """Replace the last line of rounds.jsonl."""
        path = self.path / "rounds.jsonl"
        line = json.dumps({"schema_version": SCHEMA_VERSION, **finite(record)})
        kept = storage.read_regular(path).splitlines(keepends=True)[:-1]
        storage.write_file(path, b"".join(kept) + line.encode() + b"\n")

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
                self._images().mkdir(exist_ok=True)
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
        """Write ledger.json: where the account of this run is, and whose it is.

        The digest of its clients depends on what they hold: it is for the owner only.
        """
        text = json.dumps({"schema_version": SCHEMA_VERSION, **account}, indent=1)
        storage.write_file(self.path / "ledger.json", text.encode(), 0o600)

    def read_account(self) -> dict[str, Any] | None:
        """Return what ledger.json says, None for a run without a ledger.

        A ledger in the folder itself is written down by its name alone, so that
        the folder may be moved.
        """
        account = self._read_json("ledger.json")
        if account is not None:
            try:
                account["ledger"] = str(self.path / account["ledger"])
                account["run_id"] = str(account["run_id"])
            except (KeyError, TypeError) as error:
                raise RunFolderError(f"{self.path / 'ledger.json'} lacks {error}") from error
        return account

    def read_rounds(self, count: int) -> list[dict[str, Any]]:
        """Return the first `count` rounds and drop what comes after them."""
        path = self.path / "rounds.jsonl"
        records = [_json_line(line, path) for line in self._keep_lines("rounds.jsonl", count)]
        if len(records) < count:
            raise RunFolderError(f"{path} must hold {count} rounds; it holds {len(records)}")
        for number, record in enumerate(records):
            _check_schema(record, path)
            if record.pop("schema_version") and record.get("round") != number:
                raise RunFolderError(f"{path}, line {number + 1}: expected round {number}")
        self._keep_lines("private.jsonl", count, 0o600)
        return records

    def peek_rounds(self, name: str = "rounds.jsonl") -> list[dict[str, Any]]:
        """Return the rounds that are written so far, also while the run goes on.

        Nothing is dropped or changed; a last line that is not whole yet is left out.
        """
        path = self.path / name
        storage.check_regular(path)
        if not path.exists():
            return []
        whole = storage.read_regular(path).splitlines(keepends=True)
        records = [_json_line(line, path) for line in whole if line.endswith(b"\n")]
        for record in records:
            _check_schema(record, path)
            del record["schema_version"]
        return records

    def _keep_lines(self, name: str, count: int, mode: int = 0o666) -> list[bytes]:
        """Return the first `count` lines of a file and cut the file down to them."""
        path = self.path / name
        storage.check_regular(path)  # also a link to nothing
        lines = storage.read_regular(path).splitlines(keepends=True) if path.exists() else []
        if len(lines) > count:
            storage.write_file(path, b"".join(lines[:count]), mode)
        return lines[:count]

    def save_checkpoint(
        self,
        rounds: int,
        model: dict[str, torch.Tensor],
        state: dict[str, NDArray[Any]],
        ledger_head: str = "",
    ) -> None:
        """Replace the checkpoint by the state after `rounds` rounds."""
        import numpy as np
        import safetensors.torch
        import torch

        tensors = {f"model/{name}": _portable(tensor) for name, tensor in model.items()}
        tensors |= {f"state/{key}": torch.from_numpy(np.array(v)) for key, v in state.items()}
        metadata = {
            "schema_version": str(SCHEMA_VERSION),
            "rounds": str(rounds),
            "ledger_head": ledger_head,
            "config": self._config_digest(),
        }
        storage.sync_file(self.path / "rounds.jsonl")
        content = safetensors.torch.save(tensors, metadata)
        storage.write_file(self.path / "checkpoint.safetensors", content)

    def load_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint, or None when there is none yet."""
        with self._opened_checkpoint("pt") as opened:
            if opened is None:
                return None
            stream, metadata = opened
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
        return Checkpoint(
            int(metadata["rounds"]),
            {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")},
            {
                k.removeprefix("state/"): v.numpy()
                for k, v in tensors.items()
                if k.startswith("state/")
            },
            metadata.get("ledger_head", ""),
        )

    def checkpoint_head(self) -> str:
        """Return the ledger's head that the checkpoint has kept, "" when there is none."""
        with self._opened_checkpoint("np") as opened:
            return "" if opened is None else str(opened[1].get("ledger_head", ""))

    @contextlib.contextmanager
    def _opened_checkpoint(self, framework: str) -> Iterator[tuple[Any, dict[str, str]] | None]:
        """Yield the checkpoint's file and its metadata, checked; None when there is none."""
        import safetensors

        path = self.path / "checkpoint.safetensors"
        storage.check_regular(path)  # the library opens it by its name
        if not path.exists():
            yield None
            return
        try:
            with safetensors.safe_open(path, framework=framework) as stream:
                metadata = stream.metadata() or {}
                _check_schema({"schema_version": int(metadata["schema_version"])}, path)
                int(metadata["rounds"])
                if metadata["config"] != self._config_digest():
                    raise RunFolderError(f"{path} is the checkpoint of another run")
                yield stream, metadata
        except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
            if isinstance(error, RunFolderError):
                raise
            raise RunFolderError(f"{path} is not a checkpoint of fedquilt: {error}") from error

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json; from then on the run is finished."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **finite(result)}, indent=1)
        storage.write_file(self.path / "result.json", text.encode())

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
        wanted = (self._read_json("baselines.json") or {}).get("wanted")
        return [str(name) for name in wanted] if isinstance(wanted, list) else None

    def read_baselines(self) -> dict[str, Any]:
        """Return the baselines computed so far."""
        content = self._read_json("baselines.json")
        rows: Any = {} if content is None else content.get("rows")
        if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
            raise RunFolderError(f"{self.path / 'baselines.json'} must hold a row for each name")
        return dict(rows)

    def read_result(self) -> dict[str, Any] | None:
        """Return the result of a finished run, None while it is unfinished."""
        return self._read_json("result.json")

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        storage.check_regular(path)
        if not path.exists():
            return None
        content = storage.read_json(path, RunFolderError)
        _check_schema(content, path)
        return content

    def _config_digest(self) -> str:
        """Return what ties a checkpoint to this run's configuration."""
        return hashlib.sha256(storage.read_regular(self.path / "config.toml")).hexdigest()


def finite(value: Any) -> Any:
    """Return a JSON value with every NaN and Inf replaced by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def run_stem(config: RunConfig) -> str:
    """Return the name of a run that starts now."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    return f"{config.dataset}_{config.mode}_seed{config.seed}_{stamp}"


def _json_line(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunFolderError(f"{path} must hold one JSON object a line: {error}") from error
    return record


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own memory on the CPU: views of one vector cannot be saved."""
    import torch

    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def make_fresh(parent: Path, stem: str) -> Path:
    """Create the folder, numbering it when two runs start in the same second."""
    for number in range(1, 1000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise StorageError(f"cannot create a run folder {str(parent / stem)!r}: all names are taken")


def _check_schema(record: Any, path: Path) -> None:
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        raise RunFolderError(
            f"{path}: schema_version={version!r} must be {SCHEMA_VERSION}; "
            "it was written by another version of fedquilt or is no file of a run"
        )
