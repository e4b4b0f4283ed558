"""A run in Weights & Biases: offline, in the folder `wandb` of the run.

Unless the environment variable WANDB_MODE says otherwise, nothing is sent anywhere;
`wandb sync` uploads the folder later.  Machine statistics, the command line, installed
packages, source code and console output are not collected: a tracker tells of a run
what it was given, and no more.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedquilt import validate
from fedquilt.errors import InvalidValueError
from fedquilt.trackers import extras
from fedquilt.trackers.tracker import scalars_of, step_of, withholds_time

FOLDER = "wandb"
ID_FILE = "run-id.txt"
MODES = ("offline", "online", "disabled", "shared", "dryrun", "run")
# "dryrun" is an older name of "offline".
SENDS_NOTHING = ("offline", "dryrun", "disabled")

_NOTHING_ELSE = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class WandbTracker:
    """Logs to a run of its own, whose id stays in the folder for the run to be resumed.

    wandb stamps every row with the seconds since the start, and that cannot be turned
    off.  Rounds that withhold their seconds are therefore kept until the tracker is
    closed, and get almost the same stamp.

    wandb gathers offline rows in memory and writes them in blocks and at the end.
    A run that is killed, rather than interrupted, loses the latest ones here.
    """

    def __init__(
        self, folder: Path, *, project: str, run_name: str, config: Mapping[str, Any]
    ) -> None:
        mode = wandb_mode()
        self._kept: list[tuple[int, dict[str, int | float]]] = []
        with _quiet(mode):
            wandb = extras.wandb()
            id_file = folder / FOLDER / ID_FILE
            run_id, resumed = _run_id(id_file)
            try:
                self._run = wandb.init(
                    mode=mode,
                    dir=str(folder),
                    project=project,
                    name=run_name,
                    config=dict(config),
                    id=run_id,
                    resume="allow" if resumed else None,
                    reinit="create_new",  # leaves a run of the caller's alone
                    settings=wandb.Settings(**_NOTHING_ELSE),
                )
            except Exception as error:
                if not resumed:
                    id_file.unlink(missing_ok=True)
                raise InvalidValueError(
                    f"trackers='wandb' cannot start with WANDB_MODE={mode!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def log(self, line: Mapping[str, Any]) -> None:
        """Send one round to wandb's own process, which writes it down."""
        row = step_of(line), scalars_of(line)
        if self._kept or withholds_time(line):
            self._kept.append(row)
        else:
            self._send(*row)

    def close(self, *, failed: bool = False) -> None:
        """Send what was kept and end the run; again does nothing."""
        run, kept = self._run, self._kept
        if run is None:
            return
        try:
            for row in kept:
                self._send(*row)
        finally:
            self._run, self._kept = None, []
            run.finish(exit_code=int(failed))

    def _send(self, step: int, values: dict[str, int | float]) -> None:
        # Without `commit` a row waits until the next one comes.
        self._run.log(values, step=step, commit=True)


def wandb_mode() -> str:
    """Return what WANDB_MODE asks for, "offline" when it is unset or empty."""
    return validate.choice("WANDB_MODE", os.environ.get("WANDB_MODE") or "offline", MODES)


def _run_id(file: Path) -> tuple[str, bool]:
    """Return the run id of a folder and whether it was there before."""
    if file.exists():
        written = file.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", written):
            return written, True
    file.parent.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex[:12]
    file.write_text(f"{run_id}\n", encoding="utf-8")
    return run_id, False


@contextmanager
def _quiet(mode: str) -> Iterator[None]:
    """Start wandb without words, and offline without reports of its errors to its makers.

    wandb reads these variables only while it starts; what the user has set stays.
    """
    wanted = {"WANDB_SILENT": "true"}
    if mode in SENDS_NOTHING:
        wanted["WANDB_ERROR_REPORTING"] = "false"
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
