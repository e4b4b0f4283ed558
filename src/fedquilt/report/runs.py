"""Runs side by side: seeds of one configuration in a series, series of one promise on a level.

Two runs are seeds of one another when their configurations differ in nothing but the seed and
in how and where they were computed.  Two series stand on one level when they promise every client
the same: only there is the headline metric a fair comparison.

With n values of sample mean m and sample deviation s (divisor n - 1) the interval of the mean is
Student's, m ± t_{n-1, 0.975} s / √n, which holds exactly where seeds scatter normally.  Compared
runs that share seeds share data, split and cohorts: their difference is taken seed by seed, and
the same formula applies to the differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.formatting import format_bound
from fedquilt.config import CondenseConfig, package_names
from fedquilt.config.modes import MODE_TABLE
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.report.series import Array, aligned, as_number, column, headline, in_title, is_absent

SAME_EXPERIMENT = frozenset(option_names(Flag.EXECUTION) + option_names(Flag.REPETITION))
"""Options that make no other experiment."""
SAME_EPSILON = 0.02
"""Two bounds that differ by no more than this share are the same promise."""
UNFINISHED = "not finished: nothing is claimed yet"
NO_GUARANTEE = "no guarantee (ε = ∞)"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Mean, sample deviation and interval of the mean; None where too few values say nothing."""

    count: int
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Paired:
    """A difference on the seeds that two sides share; `p` is of the two-sided t test."""

    seeds: tuple[int, ...]
    spread: Spread
    p: float | None


def spread(values: Sequence[float | None], confidence: float = CONFIDENCE) -> Spread:
    """Return what finite values say about their mean; others are not in it.

    >>> found = spread([0.5, 0.7, 0.9])
    >>> round(found.mean, 6), round(found.sd, 6), round(found.low, 6), round(found.high, 6)
    (0.7, 0.2, 0.203172, 1.196828)
    """
    finite = np.asarray([v for v in values if v is not None and math.isfinite(v)])
    if not finite.size:
        return Spread(0, None, None, None, None)
    mean = float(finite.mean())
    if finite.size < 2:
        return Spread(1, mean, None, None, None)
    from scipy.stats import t

    sd = float(finite.std(ddof=1))
    quantile = float(t.ppf((1 + confidence) / 2, finite.size - 1))
    half = quantile * sd / math.sqrt(finite.size)
    return Spread(int(finite.size), mean, sd, mean - half, mean + half)


def paired(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> Paired:
    """Compare two sides, seed by seed: first minus second on the seeds both have."""
    shared = sorted(seed for seed in first if _finite(first[seed]) and _finite(second.get(seed)))
    found = spread([float(first[s] or 0.0) - float(second[s] or 0.0) for s in shared])
    return Paired(tuple(shared), found, _p_value(found))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _p_value(found: Spread) -> float | None:
    if found.mean is None or found.sd is None:
        return None
    if found.sd == 0:
        return 1.0 if found.mean == 0 else 0.0
    from scipy.stats import t

    statistic = abs(found.mean) / (found.sd / math.sqrt(found.count))
    return float(2 * t.sf(statistic, found.count - 1))


@dataclass(frozen=True, eq=False)
class Entry:
    """What is compared of a run: who it is, how it went, what it claims.

    `metric` is the key of what the run is judged by (`series.headline`), such as
    "test_accuracy"; `history` holds it and the test loss, at `evaluation_rounds`.
    """

    name: str
    mode: str
    dataset: str
    seed: int
    settings: Mapping[str, Any]
    history: Mapping[str, Any]
    epsilon: float | None
    delta: float | None
    adjacency: str
    unit: str = "client"
    stated: float | None = None
    metric: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", headline(self.history))

    @property
    def final(self) -> float | None:
        """The headline metric at the end, None when it is no number."""
        recorded = column(self.history, self.metric)
        last = float(recorded[-1]) if recorded.size else math.nan
        stated = as_number(self.stated) if self.metric == "test_accuracy" else math.nan
        value = stated if math.isfinite(stated) else last
        return value if math.isfinite(value) else None


@dataclass(eq=False)
class RunSeries:
    """The seeds of one configuration, judged by their headline metric."""

    label: str
    mode: str
    metric: str
    members: list[int]
    entries: list[Entry]
    spread: Spread
    epsilon: float | None
    delta: float | None
    claim: str
    adjacency: str

    @property
    def by_seed(self) -> dict[int, float | None]:
        """The headline metric at the end, of every seed."""
        return {entry.seed: entry.final for entry in self.entries}

    @property
    def named(self) -> str:
        """What the series is called, with the number of its seeds."""
        count = len(self.members)
        return self.label if count == 1 else f"{self.label} ({count} seeds)"

    @property
    def metric_name(self) -> str:
        """The headline metric for a heading, such as "Accuracy"."""
        return in_title(self.metric)

    def curve(self, key: str | None = None) -> tuple[Array, Array, str]:
        """Return (rounds, a row of values for each seed, axis): the headline metric, or `key`."""
        return aligned([entry.history for entry in self.entries], key or self.metric)


@dataclass(frozen=True)
class PrivacyLevel:
    """Series that promise the same."""

    heading: str
    series: tuple[int, ...]


def entry_of_result(result: Mapping[str, Any], name: str = "") -> Entry:
    """Read a result.json; what states no bound has none."""
    try:
        metadata, history = result["metadata"], result["history"]
        statement = result.get("statement") or {}
        epsilon, delta = as_number(statement.get("epsilon_max")), as_number(statement.get("delta"))
        return Entry(
            name=name,
            mode=str(result["mode"]),
            dataset=str(metadata.get("dataset")),
            seed=int(metadata["seed"]),
            settings=package_names(CondenseConfig, metadata.get("hyperparameters") or {}),
            history=dict(history),
            epsilon=epsilon if epsilon >= 0 else math.inf,
            delta=delta if math.isfinite(delta) else None,
            adjacency=str(statement.get("adjacency") or ""),
            unit=str(statement.get("unit") or "client"),
            stated=metadata.get("final_accuracy"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"run {name!r} must hold a result of fedquilt: {error}") from error


def entry_of_view(view: Mapping[str, Any]) -> Entry:
    """Read a run as `fedquilt.report.views.run_view` gives it."""
    claim, evaluated = view["claim"], view["evaluation"]
    return Entry(
        name=view["name"],
        mode=view["mode"],
        dataset=view["dataset"],
        seed=view["seed"],
        settings={option: value for option, value, _ in view["config"]},
        history={
            "evaluation_rounds": evaluated["rounds"],
            f"test_{evaluated['metric']}": evaluated["values"],
            "test_loss": evaluated["loss"],
        },
        epsilon=None if claim["epsilon_max"] is None else float(claim["epsilon_max"]),
        delta=claim["delta"],
        adjacency=claim.get("adjacency", ""),
    )


def entries_of(results: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    """Return what is compared of results, by their names."""
    return [entry_of_result(result, name) for name, result in results.items()]


def series_of(results: Sequence[Mapping[str, Any]]) -> list[RunSeries]:
    """Return the series of results in a list; their members are places in it."""
    return group_by_config(entries_of({str(i): result for i, result in enumerate(results)}))


def group_by_config(entries: Sequence[Entry]) -> list[RunSeries]:
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
    unit = " or ".join(sorted({entry.unit for entry in own}))
    begun = [e for e in own if not is_absent(e.history, e.metric)]  # others are not evaluated yet
    return RunSeries(
        label=own[0].mode,
        mode=own[0].mode,
        metric=(begun or own)[0].metric,
        members=members,
        entries=own,
        spread=spread([entry.final for entry in own]),
        epsilon=epsilon,
        delta=delta,
        claim=_claim(epsilon, delta, adjacency, unit),
        adjacency=adjacency,
    )


def _claim(epsilon: float | None, delta: float | None, adjacency: str, unit: str) -> str:
    if epsilon is None:
        return UNFINISHED
    if not math.isfinite(epsilon) or delta is None:
        return NO_GUARANTEE
    stated = f"ε ≤ {format_bound(epsilon)} for every {unit}, δ = {format_bound(delta, 6)}"
    return f"{stated}, {adjacency}" if adjacency else stated


def _name(series: Sequence[RunSeries]) -> None:
    """Name each series by its mode and what tells it from others of the mode."""
    for one in series:
        settings = [dict(s.entries[0].settings) for s in series if s.mode == one.mode]
        differing = [
            key
            for key in settings[0]
            if key not in SAME_EXPERIMENT and len({str(s.get(key)) for s in settings}) > 1
        ]
        own = one.entries[0].settings
        parts = [f"{key}={own.get(key)}" for key in differing if key != "method"]
        method = own.get("method") or "full"
        if method not in ("full", "condense") or ("method" in differing and method != "full"):
            parts.insert(0, str(method))
        datasets = {s.entries[0].dataset for s in series}
        if len(datasets) > 1 and "dataset" not in differing:
            parts.insert(0, one.entries[0].dataset)
        one.label = ", ".join([one.mode, *parts])


def levels(series: Sequence[RunSeries]) -> list[PrivacyLevel]:
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
    named = [PrivacyLevel(_heading([series[i] for i in own]), tuple(own)) for own in found]
    unbounded = tuple(i for i, s in enumerate(series) if s.epsilon == math.inf)
    running = tuple(i for i, s in enumerate(series) if s.epsilon is None)
    others = (
        PrivacyLevel("No guarantee (ε = ∞)", unbounded),
        PrivacyLevel("Not finished", running),
    )
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
    """Compare series of one metric seed by seed, those that share two seeds or more."""
    found = []
    for first, second in combinations(range(len(series)), 2):
        if series[first].metric != series[second].metric:
            continue
        compared = paired(series[first].by_seed, series[second].by_seed)
        if len(compared.seeds) > 1:
            found.append((first, second, compared))
    return found[:most]
