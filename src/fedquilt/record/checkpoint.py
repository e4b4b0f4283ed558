"""The files of a checkpoint: `checkpoint.safetensors`, and the base of its long arrays.

A run of a million clients has some numbers of each of them, and a round moves those of its
cohort.  They are written whole once, as the *base*; from then on a checkpoint is a delta: it
holds, of each array, the places where it is not what the base says, and the values there.  A new
base is due when they are more than a `SHARE` of the array.  An array that changes everywhere from
one checkpoint to the next gains nothing, and stays whole in the checkpoint.

A base has a name of its own, is on disk before the checkpoint that names it, and goes when the
checkpoint on disk names another or none; the last one of a run is whole.  Both are tied to the
run's configuration by a digest of `config.toml`.

A checkpoint may come from elsewhere.  An array of another size would be found by whatever touches
it first, perhaps rounds later and after they were charged; a count that is NaN would never be
found.  So types and shapes are checked before arrays are loaded, values after.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common import storage, untrusted
from fedquilt.common.errors import RunFolderError
from fedquilt.common.formatting import printable
from fedquilt.common.storage import as_safetensors
from fedquilt.common.untrusted import TensorFile, TensorSpec
from fedquilt.record.schema import SCHEMA_VERSION, STATE_KEYS, check_schema, readable

if TYPE_CHECKING:  # whoever only reads a result or asks for its ledger needs no torch
    import torch

_WITH_BASE = 2
"""The version of a checkpoint that is not whole, which older readers must refuse."""

_LOOKS = 3  # how often a reader looks for a checkpoint and its base while they are replaced
_BASES = "checkpoint-base-*.safetensors"

# What a state array may be, as safetensors calls it; NumPy has no bfloat16.
_DTYPES = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U32", "U8", "BOOL")

Expected = Callable[[Mapping[str, TensorSpec]], Iterable[str]]
"""Gets types and shapes of the state arrays in a checkpoint; returns which to load, or raises."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run after some round: model tensors, state arrays, the ledger's head then, its name there.

    The name is "" for a run without an account, and in files of an older fedquilt.
    """

    rounds: int
    model: dict[str, torch.Tensor]
    state: dict[str, NDArray[Any]]
    ledger_head: str
    run_id: str = ""


LONG = 1 << 16
"""The length from which an array is long."""
SHARE = 1 / 16
"""The changes of a larger share of an array are not worth writing apart."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Split:
    """The arrays of a checkpoint: whole ones, changes since the base, and a base that is due."""

    whole: Arrays
    places: Arrays = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)
    token: str = ""
    """The base's name; "" where the checkpoint needs none."""
    base: Arrays | None = None
    """The base, where it has to be written first."""


class DeltaArrays:
    """What the newest base says of a run's long arrays."""

    def __init__(self) -> None:
        self._token = ""
        self._base: Arrays = {}
        self._dense: set[str] = set()
        self._is_new = False

    def split(self, state: Mapping[str, NDArray[Any]]) -> Split:
        """Divide the arrays of a checkpoint, and take a base to be written where one is due."""
        changed = {
            key: _changed_places(self._base.get(key), array)
            for key, array in state.items()
            if array.ndim == 1 and array.size >= LONG and key not in self._dense
        }
        if self._is_new:  # what has changed that much since the last checkpoint always will
            dense = {key for key in self._base if key in changed and changed[key] is None}
            self._dense |= dense
            changed = {key: where for key, where in changed.items() if key not in dense}
        gone = bool(changed) and not self._base.keys() <= state.keys()
        self._is_new = gone or any(where is None for where in changed.values())
        if self._is_new:
            self._token = secrets.token_hex(8)
            self._base = {key: state[key].copy() for key in changed}
            changed = {key: np.zeros(0, dtype=np.int32) for key in changed}
        places = {key: where for key, where in changed.items() if where is not None}
        return Split(
            whole={key: array for key, array in state.items() if key not in places},
            places=places,
            values={key: state[key][where] for key, where in places.items()},
            token=self._token if places else "",
            base=self._base if self._is_new else None,
        )


def _changed_places(before: NDArray[Any] | None, now: NDArray[Any]) -> NDArray[np.int32] | None:
    """Return where an array has changed, bit by bit; None where a base has to say it anew."""
    if before is None or (before.shape, before.dtype) != (now.shape, now.dtype):
        return None
    bits = f"u{now.dtype.itemsize}"
    places = np.flatnonzero(before.view(bits) != np.ascontiguousarray(now).view(bits))
    return places.astype(np.int32) if places.size <= SHARE * now.size else None


class CheckpointFiles:
    """The checkpoint of one run's folder, on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "checkpoint.safetensors"
        self._long: DeltaArrays | None = None

    def bases(self) -> Iterator[Path]:
        """Return the bases in the folder, those that no checkpoint names included."""
        return self._folder.glob(_BASES)

    def save(
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
        long, self._long = self._long or DeltaArrays(), None  # forgotten if anything fails
        split = Split(state) if whole else long.split(state)
        metadata = {"config": self._config_digest()} | (
            {"base": split.token} if split.token else {}
        )
        if split.base is not None:
            base = {f"state/{key}": as_tensor(array) for key, array in split.base.items()}
            storage.write_file(self._base_path(split.token), as_safetensors(base, metadata))
        tensors = {f"model/{name}": tensor for name, tensor in model.items()}
        parts = {"state": split.whole, "places": split.places, "values": split.values}
        for part, arrays in parts.items():
            tensors |= {f"{part}/{key}": as_tensor(array) for key, array in arrays.items()}
        metadata |= {
            "schema_version": str(_WITH_BASE if split.token else SCHEMA_VERSION),
            "rounds": str(rounds),
            "ledger_head": ledger_head,
            **({"run_id": run_id} if run_id else {}),
        }
        storage.write_file(self._path, as_safetensors(tensors, metadata))
        if whole or split.base is not None:
            self._remove_bases(split.token)
        self._long = None if whole else long

    def _base_path(self, token: str) -> Path:
        return self._folder / _BASES.replace("*", token)

    def _remove_bases(self, token: str) -> None:
        """Remove the bases that the checkpoint on disk, which names `token`, has no use for."""
        for path in self.bases():
            if path != self._base_path(token):
                with contextlib.suppress(OSError):  # in nobody's way
                    path.unlink()

    def load(self, expected: Expected | None = None) -> Checkpoint | None:
        """Return the checkpoint, or None when there is none yet.

        `expected` is asked which state arrays to load, before any is; None loads all.
        """
        for _ in range(_LOOKS):
            with self._opened_checkpoint("pt") as opened:
                if opened is None:
                    return None
                # Whoever writes the run may have replaced both files since this one was opened.
                with self._opened_base(opened.metadata.get("base", "")) as base:
                    if base is not None:
                        return self._loaded(opened, base, expected)
        raise RunFolderError(f"{self._path} names a base that is not there")

    def _loaded(
        self, opened: TensorFile, base: TensorFile, expected: Expected | None
    ) -> Checkpoint:
        model = [name for name in opened.specs if name.startswith("model/")]
        whole = {
            name.removeprefix("state/"): (file, spec)
            for file in (base, opened)
            for name, spec in file.specs.items()
            if name.startswith("state/")
        }
        state = {key: spec for key, (_, spec) in whole.items()}
        for key, spec in state.items():
            if spec.dtype not in _DTYPES:
                raise RunFolderError(
                    f"{self._path}: state/{printable(key)} is of "
                    f"type {spec.dtype}, which no state has"
                )
        wanted = list(state) if expected is None else expected(state)
        arrays: dict[str, NDArray[Any]] = {
            key: whole[key][0].get(f"state/{key}").numpy() for key in wanted
        }
        for key in wanted:
            if whole[key][0] is base:
                arrays[key] = self._changed(opened, key, arrays[key])
        return Checkpoint(
            int(opened.metadata["rounds"]),
            {name.removeprefix("model/"): opened.get(name) for name in model},
            arrays,
            opened.metadata.get("ledger_head", ""),
            opened.metadata.get("run_id", ""),
        )

    def _changed(self, opened: TensorFile, key: str, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array of the base with its changes since."""
        wrong = f"{self._path}: the changes of state/{printable(key)}"
        names = f"places/{key}", f"values/{key}"
        if any(name not in opened.specs for name in names):
            raise RunFolderError(f"{wrong} are missing")
        places, values = (opened.get(name).numpy() for name in names)
        if not (
            (places.dtype.name, values.dtype) == ("int32", array.dtype)
            and places.ndim == array.ndim == 1
            and places.shape == values.shape
            and (places.size == 0 or 0 <= places.min() <= places.max() < array.size)
        ):
            raise RunFolderError(f"{wrong} do not fit")
        now = array.copy()
        now[places] = values
        return now

    @contextlib.contextmanager
    def _opened_base(self, token: str) -> Iterator[TensorFile | None]:
        """Yield the file of long arrays; an empty one without a name; None where it is gone."""
        if not token:
            yield TensorFile({}, {}, _nothing)
            return
        if not re.fullmatch(r"[0-9a-f]{16}", token):
            raise RunFolderError(f"{self._path}: base={printable(token)!r} is no name of a base")
        path = self._base_path(token)
        storage.check_regular(path)
        if not path.exists():
            yield None
            return
        wrong = "is not the base of the checkpoint"
        with untrusted.opened_tensors(path, wrong, RunFolderError) as opened:
            known = {"base": token, "config": self._config_digest()}
            if opened.metadata != known:
                raise RunFolderError(f"{path} {wrong}")
            yield opened

    def rounds(self) -> int:
        """Return how many rounds the checkpoint comes after, 0 when there is none."""
        with self._opened_checkpoint("np") as opened:
            return 0 if opened is None else int(opened.metadata["rounds"])

    def head(self) -> str:
        """Return the ledger's head that the checkpoint has kept, "" when there is none."""
        with self._opened_checkpoint("np") as opened:
            return "" if opened is None else opened.metadata.get("ledger_head", "")

    @contextlib.contextmanager
    def _opened_checkpoint(self, framework: str) -> Iterator[TensorFile | None]:
        """Yield the checkpoint's file, its metadata checked; None when there is none."""
        path = self._path
        with readable(self._folder):
            storage.check_regular(path)  # the library opens it by its name
            there = path.exists()
        if not there:
            yield None
            return
        wrong = "is not a checkpoint of fedquilt"
        with untrusted.opened_tensors(path, wrong, RunFolderError, framework=framework) as opened:
            metadata = opened.metadata
            for key in ("schema_version", "rounds"):
                if not re.fullmatch(r"[0-9]{1,18}", metadata.get(key, ""), re.ASCII):
                    raise RunFolderError(f"{path} {wrong}: it must state {key!r}")
            wanted = _WITH_BASE if "base" in metadata else SCHEMA_VERSION
            check_schema({"schema_version": int(metadata["schema_version"])}, path, wanted)
            if "config" not in metadata:
                raise RunFolderError(f"{path} {wrong}: 'config' is not stated")
            if metadata["config"] != self._config_digest():
                raise RunFolderError(f"{path} is the checkpoint of another run")
            yield opened

    def _config_digest(self) -> str:
        """Return what ties a checkpoint to this run's configuration."""
        content = untrusted.read_bytes(
            self._folder / "config.toml", untrusted.TOML_BYTES, RunFolderError
        )
        return hashlib.sha256(content).hexdigest()


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor, in its own memory where that can be written."""
    import torch

    return torch.from_numpy(np.require(array, requirements="W"))


def _nothing(name: str) -> Any:
    raise KeyError(name)


_KINDS = {"F": "f", "I": "i", "U": "i", "B": "b"}
_IN_WORDS = {"f": "floats", "i": "whole numbers", "b": "truth values"}


def expected_state(
    like: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    path: Path,
    found: Mapping[str, TensorSpec],
) -> list[str]:
    """Return which arrays of a checkpoint to load, all of types and shapes that fit.

    Parameters
    ----------
    like
        The state of the federation before its first round.
    sizes
        How many values a vector of a form has (`StateKey.form`).
    path
        The run's folder, for the message.
    found
        What the checkpoint holds.
    """
    for name, spec in found.items():
        key = STATE_KEYS.get(name)
        if key is not None and key.form in sizes:
            wanted: tuple[str, tuple[int, ...]] = ("f", (sizes[key.form],))
        elif key is not None and name in like:
            array = np.asarray(like[name])
            wanted = (array.dtype.kind.replace("u", "i"), array.shape)
        else:
            continue
        if (_KINDS[spec.dtype[0]], spec.shape) != wanted:
            raise RunFolderError(
                f"{path}: the checkpoint does not fit: state/{printable(name)} is {spec.dtype} of "
                f"shape {list(spec.shape)} and must be {_IN_WORDS[wanted[0]]} of shape "
                f"{list(wanted[1])}"
            )
    return list(found)


def check_state(state: Mapping[str, NDArray[Any]], rounds: int, path: Path) -> None:
    """Refuse counts and amounts that no run of so many rounds can have."""
    for name, key in STATE_KEYS.items():
        values = state.get(name)
        if values is None or key.limits is None:
            continue
        least, most = key.limits(rounds)
        # A comparison with NaN is false.
        if not np.all((values >= least) & (values <= most)):
            raise RunFolderError(
                f"{path}: the checkpoint does not fit: state/{name} holds values that no run of "
                f"{rounds} rounds has"
            )
