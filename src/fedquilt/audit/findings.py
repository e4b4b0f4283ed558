"""Running a replay and telling what it found."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedquilt.audit import comparisons
from fedquilt.audit.cases import CASES, Case
from fedquilt.audit.comparisons import Comparison, ExpectedNoise
from fedquilt.audit.worlds import known_noise, make_worlds, prescribed
from fedquilt.common import checks
from fedquilt.common.text_table import text_table
from fedquilt.privacy.certified import Certified


@dataclass(frozen=True)
class ReplayFinding:
    """One check of one case: what was declared and what was measured, at its worst."""

    case: str
    declared: float
    measured: float
    ok: bool
    detail: str


def replay(cases: Sequence[str] | None = None, seed: int = 0) -> list[ReplayFinding]:
    """Replay some of `CASES`, or all of them, and return what was found.

    There is one finding for each case and check, the worst of all victims and rounds.
    """
    names = list(CASES) if cases is None else [checks.choice("case", c, CASES) for c in cases]
    seed = checks.integer("seed", seed, at_least=0)
    return [finding for name in names for finding in _findings(name, seed)]


def replay_table(findings: Sequence[ReplayFinding]) -> str:
    """Return the findings as a table, with a line that sums them up."""
    rows = [
        (f.case, f"{f.declared:.6g}", f"{f.measured:.6g}", "ok" if f.ok else "FAILED", f.detail)
        for f in findings
    ]
    failed = sum(not finding.ok for finding in findings)
    verdict = f"{failed} of {len(findings)} checks failed" if failed else "every check holds"
    head = ("case: check", "declared", "measured", "", "where")
    return f"{text_table(head, rows)}\n\n{verdict}"


def _findings(name: str, seed: int) -> list[ReplayFinding]:
    with (
        tempfile.TemporaryDirectory(dir=scratch_folder()) as folder,
        contextlib.ExitStack() as stack,
    ):
        try:
            compared = list(_comparisons(CASES[name], seed, Path(folder), stack))
        except Exception as error:
            # A round that stops because of what a client sent tells what it sent.
            reason = f"{type(error).__name__}: {error}"
            compared = [Comparison("runs", 0.0, math.inf, False, reason)]
    return [
        ReplayFinding(f"{name}: {worst.check}", *worst[1:]) for worst in _worst_of_each(compared)
    ]


def scratch_folder() -> str | None:
    """Return a folder in memory where there is one: these ledgers need not survive a crash."""
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) else None


def _worst_of_each(compared: Iterable[Comparison]) -> Iterator[Comparison]:
    """Yield one comparison of each check: one that failed, else the one that moved most."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in compared:
        groups.setdefault(comparison.check, []).append(comparison)
    for group in groups.values():
        yield max(group, key=lambda c: (not c.ok, math.isnan(c.measured), c.measured))


def _comparisons(
    case: Case, seed: int, folder: Path, stack: contextlib.ExitStack
) -> Iterator[Comparison]:
    """Run the worlds of a case side by side and yield every comparison."""
    base, silent, neighbours = make_worlds(case, seed, folder, stack)
    mechanism = base.federation.mechanism
    bands = mechanism.noise.bands if isinstance(mechanism, Certified) else 1
    known = known_noise(seed)
    expected = ExpectedNoise(known, bands)
    cohorts: list[list[int]] = []
    for index in range(case.num_rounds):
        for world in (base, silent, *neighbours):
            world.run(index)
        public = base.public()
        cohorts.append(base.record.cohort)
        yield from comparisons.compare_noise(base, silent, expected)
        yield from comparisons.compare_bit_noise(base, silent, known)
        if case.norms:
            sent = prescribed(case, seed, base.federation.method)
            yield from comparisons.compare_bits(silent, sent)
        for neighbour in neighbours:
            where = f"client {neighbour.victim}, round {index}"
            yield from comparisons.compare_sum(base, neighbour)
            yield from comparisons.compare_fractions(base, neighbour)
            yield from comparisons.compare_public(public, neighbour.public(), where)
        for world in (silent, *neighbours):
            world.follow(base)
    yield from comparisons.compare_joins(cohorts, bands)
    ending = base.ending()
    for neighbour in neighbours:
        where = f"client {neighbour.victim}, at the end"
        yield from comparisons.compare_public(ending, neighbour.ending(), where)
