"""The results of a sweep: one SQLite table, a row a point; what it found, and figures of it.

The columns of a row follow from the point's own files and from nothing else: no clock, no order
in which points ended, no path of this machine.

The file is read and replaced whole, as bytes, and SQLite sees it in memory only.  Opened by its
name it would be followed where a link leads, and a journal that somebody has put beside it would
be played back, which deletes whatever file that journal names.

A summary has each setting over its seeds, differences on equal seeds, and the looks.  Every run
that has released anything has looked at its clients' data once, finished or not.  Picking the best
of them by its results is tuning by looking, which no run's own statement covers: the summary says
how often it was done and what all looks together may have cost a client.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedquilt.common import schema
from fedquilt.common.colors import identities
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import format_bound, printable
from fedquilt.common.schema import ANY_NUMBER, ANY_TEXT, COUNT, Scalar, check, maybe
from fedquilt.common.storage import check_regular, storage_errors, write_file
from fedquilt.common.untrusted import TABLE_BYTES, read_bytes
from fedquilt.report import style
from fedquilt.report.runs import Paired, Spread, paired, spread
from fedquilt.report.views.claim import composed_epsilon
from fedquilt.sweep.plan import Plan, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE_FILE = "sweep.sqlite"
WAITING, DONE, REFUSED, FAILED = "waiting", "done", "refused", "failed"
_MEASURED = {
    "accuracy": "REAL",
    "loss": "REAL",
    "rounds": "INTEGER",
    "stopped": "TEXT",
    "claimed_epsilon": "REAL",
    "claimed_delta": "REAL",
    "charged": "INTEGER",
}
_KEPT = ("state", *_MEASURED, "message")
_EPSILON = Scalar("a number >= 0", frozenset({int, float}), least=0)
_DELTA = Scalar("a number from 0 to 1", frozenset({int, float}), least=0, most=1)
_ROW = schema.Object(
    {
        "point": COUNT,
        "state": Scalar("a state", frozenset({str}), texts=(WAITING, DONE, REFUSED, FAILED)),
        **dict.fromkeys(("accuracy", "loss"), ANY_NUMBER),
        **dict.fromkeys(("rounds", "charged"), maybe(COUNT)),
        **dict.fromkeys(("stopped", "message"), ANY_TEXT),
        "claimed_epsilon": maybe(_EPSILON),
        "claimed_delta": maybe(_DELTA),
    }
)
_ENDED = schema.Object({"claimed_epsilon": _EPSILON, "claimed_delta": _DELTA, "charged": COUNT})


class Table:
    """The table of one sweep.

    `claimed_epsilon` is infinity where nothing is claimed; `charged` tells whether the run
    is in a ledger that outlives it.  A run that has not ended has both too, once it has
    released something.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.path = folder / TABLE_FILE
        self.plan = plan
        self._rows: list[dict[str, Any]] = []

    def prepare(self) -> None:
        """Make the table with a waiting row for each point; what is there stays."""
        kept = {row["point"]: row for row in self._read()}
        fresh = {**dict.fromkeys(_KEPT), "state": WAITING}
        self._rows = [
            {
                "point": point.number,
                **{key: _cell(point.settings[key]) for key in self.plan.axes},
                "seed": point.seed,
                **{key: kept.get(point.number, fresh)[key] for key in _KEPT},
                "folder": point.name,
            }
            for point in self.plan.points
        ]
        self._write()
        self._journal.unlink(missing_ok=True)

    @property
    def _journal(self) -> Path:
        """What a kill in the middle of a write has left, by a fedquilt that wrote in place."""
        return self.path.with_name(f"{TABLE_FILE}-journal")

    def _made(self) -> str:
        axes = "".join(f', "{key}"' for key in self.plan.axes)
        measured = "".join(f", {name} {kind}" for name, kind in _MEASURED.items())
        return (
            f"CREATE TABLE points (point INTEGER PRIMARY KEY{axes}, seed INTEGER, "
            f"state TEXT NOT NULL{measured}, message TEXT, folder TEXT)"
        )

    def _read(self) -> list[dict[str, Any]]:
        """Return what the file says of the points, checked; nothing where it is half written."""
        check_regular(self.path)
        if not self.path.exists() or self._journal.exists():
            return []
        content = read_bytes(self.path, TABLE_BYTES, RunFolderError)
        columns = ("point", *_KEPT)
        query = f"SELECT {', '.join(columns)} FROM points ORDER BY point LIMIT ?"
        try:
            with closing(sqlite3.connect(":memory:")) as database:
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, len(content) + 1000)
                database.deserialize(content)
                database.execute("PRAGMA trusted_schema = OFF")
                found = database.execute("SELECT sql FROM sqlite_master LIMIT 2").fetchall()
                if found != [(self._made(),)]:
                    raise self._foreign("its columns are not those of the sweep's plan")
                whole = database.execute("PRAGMA integrity_check(1)").fetchone()
                if whole != ("ok",):
                    raise self._foreign("it is damaged")
                cells = database.execute(query, (len(self.plan.points),)).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._foreign(error) from error
        rows = [dict(zip(columns, row, strict=True)) for row in cells]
        for row in rows:
            where = f"{self.path}: point {row['point']}"
            unbounded = row["claimed_epsilon"] == math.inf
            finite = {**row, "claimed_epsilon": 0} if unbounded else row
            check(finite, _ROW, where, RunFolderError)
            if row["state"] == DONE:
                check(finite, _ENDED, where, RunFolderError)
        return rows

    def _foreign(self, reason: object) -> RunFolderError:
        return RunFolderError(
            f"{str(self.path)!r} is no table of this sweep: {printable(reason)[:300]}. Move it "
            "away: it is made again from the points' own folders"
        )

    def _write(self) -> None:
        columns = list(self._rows[0])
        insert = f"INSERT INTO points VALUES ({', '.join('?' * len(columns))})"
        with closing(sqlite3.connect(":memory:")) as database:
            database.execute(self._made())
            database.executemany(insert, ([row[key] for key in columns] for row in self._rows))
            database.commit()
            content = database.serialize()
        with storage_errors(self.path):
            write_file(self.path, content)

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
        self._update({point.number: {"state": DONE, "message": None, **values}})

    def refuse(self, point: Point, message: str) -> None:
        """Write why a point cannot run: nothing of it was ever begun."""
        self._update({point.number: {"state": REFUSED, "message": message}})

    def lose(self, point: Point, message: str) -> None:
        """Write why a point failed; it runs again when the sweep is resumed."""
        self._update({point.number: {"state": FAILED, "message": message}})

    def measure(self, released: Mapping[int, Mapping[str, Any]]) -> None:
        """Write what points that have not ended have released so far, by their numbers."""
        self._update(released)

    def _update(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace cells of some points; the file stays as it was when nothing is new."""
        before = [dict(row) for row in self._rows]
        for number, values in changes.items():
            self._rows[number].update(values)
        if self._rows != before:
            self._write()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows in the order of the points."""
        return [dict(row) for row in self._rows]

    def points(self, states: Collection[str]) -> list[Point]:
        """Return the points in one of these states."""
        return [
            p for p, row in zip(self.plan.points, self._rows, strict=True) if row["state"] in states
        ]


_LARGEST = 2**63


def _cell(value: Any) -> Any:
    """Return a setting as SQLite can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | None) or (isinstance(value, int) and abs(value) < _LARGEST):
        return value
    return json.dumps(value)


@dataclass(frozen=True)
class Setting:
    """One combination of values over its seeds."""

    label: str
    values: dict[str, Any]
    by_seed: dict[int, float | None]
    spread: Spread
    epsilon: float
    refused: int
    failed: int


@dataclass(frozen=True)
class Reason:
    """Why runs were refused, or failed."""

    state: str
    message: str
    runs: int


@dataclass(frozen=True)
class Looks:
    """How often clients' data were looked at, and what that may cost all together."""

    runs: int
    unfinished: int
    charged: int
    refused: int
    epsilon: float
    delta: float | None
    text: str


@dataclass(frozen=True)
class SweepSummary:
    """Settings, best first; differences of the best to each other one; the looks; reasons.

    `metric` is what they are judged by: the accuracy or, where there is none, the test loss.
    """

    metric: str
    settings: tuple[Setting, ...]
    differences: tuple[tuple[str, Paired], ...]
    looks: Looks
    reasons: tuple[Reason, ...]


def summarise(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> SweepSummary:
    """Summarise the rows of a sweep's table."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in plan.axes), []).append(row)
    metric = "accuracy" if any(row["accuracy"] is not None for row in rows) else "loss"
    settings = [_setting(plan.axes, key, own, metric) for key, own in groups.items()]
    turn = -1 if metric == "accuracy" else 1
    settings.sort(key=lambda one: turn * (one.spread.mean or 0.0))
    known = [one for one in settings if one.spread.mean is not None]
    others = [one for one in settings if one.spread.mean is None]
    differences = [
        (f"{known[0].label} minus {one.label}", paired(known[0].by_seed, one.by_seed))
        for one in known[1:]
    ]
    said = Counter((row["state"], row["message"]) for row in rows if row["state"] in _SAID)
    reasons = tuple(Reason(state, message or "", n) for (state, message), n in said.items())
    return SweepSummary(metric, (*known, *others), tuple(differences), _looks(rows, plan), reasons)


_SAID = (REFUSED, FAILED)


def _setting(
    axes: Sequence[str], key: Sequence[Any], rows: Sequence[Mapping[str, Any]], metric: str
) -> Setting:
    by_seed = {int(row["seed"]): row[metric] for row in rows if row["state"] == DONE}
    claimed = [row["claimed_epsilon"] for row in rows if row["state"] == DONE]
    label = ", ".join(f"{name}={shown_value(value)}" for name, value in zip(axes, key, strict=True))
    return Setting(
        label,
        dict(zip(axes, key, strict=True)),
        by_seed,
        spread(list(by_seed.values()), share=metric == "accuracy"),
        max(claimed, default=math.inf),
        sum(row["state"] == REFUSED for row in rows),
        sum(row["state"] == FAILED for row in rows),
    )


def shown_value(value: Any) -> str:
    """Return the value of an option as tables and figures have it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _looks(rows: Sequence[Mapping[str, Any]], plan: Plan) -> Looks:
    looked = [row for row in rows if row["claimed_epsilon"] is not None]
    runs, unfinished = len(looked), sum(row["state"] != DONE for row in looked)
    charged = sum(bool(row["charged"]) for row in looked)
    refused = sum(row["state"] == REFUSED for row in rows)
    coin = any({**plan.base, **point.settings}.get("amplification") for point in plan.points)
    epsilon, delta = composed_epsilon(
        [row["claimed_epsilon"] for row in looked],
        [row["claimed_delta"] for row in looked],
        amplified=coin,
    )
    text = _in_words(runs, unfinished, charged, epsilon, delta)
    return Looks(runs, unfinished, charged, refused, epsilon, delta, text)


def _in_words(runs: int, unfinished: int, charged: int, epsilon: float, delta: float | None) -> str:
    looks = "1 look was" if runs == 1 else f"{runs} looks were"
    head = f"{looks} taken at the clients' data, one for each finished run"
    if unfinished:
        head += f" and for {unfinished} that released rounds and did not end"
    if charged == runs and runs:
        return (
            f"{head}; all of them are charged to the ledger, which bounds each client over all "
            "runs. Choosing among results is covered by that bound."
        )
    bounded = math.isfinite(epsilon) and delta is not None
    cost = (
        f"a client that was in all of them has given away up to ε = {format_bound(epsilon)} "
        f"at δ = {format_bound(delta or 0.0, 6)}"
        if bounded
        else "together they are bounded by nothing"
    )
    return (
        f"{head}; {charged} of them are charged to a ledger. Each run's statement is about that "
        f"run alone: {cost}. What is chosen by looking at results is not covered."
    )


Row = Mapping[str, Any]
_WIDE = 20  # a ratio of largest to smallest value that asks for a logarithmic axis


def plot_sweep(
    rows: Sequence[Row],
    axes: Sequence[str],
    save_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    metric: str = "accuracy",
) -> list[str]:
    """Draw a sweep: lines along the first option and, with two or more, heat maps.

    `rows` have `values` (option: value), `mean`, `low` and `high` (of the mean), None where
    nothing was measured.  Options beyond the second are averaged over.
    Returns the paths: `{path}`, and `{stem}_map` for the heat map.
    """
    if not rows or not axes:
        raise InvalidValueError("a figure of a sweep needs at least one option and one row")
    settings = style.figure_settings(config, (6.8, 4.4))
    path = style.figure_path(save_path, "sweep", settings)
    with style.drawing(settings) as figure:
        _draw_lines(figure.subplots(), rows, axes, metric)
        paths = [style.save_figure(figure, path, settings)]
    if len(axes) > 1:
        with style.drawing(settings) as figure:
            _draw_map(figure.subplots(), rows, axes[0], axes[1], metric)
            place = path.with_name(f"{path.stem}_map{path.suffix}")
            paths.append(style.save_figure(figure, place, settings))
    return paths


def _draw_lines(axes: Axes, rows: Sequence[Row], keys: Sequence[str], metric: str) -> None:
    first = keys[0]
    families = _values(rows, keys[1]) if len(keys) > 1 else [None]
    numeric = all(_is_number(value) for value in _values(rows, first))
    places = {shown_value(value): i for i, value in enumerate(_values(rows, first))}
    looks = [style.as_look(one) for one in identities([""] * len(families), {})]
    for index, family in enumerate(families):
        own = [r for r in rows if family is None or r["values"][keys[1]] == family]
        table = _averaged(own, first)
        if not table:
            continue
        xs = [value if numeric else places[shown_value(value)] for value, *_ in table]
        means, lows, highs = (np.asarray([entry[k] for entry in table]) for k in (1, 2, 3))
        look = looks[index]
        label = None if family is None else f"{keys[1]} = {shown_value(family)}"
        errors = np.abs(np.vstack([means - lows, highs - means]))
        axes.errorbar(
            xs,
            means,
            np.nan_to_num(errors),
            **look.line,
            marker=look.marker,
            capsize=3,
            label=label,
        )
    _label_x(axes, rows, first, numeric, places)
    axes.set_ylabel(f"test {metric}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9)
    notes = ["points: mean of the seeds; bars: 95 % interval of the mean"]
    if len(keys) > 2:
        notes.append(f"averaged over {', '.join(keys[2:])}")
    style.panel_title(axes, f"{metric.capitalize()} by {first}", notes)


def _label_x(
    axes: Axes, rows: Sequence[Row], key: str, numeric: bool, places: Mapping[str, int]
) -> None:
    axes.set_xlabel(key)
    if not numeric:
        axes.set_xticks(list(places.values()), list(places))
        return
    values = [value for value in _values(rows, key) if value > 0]
    if len(values) == len(_values(rows, key)) and max(values) / min(values) > _WIDE:
        axes.set_xscale("log")


def _draw_map(axes: Axes, rows: Sequence[Row], across: str, down: str, metric: str) -> None:
    columns, lines = _values(rows, across), _values(rows, down)
    cells = np.full((len(lines), len(columns)), np.nan)
    for i, line in enumerate(lines):
        table = _averaged([r for r in rows if r["values"][down] == line], across)
        for value, mean, *_ in table:
            cells[i, columns.index(value)] = mean
    style.panel_title(axes, f"{metric.capitalize()} by {across} and {down}", ["mean of the seeds"])
    if not np.isfinite(cells).any():
        style.in_words(axes, "nothing was measured")
        return
    axes.grid(False)
    picture = axes.imshow(cells, aspect="auto", cmap="cividis", origin="lower")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for i, j in zip(*np.nonzero(np.isfinite(cells)), strict=True):
        color = "white" if cells[i, j] < middle else "black"
        axes.text(j, i, f"{cells[i, j]:.3f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(columns)), [shown_value(value) for value in columns])
    axes.set_yticks(range(len(lines)), [shown_value(value) for value in lines])
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    axes.figure.colorbar(picture, ax=axes, label=f"test {metric}")


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the values of an option: numbers in order, others as they come."""
    found = list(dict.fromkeys(row["values"][key] for row in rows))
    return sorted(found) if all(_is_number(value) for value in found) else found


def _averaged(rows: Sequence[Row], key: str) -> list[tuple[Any, float, float, float]]:
    """Return (value, mean, low, high) by the value of an option, averaged over the rest."""
    table = []
    for value in _values(rows, key):
        own = [r for r in rows if r["values"][key] == value and r["mean"] is not None]
        if own:
            means = float(np.mean([row["mean"] for row in own]))
            alone = len(own) == 1 and own[0]["low"] is not None
            low, high = (own[0]["low"], own[0]["high"]) if alone else (math.nan, math.nan)
            table.append((value, means, low, high))
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
