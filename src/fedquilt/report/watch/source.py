"""What is watched: when its files change, and what the page then shows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.privacy.ledger import is_ledger
from fedquilt.record.folder import RunFolder
from fedquilt.report.html_page import with_comparison
from fedquilt.report.views import client_history, ledger_view, page_view, planned_cost
from fedquilt.report.views.page import empty_view, find_runs, runs_inside
from fedquilt.report.views.run import resume_command

_FILES = ("config.toml", "rounds.jsonl", "checkpoint.safetensors", "result.json")

Stamp = tuple[Any, ...]


class Source(Protocol):
    """Something to watch; `cost` is how many seconds the last reading took."""

    title: str
    cost: float

    def stamp(self) -> Stamp:
        """Return what differs as soon as there is something new."""

    def data(self) -> dict[str, Any]:
        """Return what the page shows now."""

    def questions(self) -> Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]:
        """Return what else the page may ask, by the name in the address."""


class RunsSource:
    """Run folders, or folders in which runs appear; they may come, die and be resumed.

    A file that is being replaced at this moment may not be readable: what was read before
    is shown until the next look.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        private: bool = False,
        ledgers: Sequence[str | Path] = (),
    ) -> None:
        self.paths = [Path(path) for path in paths]
        self.ledgers = [Path(path) for path in ledgers]
        self.private = private
        named = [path.name or str(path) for path in (*self.paths, *self.ledgers)]
        self.title = f"Watching {', '.join(named)}"
        self.cost = 0.0
        self._lock = threading.Lock()
        self._last: tuple[Stamp, dict[str, Any]] | None = None

    def _folders(self) -> list[Path]:
        try:
            begun = [p for p in self.paths if (p / "config.toml").exists() or runs_inside(p)]
            return find_runs(begun)
        except FedquiltError:
            return []

    def stamp(self) -> Stamp:
        """Return size and time of every file that a round touches, and who is at work."""
        folders = self._folders()
        ledgers = [stamp for path in self.ledgers for stamp in _ledger_stamp(path)]
        alive = [_is_alive(folder) for folder in folders]
        files = [_stamp(folder / name) for folder in folders for name in _FILES]
        return *files, *ledgers, *alive

    def data(self) -> dict[str, Any]:
        """Return the runs as they stand, read once for all who look."""
        with self._lock:
            now, began = self.stamp(), time.monotonic()
            if self._last is not None and self._last[0] == now:
                return self._last[1]
            try:
                folders = self._folders()
                view = page_view(folders, private=self.private, look=False) if folders else None
                data = with_comparison(view or empty_view(private=self.private))
                for run, folder in zip(data["runs"], folders, strict=True):
                    run |= {"alive": _is_alive(folder), "touched": _touched(folder)}
                    if run["resume"]:  # who watches sits at this machine
                        config = RunFolder.open(folder).read_config()
                        run["resume"] = resume_command(config, str(folder))
                data["ledgers"] = [_populations(path) for path in self.ledgers]
            except (FedquiltError, OSError):
                if self._last is None:
                    return with_comparison(empty_view(private=self.private))
                return self._last[1]
            self._last, self.cost = (now, data), time.monotonic() - began
            return data

    def questions(self) -> Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]:
        """Runs answer nothing beyond their data."""
        return {}


class LedgerSource:
    """A ledger, for its operator."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.title = f"Ledger {self.path.name}"
        self.cost = 0.0
        self._lock = threading.Lock()
        self._last: tuple[Stamp, dict[str, Any]] | None = None

    def stamp(self) -> Stamp:
        """Return size and time of the file and of the journal beside it."""
        return _ledger_stamp(self.path)

    def data(self) -> dict[str, Any]:
        """Return the populations as they stand, read once for all who look."""
        with self._lock:
            now, began = self.stamp(), time.monotonic()
            if self._last is None or self._last[0] != now:
                self._last = now, ledger_view(self.path)
                self.cost = time.monotonic() - began
            return self._last[1]

    def questions(self) -> Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]]:
        """A client's history, and what a planned run would cost."""
        return {"history": self._history, "plan": self._plan}

    def _history(self, asked: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            return client_history(self.path, _text(asked, "population"), _whole(asked, "client"))

    def _plan(self, asked: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            return planned_cost(self.path, _text(asked, "population"), _number(asked, "epsilon"))


def source_of(paths: Sequence[str], *, private: bool = False) -> Source:
    """Return what paths mean: runs, with ledgers beside them, or one ledger alone."""
    ledgers = [path for path in paths if Path(path).is_file() and is_ledger(Path(path))]
    runs = [path for path in paths if path not in ledgers]
    wrong = [path for path in runs if not Path(path).is_dir()]
    if wrong or not paths:
        listed = ", ".join(repr(path) for path in wrong) or "nothing"
        raise InvalidValueError(f"{listed} must be a ledger, or a folder of runs")
    if runs:
        return RunsSource(runs, private=private, ledgers=ledgers)
    if len(ledgers) > 1:
        raise InvalidValueError("of ledgers without runs one must be watched at a time")
    return LedgerSource(ledgers[0])


def _populations(path: Path) -> dict[str, Any]:
    """Return the populations of a ledger at a glance: nobody by name, and no client alone."""
    ledger = ledger_view(path)["ledger"]
    found = [
        {key: value for key, value in one.items() if not isinstance(value, list | dict)}
        for one in ledger["populations"]
    ]
    return {**ledger, "populations": found}


def _is_alive(folder: Path) -> bool | None:
    """Tell whether a process works on a run that has not ended; None where that is not known.

    It holds the folder's lock (`RunFolder`).  Where the kernel lists no such lock, the lock is
    tried, shared and for a moment: a run that is at work elsewhere, on the same disk, refuses it.
    """
    if (folder / "result.json").exists():
        return None
    try:
        number = str((folder / ".lock").stat().st_ino)
        with contextlib.suppress(OSError):
            held = Path("/proc/locks").read_text().splitlines()
            if any(line.split()[5].endswith(f":{number}") for line in held if "->" not in line):
                return True
        import fcntl

        with (folder / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except (ImportError, OSError, IndexError):
        return None


def _touched(folder: Path) -> float | None:
    """Return when a file of the run last changed, in seconds since 1970."""
    stamps = [_stamp(folder / name) for name in _FILES]
    return max((stamp[1] / 1e9 for stamp in stamps if stamp is not None), default=None)


def _ledger_stamp(path: Path) -> Stamp:
    return _stamp(path), _stamp(path.with_name(f"{path.name}-journal"))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _text(asked: Mapping[str, str], name: str) -> str:
    if name not in asked:
        raise InvalidValueError(f"{name} must be given")
    return asked[name]


def _whole(asked: Mapping[str, str], name: str) -> int:
    given = _text(asked, name)
    try:
        return int(given)
    except ValueError:
        raise InvalidValueError(f"{name}={given!r:.40} must be a whole number") from None


def _number(asked: Mapping[str, str], name: str) -> float:
    given = _text(asked, name)
    try:
        return float(given)
    except ValueError:
        raise InvalidValueError(f"{name}={given!r:.40} must be a number") from None
