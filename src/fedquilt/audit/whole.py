"""Replaying whole runs: every world of a victim, compared in all that anybody sees.

The base world is the one with the victim's own data; the others follow it.  In every
round, for the released sum S and what the victim's charge declares, c:

    ||S(world) - S(nothing)|| <= c        for every world: zero-out adjacency
    ||S(world) - S(data)|| <= 2 c         what follows from it; c itself with replace-one

Worlds in which the victim contributes nothing must release the same to the last bit.
Every other public value must be the same in all worlds; where a secret coin picks the
cohort, also in a world in which it has fallen otherwise for everybody.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedquilt.audit import comparisons
from fedquilt.audit.findings import plain_table, scratch_folder
from fedquilt.audit.neighbours import (
    CONDENSED_SIDE,
    KINDS,
    NOTHING,
    SIDE,
    Data,
    audit_data,
    audit_model,
)
from fedquilt.audit.tasks import FORMS, TASK_MODELS
from fedquilt.audit.watch import (
    Seen,
    WatchedRound,
    differing,
    one_thread,
    same,
    swapped,
    swapped_entry,
    watched_run,
)
from fedquilt.audit.whole_cases import SHARED, WholeCase, missing, whole_cases
from fedquilt.common import checks
from fedquilt.condense import method
from fedquilt.condense.certified_statistics import GrowingSettings
from fedquilt.population import selection
from fedquilt.privacy.clip import norm

ROUNDING_SLACK = {"sequential": 0.0, "batched": 0.0, "processes": 0.0}
"""How far the releases of two worlds without the victim's data may lie apart, in units of
what one client may move.  Zero: no row of a batch may depend on its neighbours."""

_DATA, _COINS = "data", "other coins"
_secret_coins = selection.secret_coins
_SHOWN = 4  # problems of a case that the table shows


@dataclass(frozen=True)
class WholeFinding:
    """One case: how many worlds and values were compared, and the worst that was found.

    `ratio` is the largest move of the released sum over the declared one, under the
    run's adjacency; `problems` say what is wrong, none where all holds.
    """

    case: str
    worlds: int
    values: int
    ratio: float
    ok: bool
    where: str
    problems: tuple[str, ...] = ()
    note: str = ""


def replay_worlds(
    cases: Sequence[str] | None = None,
    seed: int = 0,
    *,
    engine: str | None = None,
    device: str = "cpu",
    kinds: Sequence[str] | None = None,
) -> list[WholeFinding]:
    """Replay whole runs and return one finding a case.

    Parameters
    ----------
    cases : sequence of str, optional
        Names of `whole_cases()`; all of them by default.
    seed : int
        Seed of data, models and noise.
    engine : str, optional
        Only the cases of this engine.
    device : str
        Where to train: cpu or cuda.
    kinds : sequence of str, optional
        Only these neighbours.
    """
    known = whole_cases()
    names = list(known) if cases is None else [checks.choice("case", c, known) for c in cases]
    if engine is not None:
        names = [name for name in names if known[name].settings.get("engine", engine) == engine]
    seed = checks.integer("seed", seed, at_least=0)
    if device != "cpu":  # worker processes train on the CPU only
        names = [name for name in names if known[name].settings.get("engine") != "processes"]
    return [
        replay_case(name, known[name], seed, device, kinds)
        for name in names
        if not missing(known[name])
    ]


def replay_case(
    name: str, case: WholeCase, seed: int, device: str = "cpu", kinds: Sequence[str] | None = None
) -> WholeFinding:
    """Run all worlds of a case and compare them."""
    chosen = [kind for kind in case.kinds if kinds is None or kind in kinds]
    with (
        one_thread(),
        tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch,
        swapped_entry(os.environ, "XDG_STATE_HOME", scratch),  # nothing is left with the user
        swapped(method, "GrowingSettings", _few_steps),
    ):
        worlds = dict(_worlds(case, chosen, seed, device, Path(scratch)))
    return _finding(name, case, worlds, _victim(case, worlds[_DATA]))


def worlds_table(findings: Sequence[WholeFinding]) -> str:
    """Return the findings as a table, with a line that sums them up."""
    head = ("whole run", "worlds", "values", "moved/declared", "", "where it moved most")
    rows = []
    for f in findings:
        ratio = "-" if math.isnan(f.ratio) else f"{f.ratio:.6f}"
        verdict = "ok" if f.ok else "FAILED"
        rows.append((f.case, str(f.worlds), str(f.values), ratio, verdict, f.note or f.where))
    lines = [plain_table(head, rows), ""]
    for f in findings:
        lines += [f"{f.case}: {problem}" for problem in f.problems[:_SHOWN]]
        if len(f.problems) > _SHOWN:
            lines.append(f"{f.case}: and {len(f.problems) - _SHOWN} more")
    failed = sum(not f.ok for f in findings)
    worlds, values = sum(f.worlds for f in findings), sum(f.values for f in findings)
    lines.append(
        f"{worlds} worlds, {values} public values compared: "
        + (f"{failed} of {len(findings)} cases failed" if failed else "every case holds")
    )
    return "\n".join(lines)


def _worlds(
    case: WholeCase, kinds: Sequence[str], seed: int, device: str, scratch: Path
) -> Iterator[tuple[str, Seen]]:
    """Yield the base world and then the others, which follow it."""
    condenses = case.settings.get("method") == "condense"
    data = audit_data(seed, CONDENSED_SIDE if condenses else SIDE)
    base = _world(case, data, data, seed, device, scratch, None)
    yield _DATA, base
    if case.settings.get("amplification"):
        with swapped(selection, "secret_coins", _other_coins):
            yield _COINS, _world(case, data, data, seed, device, scratch, base)
    for kind in kinds:
        changed = KINDS[kind](data, _victim(case, base))
        yield kind, _world(case, changed, data, seed, device, scratch, base)


def _world(
    case: WholeCase,
    data: Data,
    public_data: Data,
    seed: int,
    device: str,
    scratch: Path,
    base: Seen | None,
) -> Seen:
    shared = {} if case.settings.get("method") == "condense" else SHARED
    settings = {**shared, **case.settings, "seed": seed, "device": device}
    ledger = None
    if "ledger" in settings:
        ledger = scratch / "ledger.sqlite"
        settings["ledger"] = str(ledger)
    place = scratch / "runs"
    model = audit_model(case.model, seed, TASK_MODELS)
    form = FORMS[case.task]
    try:
        return watched_run(
            (model, form(data), form(public_data), data.clients),
            {**settings, "output_dir": str(place) if _can_write() else None},
            seed,
            base,
            ledger,
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if ledger is not None:
            ledger.unlink(missing_ok=True)


def _other_coins(size: int) -> NDArray[np.float64]:
    """Return coins that keep whom the real ones leave out, from the same secret bytes."""
    return np.asarray((_secret_coins(size) + 0.5) % 1.0)


def _few_steps() -> GrowingSettings:
    """Return few steps of growing images: they see releases only, and take long."""
    return GrowingSettings(steps=3)


def _can_write() -> bool:
    """Tell whether a checkpoint could be written; where not, runs are kept in memory."""
    return importlib.util.find_spec("safetensors") is not None


def _victim(case: WholeCase, base: Seen) -> int:
    """Return the case's victim, or the first of those who join most often."""
    if case.victim is not None or not base.rounds:
        return case.victim or 0
    return int(np.argmax(np.sum([one.declared > 0 for one in base.rounds], axis=0)))


def _finding(name: str, case: WholeCase, worlds: dict[str, Seen], victim: int) -> WholeFinding:
    base = worlds[_DATA]
    errors = {seen.error for seen in worlds.values()}
    if base.error is not None and len(errors) == 1:
        note = f"refused in every world: {base.error}"
        return WholeFinding(name, len(worlds), len(worlds), math.nan, True, "", (), note)
    problems = [f"{kind}: {s.error}" for kind, s in worlds.items() if s.error is not None]
    ran = {kind: seen for kind, seen in worlds.items() if seen.error is None}
    values = 0
    for kind, seen in ran.items():
        values += len(seen.public) + len(seen.from_release)
        differ = differing(base.public, seen.public)
        if differ:
            problems.append(f"{kind}: {len(differ)} public values differ: {_some(differ)}")
    slack = ROUNDING_SLACK[case.settings.get("engine", "sequential")]
    problems += _told_apart(ran, victim, slack)
    moves = list(_moves(ran, victim, case.settings.get("adjacency") == "replace_one"))
    ratio, where = max(moves, default=(math.nan, "nothing was released"))
    problems += [f"{place}: moved {r:.4g} of 1" for r, place in moves if r > 1.0 + slack]
    ok = not problems
    return WholeFinding(name, len(worlds), values, ratio, ok, where, tuple(problems))


def _told_apart(worlds: dict[str, Seen], victim: int, slack: float) -> Iterator[str]:
    """Yield how worlds in which the victim contributes nothing differ in their releases.

    It does in those of `NOTHING`, and in any round in which its update was not finite.
    """
    for index in range(len(worlds[_DATA].rounds)):
        empty = {
            kind: seen.rounds[index]
            for kind, seen in worlds.items()
            if index < len(seen.rounds)
            and (kind in NOTHING or (kind != _COINS and victim in seen.rounds[index].spoilt))
        }
        for kind, other in empty.items():
            first, one = next(iter(empty.items()))
            pair = f"{kind} beside {first}, round {index}"
            apart = _apart(one, other)
            if apart > slack * float(one.declared[victim]):
                yield f"{pair}: the victim has nothing, the sum moved {apart:.4g}"
            if not same(one.fraction, other.fraction):
                yield f"{pair}: the victim has nothing, the released fraction moved"
    named = {kind: seen for kind, seen in worlds.items() if kind in NOTHING}
    for kind, seen in named.items():
        first, ours = next(iter(named.items()))
        differ = differing(ours.from_release, seen.from_release)
        if differ and slack == 0.0:
            yield f"{kind} beside {first}: {_some(differ)}"


def _moves(worlds: dict[str, Seen], victim: int, replace_one: bool) -> Iterator[tuple[float, str]]:
    """Yield the moves of released sums and fractions over what may move them, and where."""
    for name, allowed in (("nothing", 1.0), (_DATA, 1.0 if replace_one else 2.0)):
        if name not in worlds:
            continue
        for kind, seen in worlds.items():
            if kind == _COINS:
                continue  # with them others come and go, which costs them, not the victim
            pairs = zip(worlds[name].rounds, seen.rounds, strict=False)
            for index, (one, other) in enumerate(pairs):
                where = f"{kind} beside {name}, round {index}"
                limit = allowed * float(one.declared[victim])
                yield _ratio(_apart(one, other), limit, _slack(one, limit)), where
                if one.fraction is not None and other.fraction is not None:
                    moved, limit = abs(one.fraction - other.fraction), one.fraction_declared
                    yield _ratio(moved, allowed * limit, 1e-11), f"{where}, fraction"


def _apart(one: WatchedRound, other: WatchedRound) -> float:
    """Return how far two released sums lie apart; infinitely where one is missing."""
    if one.released is None or other.released is None:
        return 0.0 if one.released is other.released else math.inf
    apart = norm(one.released - other.released)
    return apart if math.isfinite(apart) else math.inf  # a release must be a number


def _slack(one: WatchedRound, declared: float) -> float:
    return 0.0 if one.released is None else comparisons.rounding(declared, one.released)


def _ratio(moved: float, declared: float, slack: float) -> float:
    """Return moved / declared, of which rounding is no part."""
    excess = max(0.0, moved - declared)
    if excess <= slack:
        return min(1.0, moved / declared) if declared > 0 else 0.0
    return moved / declared if declared > 0 else math.inf


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
