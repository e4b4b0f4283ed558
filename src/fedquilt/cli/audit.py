"""`fedquilt audit` tries to make a certified round break its promise; `attack`, one's own run."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedquilt.cli.progress import interruptible
from fedquilt.cli.run import JSON
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import text_table, wrapped


@interruptible(None)
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


RUN = typer.Argument(metavar="RUN", help="The folder of a run whose data are on this machine.")
SEED = typer.Option("--seed", help="Of what the attacker draws.")
PRIVATE = "private: made with the clients' own samples; it is in the run's folder, for you alone"

attack = typer.Typer(
    name="attack",
    help="Attack what a run of your own has released: what does its bound buy?",
    no_args_is_help=True,
)


@attack.command("invert")
def attack_images(
    run: Annotated[str, RUN],
    client: Annotated[
        int | None, typer.Option("--client", help="Whose images; by default who has fewest.")
    ] = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", metavar="NAME", help="dlg, idlg or tv; repeatable; all if none."),
    ] = None,
    iterations: Annotated[int, typer.Option("--iterations", help="Steps of one search.")] = 300,
    restarts: Annotated[int, typer.Option("--restarts", help="Searches of each attack.")] = 2,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Look for a client's images in what the first round gave away of it.

    The round is run once more, with new noise; no ledger is charged and the run stays as it is.
    """
    from fedquilt.audit.privacy_attacks import INVERSIONS, invert
    from fedquilt.observe.progress import StepsProgress
    from fedquilt.record.folder import RunFolder
    from fedquilt.report.images import picture_rows

    chosen = attacks or list(INVERSIONS)
    total = len(chosen) * max(restarts, 0)
    with interruptible(None), StepsProgress("attack: search", total, shown=not as_json) as steps:
        options: dict[str, Any] = {"iterations": iterations, "restarts": restarts, "seed": seed}
        found = invert(run, client, chosen, step=steps.end, **options)
    picture = picture_rows([("truth", found.truth), *found.found.items()])
    noted = found.as_json() | {"png": base64.b64encode(picture).decode("ascii")}
    RunFolder.open(run).write_attack("inversion", noted, picture)
    if as_json:
        print(json.dumps(found.as_json()))
        return
    rows = [(name, f"{value:.1f}") for name, value in found.psnr.items()]
    rows.append(("mean test image", f"{found.blank:.1f}"))
    print(f"client {found.client}, {len(found.truth)} images\n")
    print(text_table(("attack", "PSNR in dB"), rows))
    _say_private(Path(run) / "inversion.png")


@attack.command("membership")
def attack_membership(
    run: Annotated[str, RUN],
    shadows: Annotated[
        int, typer.Option("--shadows", help="Runs that LiRA trains; 0: loss alone.")
    ] = 10,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Tell members of the training data from others by the released model.

    LiRA trains shadow models as the run trained, in memory: no ledger is charged.
    """
    from fedquilt.audit.privacy_attacks import membership
    from fedquilt.observe.progress import StepsProgress
    from fedquilt.record.folder import RunFolder

    with interruptible(None), StepsProgress("attack: shadow", shadows, shown=not as_json) as steps:
        found = [
            one.as_json() for one in membership(run, shadows=shadows, seed=seed, step=steps.end)
        ]
    RunFolder.open(run).write_attack("membership", found)
    if as_json:
        print(json.dumps({"membership": found}))
        return
    rates = list(found[0]["right_alarms"])
    head = ("attack", "AUC", *(f"right at {100 * float(rate):g} % false" for rate in rates))
    rows = [("nothing learned", "0.500", *(f"{float(rate):.3f}" for rate in rates))]
    rows += [_row(one["attack"], one["auc"], one["right_alarms"]) for one in found]
    rows.append(_row("the most the bound allows", found[0]["allowed_auc"], _allowed(found)))
    print(f"{found[0]['members']} members, {found[0]['others']} others\n")
    print(text_table(head, rows))
    _say_private(Path(run) / "attacks.json")


def _allowed(found: list[dict[str, Any]]) -> dict[str, float]:
    allowed: dict[str, float] = found[0]["allowed_alarms"]
    return allowed


def _row(name: str, auc: float, alarms: dict[str, float]) -> tuple[str, ...]:
    return (name, f"{auc:.3f}", *(f"{value:.3f}" for value in alarms.values()))


def _say_private(path: Path) -> None:
    print(wrapped(f"\n{PRIVATE}: {path}"), file=sys.stderr)
