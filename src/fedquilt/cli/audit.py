"""`fedquilt audit`: try to make the certified round break its promise."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated

import typer

from fedquilt.cli.run import JSON
from fedquilt.errors import InvalidValueError


def audit(
    replay: Annotated[
        bool, typer.Option("--replay", help="Run rounds with and without one client's data.")
    ] = False,
    cases: Annotated[
        list[str] | None, typer.Option("--case", metavar="CASE", help="Only this case; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of updates and noise.")] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Check on this machine that rounds move by no more than they declare; exit 1 if not."""
    from fedquilt import audit as auditing

    if not replay:
        raise InvalidValueError("audit needs --replay, the check it can do")
    findings = auditing.replay(cases or None, seed)
    ok = all(finding.ok for finding in findings)
    if as_json:
        print(json.dumps({"ok": ok, "findings": [_plain(finding) for finding in findings]}))
    else:
        print(auditing.replay_table(findings))
    raise typer.Exit(0 if ok else 1)


def _plain(finding: object) -> dict[str, object]:
    """Return a finding for JSON, which has no infinity and no NaN."""
    fields = dataclasses.asdict(finding)  # type: ignore[call-overload]
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }
