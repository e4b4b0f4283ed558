"""A whole run with its releases recorded, and all that is public of it.

`fedquilt.run` does what it always does: engine, ledger, folder, observer.  Two things are
exchanged while it runs.  The operating system's random bytes come from a seed, so that
noise and secret coins are the same in two worlds, and still count as secret.  And after
every round the release and its charge are recorded (`WatchedRound`); then the run takes
over what the base world has released, so that all worlds have the same public history and
everything that is computed from releases is the same in them.  The same is done to the noised
mean of what clients measure, which is charged for as well (`WatchedMean`).

Public are all files of the run but the private ones, and the events of an observer.  Two
worlds are compared value by value.  What the clock or a random name decides is listed
here, by file and key; everything else counts, files that nobody thought of included.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sqlite3
import stat
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.audit.cases import WatchedServer, World, known_entropy
from fedquilt.audit.findings import declared_clip, released_fraction, released_sum
from fedquilt.common.errors import FedquiltError
from fedquilt.common.observer import Observer
from fedquilt.config import RunConfig
from fedquilt.experiment import client_evaluation
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.client_evaluation import SENSITIVITY, NoisedMean, release_mean
from fedquilt.federation import Federation
from fedquilt.privacy.noise import NoiseSource
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.result import RunResult
from fedquilt.round import RoundRecord

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


class Recorder(Observer):
    """An observer that records every event."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, config: RunConfig, line: dict[str, Any]) -> None:
        """Note a finished round."""
        self.events.append(["round", repr(config), json.loads(json.dumps(line))])

    def opened(self, config: RunConfig, folder: Path) -> None:
        """Note the folder."""
        self.events.append(["opened", repr(config), str(folder)])

    def working(self, what: str, share: float) -> None:
        """Note progress within a round."""
        self.events.append(["working", what, share])

    def on_artifact(self, path: Path) -> None:
        """Note where images were written."""
        self.events.append(["kept", str(path)])


class Stopping(Recorder):
    """Hands on what it records, and ends the run after its first round."""

    def __init__(self, recorder: Recorder) -> None:
        self.events = recorder.events

    def __call__(self, config: RunConfig, line: dict[str, Any]) -> None:
        """Note a finished round, and stop."""
        super().__call__(config, line)
        raise KeyboardInterrupt


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


@dataclass(frozen=True, eq=False)
class WatchedRound:
    """One round: the sum it released in the units of the clip, and what it declared.

    `declared` is how far each client may move the sum, `fraction` what a private
    quantile has released, None without one, `spoilt` whose updates were not finite and
    counted as nothing.  The rest is what another world takes over.
    """

    released: torch.Tensor | None
    declared: NDArray[np.float64]
    fraction: float | None
    fraction_declared: float
    spoilt: tuple[int, ...]
    shown: dict[str, Any]
    weights: torch.Tensor
    mechanism: dict[str, NDArray[Any]]
    server: dict[str, NDArray[Any]]
    late: dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class WatchedMean:
    """One noised mean of clients' measures: its two sums, and how far each may move them."""

    released: torch.Tensor | None
    declared: NDArray[np.float64]
    shown: NoisedMean | None


@dataclass(eq=False)
class Seen:
    """A run as anybody saw it, and the rounds as only the audit did.

    `error` is the message a run ended with, which is as public as its files; `refused`
    tells whether it is one of the package's own, `claims` whether the statement bounds
    anything.
    """

    rounds: list[WatchedRound] = field(default_factory=list)
    means: list[WatchedMean] = field(default_factory=list)
    public: Values = field(default_factory=dict)
    from_release: Values = field(default_factory=dict)
    error: str | None = None
    refused: bool = False
    claims: bool = True


def watched_run(
    run: Callable[[Recorder], RunResult],
    seed: int,
    base: Seen | None = None,
    ledger: Path | None = None,
) -> Seen:
    """Let `run` make a run that tells an observer, and return all that was seen of it.

    Whatever ends it is seen, too: the package's own refusals and everybody else's errors.
    """
    seen, recorder, printed = Seen(), Recorder(), io.StringIO()
    watch = _Watch(seen, base or Seen())
    result = None
    with (
        known_entropy(seed),
        patch.object(training_loop, "run_round", watch.run_round),
        patch.object(training_loop, "begin_round", lambda federation, index: index),
        patch.object(training_loop, "finish_round", watch.finish_round),
        patch.object(client_evaluation, "release_mean", watch.release_mean),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        try:
            result = run(recorder)
        except Exception as error:
            seen.error = f"{type(error).__name__}: {error}"
            seen.refused = isinstance(error, FedquiltError)
    public: Values = {
        "observer": recorder.events,
        "printed": printed.getvalue(),
        "warnings": [str(warning.message) for warning in warned],
        "error": seen.error,
        "rounds": [one.shown for one in seen.rounds],
    }
    folder = None
    if result is not None:
        folder, seen.claims = result.folder, result.statement.is_bounded
        public |= {"summary": result.summary(), "statement": result.statement.as_text()}
        public["model"] = {
            name: tensor.cpu().numpy().tobytes() for name, tensor in result.state_dict.items()
        }
    if folder is not None:
        seen.public, seen.from_release = folder_values(folder, ledger)
    seen.public |= renamed(public, folder)
    return seen


class _Watch:
    """Stands in the place of `run_round` and `release_mean`, and calls them."""

    def __init__(self, seen: Seen, base: Seen) -> None:
        self._seen = seen
        self._base = base
        self._world: World | None = None

    def run_round(
        self,
        federation: Federation,
        round_index: int,
    ) -> RoundRecord:
        """Run a round, note it, and take over what the base world has released."""
        if self._world is None or self._world.federation is not federation:
            if federation.account is None:
                raise FedquiltError("a run without an account declares nothing to audit")
            server = WatchedServer(federation.method.server)
            federation.method.server = server
            self._world = World(federation, server, federation.account, None, 1.0)
        self._world.run(round_index)
        self._seen.rounds.append(_note(self._world))
        if round_index < len(self._base.rounds):
            before = self._base.rounds[round_index]
            federation.weights = before.weights.clone()
            federation.mechanism.load_state(before.mechanism)
            federation.method.server.load_state(before.server, federation.weights.device)
            if federation.late is not None:
                federation.late.load_state(before.late, federation.weights.device)
        return self._world.record

    def finish_round(self, federation: Federation, round_index: int) -> RoundRecord:
        """Run a round whose beginning was put off: one thing after the other.

        It is settled at once, so nothing is left for later.
        """
        if federation.account is not None:
            federation.account.defers = False
        return self.run_round(federation, round_index)

    def release_mean(
        self,
        account: RunAccount,
        source: NoiseSource,
        round_index: int,
        present: NDArray[np.int64],
        measures: Mapping[int, float | None],
    ) -> NoisedMean | None:
        """Release a mean, note its sums, and return what the base world has released."""
        before, noised = account.population.spent(), []
        settle = account.settle

        def noting(release: torch.Tensor) -> None:
            noised.append(release.clone())
            settle(release)

        with patch.object(account, "settle", noting):
            mean = release_mean(account, source, round_index, present, measures)
        charges = account.population.spent() - before
        std = SENSITIVITY / math.sqrt(account.evaluation_cost)
        released = noised[0] if noised else None
        place = len(self._seen.means)
        self._seen.means.append(WatchedMean(released, std * np.sqrt(charges), mean))
        return self._base.means[place].shown if place < len(self._base.means) else mean


def _note(world: World) -> WatchedRound:
    federation, cohort = world.federation, world.record.cohort
    declared = np.zeros(len(world.charges))
    for client in cohort:
        declared[client] = declared_clip(world, client)
    fraction, fraction_declared = released_fraction(world)
    return WatchedRound(
        released=released_sum(world),
        declared=declared,
        fraction=fraction,
        fraction_declared=fraction_declared,
        spoilt=tuple(world.record.non_finite),
        shown=world.public(),
        weights=federation.weights.clone(),
        mechanism=_copied(federation.mechanism.state()),
        server=_copied(federation.method.server.state()),
        late={} if federation.late is None else _copied(federation.late.state()),
    )


def _copied(state: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {key: np.array(value) for key, value in state.items()}
