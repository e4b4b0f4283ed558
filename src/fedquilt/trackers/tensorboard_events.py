"""A run in TensorBoard: event files in the folder `tensorboard` of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.trackers import extras
from fedquilt.trackers.tracker import scalars_of, step_of, withholds_time

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Writes scalars with torch's SummaryWriter.

    The event file begins with the first round, because only then is known where the
    run goes on: TensorBoard drops what an earlier event file holds from that step on
    (`purge_step`), so the rounds that a resumed run repeats appear once.

    A round that withholds its seconds is stamped with the time of opening.
    """

    def __init__(self, folder: Path) -> None:
        self._module = extras.tensorboard_writer()
        self._folder = folder / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._opened = time.time()
        self._writer: Any = None

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one round, and flush it: a killed run keeps its rounds."""
        step = step_of(line)
        clock = self._opened if withholds_time(line) else None
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step)
        for name, value in scalars_of(line).items():
            self._writer.add_scalar(name, value, global_step=step, walltime=clock)
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the event file; TensorBoard has no place for how a run ended."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception:
            # SummaryWriter gives up at its first error, before it has waited for its thread.
            writer.file_writer.close()
            raise
