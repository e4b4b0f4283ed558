"""`fedquilt audit`: try to make the certified round break its promise."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedquilt.cli.progress import interruptible
from fedquilt.cli.run import JSON
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.text_table import wrapped


def audit(
    replay: Annotated[
        bool, typer.Option("--replay", help="Run with and without one client's data.")
    ] = False,
    canary: Annotated[
        bool, typer.Option("--canary", help="Look for a client in releases with secret noise.")
    ] = False,
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="CASE", help="Only this case of --replay; repeatable."),
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="What trains in --canary.")] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where --canary trains: cpu or cuda.")
    ] = "cpu",
    trials: Annotated[
        int, typer.Option("--trials", help="Rounds of --canary under each hypothesis.")
    ] = 400,
    without_clip: Annotated[
        bool, typer.Option("--without-clip", help="Take the clip away: --canary must miss it.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of updates and known noise.")] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Every check of --replay, not one line a family.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Check on this machine that runs give away no more than they declare; exit 1 if not.

    Without --replay or --canary it does the first, which is exact. Either takes 10 to 20 seconds
    on a free core, and minutes where other programs use it.
    """
    with interruptible(None):
        _audit(replay, canary, cases, engine, device, trials, without_clip, seed, verbose, as_json)


def _audit(
    replay: bool,
    canary: bool,
    cases: list[str] | None,
    engine: str | None,
    device: str,
    trials: int,
    without_clip: bool,
    seed: int,
    verbose: bool,
    as_json: bool,
) -> None:
    from fedquilt import audit as auditing

    if without_clip and not canary:
        raise InvalidValueError("--without-clip must be used with --canary, which misses the clip")
    if not canary and (engine is not None or device != "cpu"):
        raise InvalidValueError(
            "--engine and --device must be used with --canary: single rounds have no engine"
        )
    replay = replay or not canary
    report: dict[str, Any] = {}
    tables: list[str] = []
    good = True
    if replay:
        rounds = auditing.replay(cases, seed, progress=not as_json)
        good = all(finding.ok for finding in rounds)
        report["findings"] = _plain(rounds)
        shown = auditing.replay_table(rounds, verbose=verbose)
        tables.append(f"{shown}\n\n{wrapped(auditing.WHOLE_RUNS)}")
    if canary:
        own: dict[str, Any] = {"seed": seed, "device": device, "without_clip": without_clip}
        own["progress"] = not as_json
        found = auditing.canary(trials=trials, engine=engine or "sequential", **own)
        found += auditing.one_run(**own)
        good = good and all(finding.ok for finding in found)
        report["canaries"] = _plain(found)
        tables.append(auditing.canary_table(found))
    print(json.dumps({"ok": good, **report}) if as_json else "\n\n".join(tables))
    raise typer.Exit(0 if good else 1)


def _plain(findings: Sequence[Any]) -> list[dict[str, object]]:
    """Return findings for JSON, which has no infinity and no NaN."""
    rows = []
    for finding in findings:
        fields = {**dataclasses.asdict(finding), "ok": finding.ok}
        rows.append(
            {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in fields.items()
            }
        )
    return rows
