"""The results of a sweep: one SQLite table, a row a point.

The columns of a row follow from the point's own result and from nothing else: no clock, no order
in which points ended, no path of this machine.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedquilt.common.storage import storage_errors
from fedquilt.sweep.plan import Plan, Point

TABLE_FILE = "sweep.sqlite"
WAITING, DONE, REFUSED = "waiting", "done", "refused"
_MEASURED = {
    "accuracy": "REAL",
    "loss": "REAL",
    "rounds": "INTEGER",
    "stopped": "TEXT",
    "claimed_epsilon": "REAL",
    "claimed_delta": "REAL",
    "charged": "INTEGER",
}


class Table:
    """The table of one sweep; every row is written in a transaction of its own.

    `claimed_epsilon` is infinity where nothing is claimed; `charged` tells whether the run
    is in a ledger that outlives it.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.path = folder / TABLE_FILE
        self.plan = plan

    def prepare(self) -> None:
        """Make the table with a waiting row for each point; what is there stays."""
        axes = "".join(f', "{key}"' for key in self.plan.axes)
        measured = "".join(f", {name} {kind}" for name, kind in _MEASURED.items())
        made = (
            "CREATE TABLE IF NOT EXISTS points (point INTEGER PRIMARY KEY"
            f"{axes}, seed INTEGER, state TEXT NOT NULL{measured}, message TEXT, folder TEXT)"
        )
        marks = ", ".join("?" * (len(self.plan.axes) + 4))
        names = ", ".join(["point", *(f'"{key}"' for key in self.plan.axes), "seed", "state"])
        insert = f"INSERT OR IGNORE INTO points ({names}, folder) VALUES ({marks})"
        with self._writing() as database:
            database.execute(made)
            database.executemany(insert, map(self._waiting, self.plan.points))

    def _waiting(self, point: Point) -> tuple[Any, ...]:
        own = [_cell(point.settings[key]) for key in self.plan.axes]
        return point.number, *own, point.seed, WAITING, point.name

    def finish(self, point: Point, result: Mapping[str, Any]) -> None:
        """Write what a finished run has measured and may claim."""
        statement, metadata = result["statement"], result["metadata"]
        settings = metadata.get("hyperparameters") or {}
        values = {
            "accuracy": metadata.get("final_accuracy"),
            "loss": metadata.get("final_loss"),
            "rounds": result["rounds"],
            "stopped": result.get("stopped"),
            "claimed_epsilon": float(statement["epsilon_max"]),
            "claimed_delta": statement["delta"],
            "charged": int(settings.get("ledger") is not None),
        }
        self._update(point, DONE, None, values)

    def refuse(self, point: Point, message: str) -> None:
        """Write why a point cannot run."""
        self._update(point, REFUSED, message, dict.fromkeys(_MEASURED))

    def lose(self, point: Point, message: str) -> None:
        """Write that a point's process died; it waits for the sweep to be resumed."""
        self._update(point, WAITING, message, dict.fromkeys(_MEASURED))

    def _update(
        self, point: Point, state: str, message: str | None, values: Mapping[str, Any]
    ) -> None:
        cells = ", ".join(f"{name} = ?" for name in _MEASURED)
        command = f"UPDATE points SET state = ?, message = ?, {cells} WHERE point = ?"
        given = (state, message, *(values[name] for name in _MEASURED), point.number)
        with self._writing() as database:
            database.execute(command, given)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction."""
        with (
            storage_errors(self.path),
            closing(sqlite3.connect(self.path, timeout=30)) as database,
            database,
        ):
            yield database

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows in the order of the points."""
        with closing(
            sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)
        ) as opened:
            opened.row_factory = sqlite3.Row
            return [dict(row) for row in opened.execute("SELECT * FROM points ORDER BY point")]

    def waiting(self) -> list[Point]:
        """Return the points that have no result yet."""
        open_ = {row["point"] for row in self.rows() if row["state"] == WAITING}
        return [point for point in self.plan.points if point.number in open_]


def _cell(value: Any) -> Any:
    if isinstance(value, bool | int | float | str) or value is None:
        return value if not isinstance(value, float) or math.isfinite(value) else None
    return json.dumps(value)
