"""Runs laid together: seeds of one configuration in a series, series of one promise on a level.

Two runs are seeds of one another when their configurations differ in nothing but the seed and
where things lie.  Two series stand on one level when they promise every client the same: only
there is accuracy a fair comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from fedquilt.common.bounds import format_bound
from fedquilt.common.errors import InvalidValueError
from fedquilt.config.modes import MODE_TABLE
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.report.comparison import NO_GUARANTEE
from fedquilt.report.series import as_number
from fedquilt.report.statistics import Paired, Spread, paired, spread

SAME_EXPERIMENT = frozenset(option_names(Flag.EXECUTION) + option_names(Flag.REPETITION))
"""Options that make no other experiment."""
SAME_EPSILON = 0.02
"""Two bounds that differ by no more than this share are the same promise."""
UNFINISHED = "not finished: nothing is claimed yet"


@dataclass(frozen=True, eq=False)
class Entry:
    """What is compared of a run: who it is, how it went, what it claims."""

    name: str
    mode: str
    dataset: str
    seed: int
    settings: Mapping[str, Any]
    rounds: Sequence[float]
    accuracy: Sequence[float | None]
    loss: Sequence[float | None]
    epsilon: float | None
    delta: float | None
    adjacency: str
    unit: str = "client"

    @property
    def final(self) -> float | None:
        """The last accuracy, None when it is no number."""
        value = as_number(self.accuracy[-1]) if len(self.accuracy) else math.nan
        return value if math.isfinite(value) else None


@dataclass(eq=False)
class RunSeries:
    """The seeds of one configuration."""

    label: str
    mode: str
    members: list[int]
    entries: list[Entry]
    spread: Spread
    epsilon: float | None
    delta: float | None
    claim: str
    adjacency: str
    curve: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def by_seed(self) -> dict[int, float | None]:
        """Final accuracy of every seed."""
        return {entry.seed: entry.final for entry in self.entries}


@dataclass(frozen=True)
class Level:
    """Series that promise the same."""

    heading: str
    series: tuple[int, ...]


def entry_of_result(result: Mapping[str, Any], name: str = "") -> Entry:
    """Read a result.json."""
    try:
        metadata, history, statement = result["metadata"], result["history"], result["statement"]
        return Entry(
            name=name,
            mode=str(result["mode"]),
            dataset=str(metadata.get("dataset")),
            seed=int(metadata["seed"]),
            settings=dict(metadata.get("hyperparameters") or {}),
            rounds=list(history.get("evaluation_rounds") or ()),
            accuracy=list(history.get("test_accuracy") or ()),
            loss=list(history.get("test_loss") or ()),
            epsilon=float(statement["epsilon_max"]),
            delta=float(statement["delta"]),
            adjacency=str(statement["adjacency"]),
            unit=str(statement.get("unit") or "client"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"run {name!r} must hold a result of fedquilt: {error}") from error


def entry_of_view(view: Mapping[str, Any]) -> Entry:
    """Read a run as `fedquilt.report.views.run_view` gives it."""
    claim = view["claim"]
    return Entry(
        name=view["name"],
        mode=view["mode"],
        dataset=view["dataset"],
        seed=view["seed"],
        settings={option: value for option, value, _ in view["config"]},
        rounds=view["accuracy"]["rounds"],
        accuracy=view["accuracy"]["values"],
        loss=view["accuracy"]["loss"],
        epsilon=None if claim["epsilon_max"] is None else float(claim["epsilon_max"]),
        delta=claim["delta"],
        adjacency=claim.get("adjacency", ""),
    )


def lay_together(entries: Sequence[Entry]) -> list[RunSeries]:
    """Return the series, least private mode first, each with its seeds in order."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        groups.setdefault(_identity(entry), []).append(index)
    order = {name: place for place, name in enumerate(MODE_TABLE)}
    ranked = sorted(
        groups.values(), key=lambda ids: (order.get(entries[ids[0]].mode, len(order)), ids[0])
    )
    series = []
    for members in ranked:
        members.sort(key=lambda index: entries[index].seed)
        series.append(_series(members, [entries[index] for index in members]))
    _name(series)
    return series


def _identity(entry: Entry) -> tuple[str, ...]:
    told = (f"{k}={v}" for k, v in sorted(entry.settings.items()) if k not in SAME_EXPERIMENT)
    return entry.mode, entry.dataset, *told


def _series(members: list[int], own: list[Entry]) -> RunSeries:
    epsilon = None if any(e.epsilon is None for e in own) else max(e.epsilon or 0.0 for e in own)
    deltas = [entry.delta for entry in own if entry.delta is not None]
    delta = max(deltas) if deltas else None
    adjacency = " or ".join(sorted({entry.adjacency for entry in own if entry.adjacency}))
    return RunSeries(
        label=own[0].mode,
        mode=own[0].mode,
        members=members,
        entries=own,
        spread=spread([entry.final for entry in own]),
        epsilon=epsilon,
        delta=delta,
        claim=_claim(epsilon, delta, adjacency, own[0].unit),
        adjacency=adjacency,
        curve=_curve(own),
    )


def _claim(epsilon: float | None, delta: float | None, adjacency: str, unit: str) -> str:
    if epsilon is None:
        return UNFINISHED
    if not math.isfinite(epsilon) or delta is None:
        return NO_GUARANTEE
    stated = f"ε ≤ {format_bound(epsilon)} for every {unit}, δ = {format_bound(delta, 6)}"
    return f"{stated}, {adjacency}" if adjacency else stated


def _curve(own: Sequence[Entry]) -> dict[str, list[Any]]:
    """Return mean, lowest and highest accuracy and mean loss where all seeds have both."""
    tables = [
        {
            round_: (as_number(accuracy), as_number(loss))
            for round_, accuracy, loss in zip(
                e.rounds, e.accuracy, [*e.loss, *[None] * len(e.rounds)], strict=False
            )
        }
        for e in own
    ]
    shared = sorted(set(tables[0]).intersection(*tables[1:])) if tables else []
    values = np.asarray([[t[r][0] for r in shared] for t in tables]).reshape(len(tables), -1)
    losses = np.asarray([[t[r][1] for r in shared] for t in tables]).reshape(len(tables), -1)
    return {
        "rounds": list(shared),
        "mean": _plain(values.mean(axis=0)),
        "low": _plain(values.min(axis=0)),
        "high": _plain(values.max(axis=0)),
        "loss": _plain(losses.mean(axis=0)),
    }


def _plain(values: Any) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]


def _name(series: Sequence[RunSeries]) -> None:
    """Name each series by its mode and what tells it from others of the mode."""
    for one in series:
        settings = [dict(s.entries[0].settings) for s in series if s.mode == one.mode]
        differing = [
            key
            for key in settings[0]
            if key not in SAME_EXPERIMENT and len({str(s.get(key)) for s in settings}) > 1
        ]
        method = one.entries[0].settings.get("method", "full")
        parts = [f"{key}={one.entries[0].settings.get(key)}" for key in differing]
        if method not in ("full", "condense") and "method" not in differing:
            parts.insert(0, str(method))
        datasets = {s.entries[0].dataset for s in series}
        if len(datasets) > 1 and "dataset" not in differing:
            parts.insert(0, one.entries[0].dataset)
        one.label = ", ".join([one.mode, *parts])


def levels(series: Sequence[RunSeries]) -> list[Level]:
    """Put series that promise the same on one level: strongest promise first, none last."""
    bounded = [
        i for i, s in enumerate(series) if s.epsilon is not None and math.isfinite(s.epsilon)
    ]
    bounded.sort(key=lambda i: (series[i].epsilon, series[i].delta, series[i].adjacency))
    found: list[list[int]] = []
    for index in bounded:
        home = next((own for own in found if _same(series[own[0]], series[index])), None)
        if home is None:
            found.append([index])
        else:
            home.append(index)
    named = [Level(_heading([series[i] for i in own]), tuple(own)) for own in found]
    unbounded = tuple(i for i, s in enumerate(series) if s.epsilon == math.inf)
    running = tuple(i for i, s in enumerate(series) if s.epsilon is None)
    others = (Level("No guarantee (ε = ∞)", unbounded), Level("Not finished", running))
    return named + [level for level in others if level.series]


def _same(first: RunSeries, second: RunSeries) -> bool:
    assert first.epsilon is not None
    assert second.epsilon is not None
    near = abs(first.epsilon - second.epsilon) <= SAME_EPSILON * first.epsilon
    return near and first.delta == second.delta and first.adjacency == second.adjacency


def _heading(own: Sequence[RunSeries]) -> str:
    worst = max(one.epsilon or 0.0 for one in own)
    delta = format_bound(own[0].delta or 0.0, 6)
    return f"Every client: ε ≤ {format_bound(worst)} at δ = {delta}, {own[0].adjacency}"


def differences(series: Sequence[RunSeries], most: int = 30) -> list[tuple[int, int, Paired]]:
    """Compare series seed by seed, those that share two seeds or more."""
    found = []
    for first, second in combinations(range(len(series)), 2):
        compared = paired(series[first].by_seed, series[second].by_seed)
        if len(compared.seeds) > 1:
            found.append((first, second, compared))
    return found[:most]
