"""Replaying whole runs: every world of a victim, compared in all that anybody sees.

The base world is the one with the victim's own data; the others follow it.  In every
round, for the released sum S and what the victim's charge declares, c:

    ||S(world) - S(nothing)|| <= c        for every world: zero-out adjacency
    ||S(world) - S(data)|| <= 2 c         what follows from it; c itself with replace-one

Worlds in which the victim contributes nothing must release the same to the last bit.
Every other public value must be the same in all worlds; where a secret coin picks the
cohort, also in a world in which it has fallen otherwise for everybody.

    PYTHONPATH=src python tests/audit/whole_runs.py [--device cuda] [--jobs 11] [--case NAME]

Victims are the first, one in the middle and the last of those who join most often.  Each has
a world with nothing; the other kinds of neighbour are dealt to them, from case to case in
another order.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hostile_code import OWN_MODELS
from hostile_models import (
    CLIENTS,
    CONDENSED_SIDE,
    FORMS_OF_ONE,
    KINDS,
    NOTHING,
    Data,
    audit_data,
    audit_model,
)
from numpy.typing import NDArray
from same_people import PEOPLE, PREFIX, replay_people
from task_forms import CLIENT_FORMS, FORMS, TASK_MODELS, client_sets
from torch import nn
from watched_runs import (
    Recorder,
    Seen,
    Stopping,
    WatchedMean,
    WatchedRound,
    differing,
    same,
    watched_run,
)
from whole_cases import SHARED, WholeCase, missing, whole_cases

from fedquilt import population
from fedquilt.audit.canary import SIDE
from fedquilt.audit.findings import replay_table, rounding, scratch_folder
from fedquilt.common import checks
from fedquilt.common.errors import FedquiltError, RunInterrupted
from fedquilt.common.formatting import text_table
from fedquilt.common.vectors import norm
from fedquilt.condense import method
from fedquilt.condense.certified import GrowingSettings
from fedquilt.experiment import api as experiment
from fedquilt.record.result import RunResult
from fedquilt.training.task import one_thread

_DATA, _COINS = "data", "other coins"
_CPU_ONLY = ("processes", "flower")
_NEIGHBOURS = {**KINDS, **FORMS_OF_ONE}
_World = tuple[int | None, str]
"""Whose data were exchanged, and for what."""
_secret_coins = population.secret_coins
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
    jobs: int = 1,
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
    jobs : int
        How many processes replay cases side by side.
    """
    known = whole_cases()
    names = list(known) if cases is None else [checks.choice("case", c, known) for c in cases]
    if engine is not None:
        names = [name for name in names if known[name].settings.get("engine", engine) == engine]
    seed = checks.integer("seed", seed, at_least=0)
    if device != "cpu":  # worker processes, and Flower's nodes here, train on the CPU only
        names = [name for name in names if known[name].settings.get("engine") not in _CPU_ONLY]
    names = [name for name in names if not missing(known[name])]
    replayed = partial(_replayed, seed=seed, device=device, kinds=kinds)
    if checks.integer("jobs", jobs, at_least=1) == 1:
        return list(map(replayed, names))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(pool.map(replayed, names))


def _replayed(name: str, seed: int, device: str, kinds: Sequence[str] | None) -> WholeFinding:
    return replay_case(name, whole_cases()[name], seed, device, kinds)


def replay_case(
    name: str, case: WholeCase, seed: int, device: str = "cpu", kinds: Sequence[str] | None = None
) -> WholeFinding:
    """Run all worlds of a case and compare them."""
    chosen = [kind for kind in case.kinds if kinds is None or kind in kinds]
    with (
        one_thread(),
        tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch,
        patch.dict(os.environ, XDG_STATE_HOME=scratch),  # nothing is left with the user
        patch.object(method, "GrowingSettings", _few_steps),
    ):
        worlds = dict(_worlds(name, case, chosen, seed, device, Path(scratch)))
    return _finding(name, case, worlds)


def worlds_table(findings: Sequence[WholeFinding]) -> str:
    """Return the findings as a table, with a line that sums them up."""
    head = ("whole run", "worlds", "values", "moved/declared", "", "where it moved most")
    rows = []
    for f in findings:
        ratio = "-" if math.isnan(f.ratio) else f"{f.ratio:.6f}"
        verdict = "ok" if f.ok else "FAILED"
        rows.append((f.case, str(f.worlds), str(f.values), ratio, verdict, f.note or f.where))
    lines = [text_table(head, rows), ""]
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
    name: str, case: WholeCase, kinds: Sequence[str], seed: int, device: str, scratch: Path
) -> Iterator[tuple[_World, Seen]]:
    """Yield the base world and then the others, which follow it."""
    condenses = case.settings.get("method") == "condense"
    data = audit_data(seed, CONDENSED_SIDE if condenses else SIDE)
    base = _world(case, data, data, seed, device, scratch, None)
    yield (None, _DATA), base
    if case.settings.get("amplification"):
        with patch.object(population, "secret_coins", _other_coins):
            yield (None, _COINS), _world(case, data, data, seed, device, scratch, base)
    for victim, kind in _dealt(_victims(base), kinds, zlib.crc32(name.encode())):
        changed = _NEIGHBOURS[kind](data, victim)
        yield (victim, kind), _world(case, changed, data, seed, device, scratch, base)


def _dealt(victims: Sequence[int], kinds: Sequence[str], turn: int) -> Iterator[tuple[int, str]]:
    """Yield who has which neighbours: nothing for every victim, each other kind for one.

    Kinds that make nothing are dealt by themselves, so that every victim has two to compare.
    """
    for victim in victims if "nothing" in kinds else ():
        yield victim, "nothing"
    rest = [kind for kind in kinds if kind != "nothing"]
    for hand in ([k for k in rest if k in NOTHING], [k for k in rest if k not in NOTHING]):
        for place, kind in enumerate(hand):
            yield victims[(place + turn) % len(victims)], kind


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
    if "energy" in settings:
        settings["energy"] = str(scratch / "energy.csv")
        rows = (f"{who},{1 + who},{2.5 * (1 + who)},{0.2 * who}" for who in range(CLIENTS))
        Path(settings["energy"]).write_text("\n".join(("client,joules,battery,charge", *rows)))
    if "devices" in settings:
        settings["devices"] = settings["devices"].replace("cpu", device)
    settings |= {name: make() for name, make in case.fresh.items()}
    place = scratch / "runs"
    settings["output_dir"] = str(place) if _can_write() else None
    model = partial(audit_model, case.model, seed, {**TASK_MODELS, **OWN_MODELS})
    how: Callable[..., RunResult] = _here
    if settings.get("engine") == "flower":
        from flower_nodes import on_nodes as how  # here: what loading prints is no world's
    run = partial(how, case.task, model, data, public_data, settings)
    if case.then:
        again = {**settings, **case.then}
        run = partial(_in_two, run, partial(_here, case.task, model, data, public_data, again))
    try:
        return watched_run(run, seed, base, ledger)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if ledger is not None:
            ledger.unlink(missing_ok=True)


def _here(
    task: str,
    model: Callable[[], nn.Module],
    data: Data,
    public_data: Data,
    settings: dict[str, Any],
    observer: Recorder,
    resume: Path | None = None,
) -> RunResult:
    """Run with data that are all here."""
    settings = {**settings, "observer": observer, "resume": resume}
    if task in CLIENT_FORMS:
        test = (public_data.inputs, public_data.labels)
        train = client_sets(data, task)
        return experiment.run(model(), train, test, **settings)
    form = FORMS[task]
    return experiment.run(model(), form(data), form(public_data), data.clients, **settings)


def _in_two(
    begin: Callable[[Recorder], RunResult],
    go_on: Callable[[Recorder, Path], RunResult],
    recorder: Recorder,
) -> RunResult:
    """Run the first round and stop; resume with what is otherwise then."""
    try:
        return begin(Stopping(recorder))
    except RunInterrupted as interrupted:
        return go_on(recorder, Path(str(interrupted.folder)))


def _other_coins(size: int) -> NDArray[np.float64]:
    """Return coins that keep whom the real ones leave out, from the same secret bytes."""
    return np.asarray((_secret_coins(size) + 0.5) % 1.0)


def _few_steps() -> GrowingSettings:
    """Return few steps of growing images: they see releases only, and take long."""
    return GrowingSettings(steps=3)


def _can_write() -> bool:
    """Tell whether a checkpoint could be written; where not, runs are kept in memory."""
    return importlib.util.find_spec("safetensors") is not None


def _victims(base: Seen) -> list[int]:
    """Return the first, a middle and the last of those who join most often."""
    nobody = np.zeros(CLIENTS, dtype=bool)
    joins = np.sum([one.declared > 0 for one in base.rounds] or [nobody], axis=0)
    most = np.flatnonzero(joins == joins.max())
    return sorted({int(most[place]) for place in (0, len(most) // 2, -1)})


def _finding(name: str, case: WholeCase, worlds: dict[_World, Seen]) -> WholeFinding:
    base = worlds[None, _DATA]
    errors = {seen.error for seen in worlds.values()}
    if base.refused and len(errors) == 1:
        note = f"refused in every world: {base.error}"
        return WholeFinding(name, len(worlds), len(worlds), math.nan, True, "", (), note)
    problems = [f"{_called(w)}: {s.error}" for w, s in worlds.items() if s.error is not None]
    ran = {world: seen for world, seen in worlds.items() if seen.error is None}
    values = 0
    for world, seen in ran.items():
        values += len(seen.public) + len(seen.from_release)
        differ = differing(base.public, seen.public) if base.error is None else []
        if differ:
            problems.append(
                f"{_called(world)}: {len(differ)} public values differ: {_some(differ)}"
            )
    if case.may_waive and not any(seen.claims for seen in ran.values()):
        ok, note = not problems, "nothing is claimed"
        return WholeFinding(name, len(worlds), values, math.nan, ok, "", tuple(problems), note)
    moves: list[tuple[float, str]] = []
    for victim in sorted({who for who, _ in ran if who is not None}):
        own = {kind: seen for (who, kind), seen in ran.items() if who in (None, victim)}
        problems += [f"client {victim}, {told}" for told in _told_apart(own, victim)]
        of_one = _moves(own, victim, case.settings.get("adjacency") == "replace_one")
        moves += [(ratio, f"client {victim}, {where}") for ratio, where in of_one]
    ratio, where = max(moves, default=(math.nan, "nothing was released"))
    problems += [f"{place}: moved {r:.4g} of 1" for r, place in moves if r > 1.0]
    if ratio == 0.0:
        problems.append("nobody's data moved anything: the case shows nothing")
    ok = not problems
    return WholeFinding(name, len(worlds), values, ratio, ok, where, tuple(problems))


def _called(world: _World) -> str:
    victim, kind = world
    return kind if victim is None else f"client {victim}, {kind}"


def _told_apart(worlds: dict[str, Seen], victim: int) -> Iterator[str]:
    """Yield how worlds in which the victim contributes nothing differ in their releases.

    It does in those of `NOTHING`, and in any round in which its update was not finite.
    """
    for index in range(max(len(seen.rounds) for seen in worlds.values())):
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
            if apart > 0.0:
                yield f"{pair}: the victim has nothing, the sum moved {apart:.4g}"
            if not same(one.fraction, other.fraction):
                yield f"{pair}: the victim has nothing, the released fraction moved"
    named = {kind: seen for kind, seen in worlds.items() if kind in NOTHING and not seen.means}
    for kind, seen in named.items():
        first, ours = next(iter(named.items()))
        differ = differing(ours.from_release, seen.from_release)
        if differ:
            yield f"{kind} beside {first}: {_some(differ)}"


def _moves(worlds: dict[str, Seen], victim: int, replace_one: bool) -> Iterator[tuple[float, str]]:
    """Yield the moves of released sums and fractions over what may move them, and where."""
    for name, allowed in (("nothing", 1.0), (_DATA, 1.0 if replace_one else 2.0)):
        if name not in worlds:
            continue
        for kind, seen in worlds.items():
            if kind == _COINS:
                continue  # with them others come and go, which costs them, not the victim
            pair = f"{kind} beside {name}"
            pairs = zip(worlds[name].rounds, seen.rounds, strict=False)
            for index, (one, other) in enumerate(pairs):
                where = f"{pair}, round {index}"
                yield _move(one, other, allowed, victim), where
                if one.fraction is not None and other.fraction is not None:
                    moved, limit = abs(one.fraction - other.fraction), one.fraction_declared
                    yield _ratio(moved, allowed * limit, 1e-11), f"{where}, fraction"
            for index, means in enumerate(zip(worlds[name].means, seen.means, strict=False)):
                yield _move(*means, allowed, victim), f"{pair}, evaluation {index}"


def _move(
    one: WatchedRound | WatchedMean,
    other: WatchedRound | WatchedMean,
    allowed: float,
    victim: int,
) -> float:
    """Return how far a sum moved, over what the victim's charge allows."""
    limit = allowed * float(one.declared[victim])
    return _ratio(_apart(one, other), limit, _slack(one, limit))


def _apart(one: WatchedRound | WatchedMean, other: WatchedRound | WatchedMean) -> float:
    """Return how far two released sums lie apart; infinitely where one is missing."""
    if one.released is None or other.released is None:
        return 0.0 if one.released is other.released else math.inf
    apart = norm(one.released - other.released)
    return apart if math.isfinite(apart) else math.inf  # a release must be a number


def _slack(one: WatchedRound | WatchedMean, declared: float) -> float:
    return 0.0 if one.released is None else rounding(declared, one.released)


def _ratio(moved: float, declared: float, slack: float) -> float:
    """Return moved / declared, of which rounding is no part."""
    excess = max(0.0, moved - declared)
    if excess <= slack:
        return min(1.0, moved / declared) if declared > 0 else 0.0
    return moved / declared if declared > 0 else math.inf


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay whole runs, and pairs of runs about the same people; print what was found."""
    parser = argparse.ArgumentParser(prog="whole_runs.py", description=main.__doc__)
    parser.add_argument("--case", action="append", help="only this case; repeatable")
    parser.add_argument("--engine", help="only runs of this engine")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes that replay side by side")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    pairs = [PREFIX + name for name in PEOPLE]
    try:
        names = [checks.choice("case", c, [*whole_cases(), *pairs]) for c in given.case or ()]
        anywhere = given.engine is None and given.device == "cpu"
        chosen = names or (pairs if anywhere else [])  # they have no engine
        people = replay_people([n.removeprefix(PREFIX) for n in chosen if n in pairs])
        worlds = replay_worlds(
            [name for name in names if name not in pairs] if names else None,
            given.seed,
            engine=given.engine,
            device=given.device,
            jobs=given.jobs,
        )
    except FedquiltError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tables = [replay_table(people)] if people else []
    print("\n\n".join([*tables, *([worlds_table(worlds)] if worlds else [])]))
    good = all(pair.ok for pair in people) and all(world.ok for world in worlds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
