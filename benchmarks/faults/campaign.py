"""Runs of every kind with faults at their system calls, resumed until they are done.

Each run has an area of its own: its folder, its ledger, the user's state folder.  A process
forked from this one works in it with a fault at a random call.  When it is gone, and the
power was cut if that is the fault, a copy of the area is looked at:

* the ledger, if anything was settled, is there, whole, and has the head the run has kept,
* no client has less in it than after any settlement that returned,
* no client has less in it than what its releases gave away, nor gave away more than its
  allowance (secret noise, where a release's cost is known by itself),
* the rounds before the last durable checkpoint are the lines they were: one that was renamed
  and whose folder was not synced before the kill is not durable until a resumed run has synced it.

Then the run is resumed, perhaps into the next fault, and at last without one.  In the end a
seeded run must be the uninterrupted one bit by bit, and nothing may lie about.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from faults import shim
from faults.kinds import KINDS, Kind, same_runs
from faults.power_cut import Disk
from fedquilt.common.errors import FedquiltError
from fedquilt.experiment import api as experiment
from fedquilt.experiment import loop as training_loop
from fedquilt.privacy.accounting.gaussian import gaussian_epsilon
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.folder import RunFolder

REFUSED, BROKEN = 3, 1
MOST_FAULTS = 3  # of one run
_TRIES = 8  # resumes without a fault before a run counts as lost

NoteReleases = Callable[[Path], None]


@dataclass
class Tally:
    """What was done to the runs of one kind, and what was found."""

    faults: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    resumed: int = 0
    calls: int = 0
    bad: list[str] = field(default_factory=list)


@dataclass
class Area:
    """One run: where its files are, and what was seen of it."""

    kind: Kind
    place: Path
    disk: Disk
    known: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, kind: Kind, place: Path) -> Area:
        """Make the folders of a run that has not begun."""
        for name in ("area/runs", "area/state", "tmp", "side"):
            (place / name).mkdir(parents=True)
        return cls(kind, place, Disk(place / "area"))

    @property
    def root(self) -> Path:
        """All that a power cut may change."""
        return self.place / "area"

    def side(self, name: str) -> Path:
        """Return the path of a file of the campaign, which no fault touches."""
        return self.place / "side" / name

    @property
    def folder(self) -> Path | None:
        """The run's folder, None before there is one."""
        return run_folder(self.root)


def run_folder(root: Path) -> Path | None:
    """Return the folder below `root` that can be resumed, if there is one."""
    found = sorted(path.parent for path in root.glob("runs/*/config.toml"))
    return found[0] if found else None


def work(area: Area, fault: shim.Fault | None, note_releases: NoteReleases) -> None:
    """Be the process: start the run of an area, or go on with it, into a fault."""
    os.environ["XDG_STATE_HOME"] = str(area.root / "state")
    tempfile.tempdir = str(area.place / "tmp")
    training_loop.CHECKPOINT_SECONDS = 0.0
    _note_settlements(area.side("settled"))
    if area.kind.counts_plainly:
        note_releases(area.side("released"))
    folder = area.folder
    shim.arm(area.root, area.side("log"), fault)
    try:
        if folder is None:
            experiment.run_config(area.kind.config(area.root))
        else:
            experiment.resume_run(folder)
    finally:
        area.side("calls").write_text(f"{shim.calls()} {shim.hits()}")


def _note_settlements(log: Path) -> None:
    """Write down, whenever a settlement has returned, what the ledger then says."""
    settle = RunAccount.settle

    def noted(account: RunAccount, *given: Any) -> str:
        head = settle(account, *given)
        line = json.dumps([float(value) for value in account.population.spent()]) + "\n"
        with open(log, "a") as stream:
            stream.write(line)
        return head

    RunAccount.settle = noted  # type: ignore[method-assign]


def fork(job: Callable[[], None], errors: Path) -> int:
    """Do a job in a copy of this process; return its exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = BROKEN
    try:
        with open(errors, "w") as stream:
            os.dup2(stream.fileno(), 2)
        job()
        code = 0
    except FedquiltError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class FaultCampaign:
    """Faults over all kinds of run.

    Parameters
    ----------
    folder : Path
        Where the runs are made.
    kinds : sequence of str
        Names of `KINDS`.
    seed : int
        Seed of the moments and of what a power cut takes.
    note_releases : callable
        Makes a process write down what its releases give away, in a file.
    given_away : callable
        Returns what each client has given away by that file.
    """

    def __init__(
        self,
        folder: Path,
        kinds: Sequence[str],
        seed: int,
        note_releases: NoteReleases,
        given_away: Callable[[Path], np.ndarray],
    ) -> None:
        self.folder = folder
        self.kinds = [KINDS[name] for name in kinds]
        self.draws = random.Random(seed)
        self.note_releases = note_releases
        self.given_away = given_away
        self.tallies = {kind.name: Tally() for kind in self.kinds}
        self.whole: dict[str, Path] = {}
        self.seconds = 0.0

    @property
    def faults(self) -> int:
        """How many faults have struck."""
        return sum(sum(tally.faults.values()) for tally in self.tallies.values())

    @property
    def ok(self) -> bool:
        """Whether nothing was found that must not be."""
        return not any(tally.bad for tally in self.tallies.values())

    def run(self, faults: int) -> None:
        """Run once of each kind without a fault, then until so many have struck."""
        began = time.monotonic()
        for kind in self.kinds:
            self._run_whole(kind)
        while self.faults < faults:
            for kind in self.kinds:
                if self.faults < faults:
                    self._run_with_faults(kind)
        self.seconds = time.monotonic() - began

    def _run_whole(self, kind: Kind) -> None:
        area = Area.make(kind, self.folder / f"whole-{len(self.whole)}")
        code = self._process(area, None)
        tally, folder = self.tallies[kind.name], area.folder
        tally.calls = int(area.side("calls").read_text().split()[0])
        if code or folder is None:
            raise RuntimeError(f"{kind.name} does not run: {area.side('err').read_text()}")
        if not area.disk.is_what_is_there():
            raise RuntimeError(f"{kind.name}: the shim has missed a call that writes")
        self.whole[kind.name] = folder

    def _run_with_faults(self, kind: Kind) -> None:
        tally = self.tallies[kind.name]
        tally.runs += 1
        place = self.folder / "run"
        area = Area.make(kind, place)
        try:
            problem = self._fault_and_resume(area, tally)
        finally:
            with contextlib.suppress(FileNotFoundError):
                error = area.side("err").read_text()
        if problem:
            what = ", then ".join(area.faults)
            tally.bad.append(f"{kind.name} ({what}): {problem}\n{error}".strip())
        shutil.rmtree(place)

    def _fault_and_resume(self, area: Area, tally: Tally) -> str:
        """Strike, look, resume, to the end; return what is wrong."""
        code = BROKEN
        for _ in range(self.draws.randint(1, MOST_FAULTS)):
            fault = dataclasses.replace(
                self.draws.choice(shim.FAULTS), nth=self.draws.randint(1, tally.calls)
            )
            code = self._process(area, fault)
            if self._struck(area, fault, code):
                tally.faults[fault.name] += 1
                area.faults.append(f"{fault.name} at {fault.nth}")
            if code == BROKEN:
                return "it broke with something that is no error of fedquilt"
            if not area.disk.is_what_is_there():
                return "the shim has missed a call"
            if fault.cut and code == -signal.SIGKILL:
                area.disk.cut(None if fault.cut == "all" else self.draws)
            problem = self._look(area)
            if problem or code == 0:
                # Where the disk would not remove a file, the file is still there.
                tidy = fault.action is not shim.Action.FAIL
                return problem or self._finished(area, tidy=tidy)
        for _ in range(_TRIES):
            code = self._process(area, None)
            if code == 0:
                tally.resumed += 1
                return self._look(area) or self._finished(area, tidy=True)
        return f"it cannot be resumed (exit code {code})"

    def _process(self, area: Area, fault: shim.Fault | None) -> int:
        log = area.side("log")
        log.unlink(missing_ok=True)
        area.side("calls").unlink(missing_ok=True)
        code = fork(lambda: work(area, fault, self.note_releases), area.side("err"))
        if log.exists():
            area.disk.replay(log)
        return code

    def _struck(self, area: Area, fault: shim.Fault, code: int) -> bool:
        if fault.action is shim.Action.FAIL:
            counted = area.side("calls")
            return counted.exists() and int(counted.read_text().split()[1]) > 0
        return code == -signal.SIGKILL

    def _look(self, area: Area) -> str:
        """Look at a copy of the area: the run must find it as it is."""
        copy = area.place / "copy"
        shutil.copytree(area.root, copy)
        try:
            return self._problem(area, copy)
        finally:
            shutil.rmtree(copy)

    def _problem(self, area: Area, copy: Path) -> str:
        folder = run_folder(copy)
        saved = None if folder is None else RunFolder.open(folder).load_checkpoint()
        lines = []
        if folder is not None and saved is not None:
            lines = (folder / "rounds.jsonl").read_text().splitlines()[: saved.rounds]
            if len(lines) < saved.rounds:
                return "rounds.jsonl lacks rounds that the checkpoint has"
        if not _goes_on(area.known, lines):
            return "rounds before a checkpoint were lost or changed"
        if folder is not None and saved is not None and self._is_durable(area, copy, folder):
            area.known = lines
        if not area.kind.is_certified:
            return ""
        ledger = copy / "shared.sqlite" if area.kind.shared else _own_ledger(folder)
        return self._ledger_problem(area, ledger, saved.ledger_head if saved else "")

    def _is_durable(self, area: Area, copy: Path, folder: Path) -> bool:
        """Tell whether the checkpoint that is there would outlast a power cut."""
        path = folder / "checkpoint.safetensors"
        there = str(area.root / path.relative_to(copy))
        return area.disk.durable(there) == path.read_bytes()

    def _ledger_problem(self, area: Area, ledger: Path | None, head: str) -> str:
        settled = area.side("settled")
        lines = settled.read_text().splitlines() if settled.exists() else []
        noted = [json.loads(line) for line in lines]
        if ledger is None or not ledger.exists():
            return "the ledger is gone" if noted or head else ""
        with Ledger.open(ledger) as opened:
            report = opened.verify(known_heads=[head] if head else [])
            populations = opened.populations()
            spent = populations[0].spent() if populations else np.zeros(0)
        if not report.ok:
            return f"the ledger is not whole: {report.problems}"
        if noted and not (spent >= np.max(noted, axis=0)).all():
            return "the ledger has less than was settled"
        if area.kind.counts_plainly:
            return self._release_problem(area, spent)
        return ""

    def _release_problem(self, area: Area, spent: np.ndarray) -> str:
        given = self.given_away(area.side("released"))[: spent.size]
        if (spent[: given.size] < given * (1 - 1e-12)).any():
            return "the ledger has less than was given away"
        allowance = area.kind.settings["allowance"]
        if any(gaussian_epsilon(float(mu2) ** 0.5, 1e-5) > allowance for mu2 in given):
            return "a client gave away more than its allowance"
        return ""

    def _finished(self, area: Area, *, tidy: bool) -> str:
        """Compare a finished run with the uninterrupted one, and look for litter."""
        folder = area.folder
        if folder is None:
            return "it finished without a folder"
        if area.kind.repeats:
            differs = same_runs(folder, self.whole[area.kind.name])
            if differs:
                return f"{differs} is not that of the uninterrupted run"
        litter = _litter(area) if tidy else []
        return f"left behind: {', '.join(map(str, litter))}" if litter else ""

    def table(self) -> str:
        """Return what was done and what was found, by kind and by fault."""
        rows = [("kind", "calls", "runs", "faults", "resumed", "bad")]
        rows += [
            (
                name,
                *map(str, (t.calls, t.runs, sum(t.faults.values()), t.resumed, len(t.bad))),
            )
            for name, t in self.tallies.items()
        ]
        columns = list(zip(*rows[1:], strict=True))
        rows.append(("all", "", *(str(sum(map(int, column))) for column in columns[2:])))
        kinds = Counter[str]()
        for tally in self.tallies.values():
            kinds += tally.faults
        by_fault = [("fault", "struck"), *((f.name, str(kinds[f.name])) for f in shim.FAULTS)]
        return f"{_aligned(rows)}\n\n{_aligned(by_fault)}"


def _goes_on(before: list[str], after: list[str]) -> bool:
    """Tell whether lines are those of before and more.

    The last one may have got an evaluation: a round turns out to be the last when the
    clients of a lost one after it, which was paid for, cannot pay for another.
    """
    if after[: len(before)] == before:
        return True
    if len(after) != len(before) or after[:-1] != before[:-1]:
        return False
    return json.loads(before[-1]).items() <= json.loads(after[-1]).items()


def _own_ledger(folder: Path | None) -> Path | None:
    return None if folder is None else folder / "ledger.sqlite"


def _litter(area: Area) -> list[Path]:
    """Return what a finished run leaves that is nobody's: drafts, journals, temporary files.

    A folder without a configuration is a run that was killed before it began.
    """
    begun = [path.parent for path in area.root.glob("runs/*/config.toml")]
    places = [area.root, area.root / "state" / "fedquilt" / "runs", *begun]
    places += [folder / "synthetic" for folder in begun]
    found = [path for place in places if place.is_dir() for path in place.iterdir()]
    left = [
        path
        for path in found
        if (path.name.startswith(".") and path.name != ".lock") or path.name.endswith("-journal")
    ]
    return left + list((area.place / "tmp").iterdir())


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)
