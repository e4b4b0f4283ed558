"""Runs side by side: seeds of one configuration in a series, series of one promise on a level.

Two runs are repetitions when they differ in the seed, and in nothing else but how and where they
were computed: same configuration, same structure of the model, same code that a user brought
(`metadata.parts`) and, where the folder of the owner is at hand, the same that it computes with
(`held` of clients.json).  A seed that ran twice is no second repetition, and neither is a run of
somebody's own model on a ledger that has an earlier one: it may continue that one.  It does where
it begins with the weights that the other ended with.  Where a seed
of somebody's own parts or data stands twice in what cannot be told apart, there are two experiments
and nobody knows whose the other seeds are: none of them is averaged.  Two series
stand on one level when they were asked for the same promise: only there is the headline metric a
fair comparison.

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
from fedquilt.config import CondenseConfig, option_fields, package_names
from fedquilt.config.modes import MODE_TABLE, RECIPE_SETS, recipe_line
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.report.series import Array, aligned, as_number, column, headline, in_title, is_absent

SAME_EXPERIMENT = frozenset(option_names(Flag.EXECUTION) + option_names(Flag.REPETITION))
"""Options that make no other experiment."""
SAME_EPSILON = 0.02
"""Two bounds that differ by no more than this share are the same promise."""
RECIPE = "recipe"
UNFINISHED = "not finished: nothing is claimed yet"
NO_GUARANTEE = "no guarantee (ε = ∞)"
CONFIDENCE = 0.95
LEAST_SEEDS = 3
"""Two values say next to nothing about their mean: an interval begins with three."""
_OWN_MODEL = "custom"
_SHARES = ("accuracy", "auroc", "f1", "top_")
"""How the names of metrics begin that lie between 0 and 1, and are better the larger."""


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


def is_share(metric: str) -> bool:
    """Tell whether a metric lies between 0 and 1, and is better the larger it is."""
    return metric.removeprefix("test_").startswith(_SHARES)


def spread(
    values: Sequence[float | None], confidence: float = CONFIDENCE, *, share: bool = False
) -> Spread:
    """Return what finite values say about their mean; others are not in it.

    The interval needs `LEAST_SEEDS` values; that of a `share` ends at 0 and at 1.

    >>> found = spread([0.5, 0.7, 0.9], share=True)
    >>> round(found.mean, 6), round(found.sd, 6), round(found.low, 6), round(found.high, 6)
    (0.7, 0.2, 0.203172, 1.0)
    """
    finite = np.asarray([v for v in values if v is not None and math.isfinite(v)])
    if not finite.size:
        return Spread(0, None, None, None, None)
    mean = float(finite.mean())
    if finite.size < 2:
        return Spread(1, mean, None, None, None)
    sd = float(finite.std(ddof=1))
    if finite.size < LEAST_SEEDS:
        return Spread(int(finite.size), mean, sd, None, None)
    from scipy.stats import t

    quantile = float(t.ppf((1 + confidence) / 2, finite.size - 1))
    half = quantile * sd / math.sqrt(finite.size)
    low, high = mean - half, mean + half
    if share:
        low, high = max(0.0, low), min(1.0, high)
    return Spread(int(finite.size), mean, sd, low, high)


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
    "test_accuracy"; `history` holds it and the test loss, at `evaluation_rounds`.  `parts`
    and `held` are digests of what the configuration does not name, `data` one of clients and
    tests, `begins` and `ends` of its first and last weights, `population` the one of a shared
    ledger.
    `epsilon` is None before the end of the run.
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
    parts: str = ""
    held: str = ""
    data: str = ""
    begins: str = ""
    ends: str = ""
    population: str | None = None
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
    def looks_as(self) -> str:
        """What `identities` goes by: the mode, with more behind a colon where the label has it."""
        plain = self.label.removesuffix(f", {RECIPE}") == self.mode
        return self.mode if plain else f"{self.mode}:{self.label}"

    @property
    def metric_name(self) -> str:
        """The headline metric for a heading, such as "Accuracy"."""
        return in_title(self.metric)

    def curve(self, key: str | None = None) -> tuple[Array, Array, str]:
        """Return (rounds, a row of values for each seed, axis): the headline metric, or `key`.

        Runs with windows write a line a release, drawn at the last round of its window.
        """
        at, values, axis = aligned([entry.history for entry in self.entries], key or self.metric)
        said = (self.entries[0].settings.get(x) for x in ("rounds_per_release", "num_rounds"))
        window, last = map(as_number, said)
        return (np.fmin(at * window, last) if window > 1 else at), values, axis


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
            settings=package_names(CondenseConfig, _settings(result)),
            history=dict(history),
            epsilon=epsilon if epsilon >= 0 else math.inf,
            delta=delta if math.isfinite(delta) else None,
            adjacency=str(statement.get("adjacency") or ""),
            unit=str(statement.get("unit") or "client"),
            stated=metadata.get("final_accuracy"),
            parts=parts_of(result),
            held=str(result.get("held") or ""),
            data=str(result.get("data") or ""),
            begins=str(result.get("begins") or ""),
            ends=str(result.get("ends") or ""),
            population=_population(result),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidValueError(f"run {name!r} must hold a result of fedquilt: {error}") from error


def parts_of(result: Mapping[str, Any]) -> str:
    """Return the digest of what a configuration does not name; "" where that is not known.

    Older runs did not record it: of somebody's own model the names of the tensors are known.
    """
    recorded = result["metadata"].get("parts")
    settings, statement = _settings(result), result.get("statement") or {}
    if recorded or settings.get("model") != _OWN_MODEL:
        return str(recorded or "")
    tensors = [*(statement.get("covered") or ()), *(statement.get("uncovered") or ())]
    return ", ".join(sorted(map(str, tensors)))


def _settings(result: Mapping[str, Any]) -> Mapping[str, Any]:
    return result["metadata"].get("hyperparameters") or {}


def _population(result: Mapping[str, Any]) -> str | None:
    shared = _settings(result).get("ledger") is not None
    return str((result.get("ledger") or {}).get("population")) if shared else None


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
        parts=view.get("parts") or "",
        held=view.get("held") or "",
        data=view.get("data") or "",
        begins=view.get("begins") or "",
        ends=view.get("ends") or "",
        population=view.get("population"),
    )


def entries_of(results: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    """Return what is compared of results, by their names."""
    return [entry_of_result(result, name) for name, result in results.items()]


def series_of(results: Sequence[Mapping[str, Any]]) -> list[RunSeries]:
    """Return the series of results in a list; their members are places in it."""
    return group_by_config(entries_of({str(i): result for i, result in enumerate(results)}))


def group_by_config(entries: Sequence[Entry]) -> list[RunSeries]:
    """Return the series, least private mode first, each with its seeds in order."""
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    # Those whose parts are not known, such as runs that go on, come to the others afterwards.
    known = sorted(range(len(entries)), key=lambda i: (not entries[i].parts, not entries[i].held))
    earlier = earlier_runs([(entry.begins, entry.ends) for entry in entries])
    for index in known:
        entry, mixed = entries[index], _is_mixed(entries[index], entries)
        alike = groups.setdefault(_identity(entry), [])
        apart = (own for own in alike if not any(_continues(earlier, index, i) for i in own))
        homes = (own for own in apart if _repeats(entry, [entries[i] for i in own], mixed=mixed))
        home = next(homes, None)
        if home is None:
            alike.append([index])
        else:
            home.append(index)
    order = {name: place for place, name in enumerate(MODE_TABLE)}
    ranked = sorted(
        (members for alike in groups.values() for members in alike),
        key=lambda ids: (order.get(entries[ids[0]].mode, len(order)), ids[0]),
    )
    series = []
    for members in ranked:
        members.sort(key=lambda index: entries[index].seed)
        series.append(_series(members, [entries[index] for index in members]))
    _name(series)
    return series


def earlier_runs(weights: Sequence[tuple[str, str]]) -> list[set[int]]:
    """Return the runs that each one goes on from, directly or through others.

    `weights` has for each run a digest of those it began with and of those it ended with, ""
    where they are not known.

    >>> earlier_runs([("a", "b"), ("b", "c"), ("c", "d"), ("", "")])
    [set(), {0}, {0, 1}, set()]
    """
    ended: dict[str, list[int]] = {}
    for place, (_, end) in enumerate(weights):
        ended.setdefault(end, []).append(place)
    found = []
    for place, (begin, _) in enumerate(weights):
        before: set[int] = set()
        asked = [begin]
        while asked:
            wanted = asked.pop()
            new = set(ended.get(wanted, ()) if wanted else ()) - before - {place}
            before |= new
            asked += [weights[run][0] for run in new]
        found.append(before)
    return found


def _continues(earlier: Sequence[set[int]], first: int, second: int) -> bool:
    return first in earlier[second] or second in earlier[first]


def _identity(entry: Entry) -> tuple[str, ...]:
    told = (f"{k}={v}" for k, v in sorted(entry.settings.items()) if k not in SAME_EXPERIMENT)
    return entry.mode, entry.dataset, *told


def _repeats(entry: Entry, others: Sequence[Entry], *, mixed: bool) -> bool:
    """Tell whether a run is one more repetition of others of its configuration.

    Where two experiments are `mixed`, only the same clients and tests make it one.
    """
    if mixed and any(not entry.data or other.data != entry.data for other in others):
        return False
    if not _same_code(entry, others) or any(entry.seed == other.seed for other in others):
        return False
    may_continue = entry.population is not None and entry.settings.get("model") == _OWN_MODEL
    return not (may_continue and any(entry.population == other.population for other in others))


def _same_code(entry: Entry, others: Sequence[Entry]) -> bool:
    """Tell whether nothing that is known tells the parts of a run from those of others."""
    runs = (entry, *others)
    digests = {one.parts for one in runs} - {""}, {one.held for one in runs} - {""}
    return all(len(found) <= 1 for found in digests)


def _is_mixed(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Tell whether a seed of somebody's own stands twice in what cannot be told from this run."""
    if _OWN_MODEL not in map(str, entry.settings.values()):
        return False
    same = [one for one in entries if _identity(one) == _identity(entry)]
    alike: dict[int, set[Any]] = {}
    for one in same:
        if _same_code(entry, [one]):
            alike.setdefault(one.seed, set()).add(one.data or one.final)
    return any(len(found) > 1 for found in alike.values())


def _series(members: list[int], own: list[Entry]) -> RunSeries:
    epsilon = None if any(e.epsilon is None for e in own) else max(e.epsilon or 0.0 for e in own)
    deltas = [entry.delta for entry in own if entry.delta is not None]
    delta = max(deltas) if deltas else None
    adjacency = " or ".join(sorted({entry.adjacency for entry in own if entry.adjacency}))
    unit = " or ".join(sorted({entry.unit for entry in own}))
    begun = [e for e in own if not is_absent(e.history, e.metric)]  # others are not evaluated yet
    metric = (begun or own)[0].metric
    ended = [entry for entry in own if entry.epsilon is not None]
    return RunSeries(
        label=own[0].mode,
        mode=own[0].mode,
        metric=metric,
        members=members,
        entries=own,
        spread=spread([entry.final for entry in ended or own], share=is_share(metric)),
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
    """Name each series by its mode and what tells it from others of the mode.

    A choice that is the default goes without saying: certified beside certified,
    policy=worst_case.
    """
    declared = option_fields(CondenseConfig)
    for one in series:
        settings = [dict(s.entries[0].settings) for s in series if s.mode == one.mode]
        differing = [
            key
            for key in settings[0]
            if key not in SAME_EXPERIMENT and len({str(s.get(key)) for s in settings}) > 1
        ]
        own = one.entries[0].settings
        by_hand = [made for made in settings if not _follows_recipe(made)]
        follows = _follows_recipe(own) and RECIPE_SETS & {*differing} and by_hand
        if 0 < len(by_hand) < len(settings):  # what the recipe sets follows from the rest
            differing = [
                key
                for key in differing
                if key not in RECIPE_SETS
                or (not follows and len({str(made.get(key)) for made in by_hand}) > 1)
            ]
        parts = [RECIPE] * bool(follows) + [
            f"{key}={own.get(key)}"
            for key in differing
            if key != "method" and not _goes_without_saying(declared.get(key), own.get(key))
        ]
        method = own.get("method") or "full"
        if method not in ("full", "condense") or ("method" in differing and method != "full"):
            parts.insert(0, str(method))
        datasets = {s.entries[0].dataset for s in series}
        if len(datasets) > 1 and "dataset" not in differing:
            parts.insert(0, one.entries[0].dataset)
        one.label = ", ".join([one.mode, *parts])
    for one in series:
        alike = [other for other in series if other.label == one.label]
        if len(alike) > 1:
            for number, other in enumerate(alike, 1):
                other.label = f"{other.label} [{number}]"


def _follows_recipe(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings, which pages have as texts, are those of the recipe."""
    read = {key: as_number(value) for key, value in settings.items()}
    known = {
        key: settings[key] if math.isnan(x) else int(x) if x.is_integer() else x
        for key, x in read.items()
        if settings[key] != "-"
    }
    return recipe_line(known) is not None


def _goes_without_saying(option: Any, value: Any) -> bool:
    """Tell whether a value is the default of an option that is a choice of words."""
    return bool(option and option.metadata["rule"].get("choices") and value == option.default)


def levels(series: Sequence[RunSeries]) -> list[PrivacyLevel]:
    """Put series that were asked for the same promise on one level, best first.

    The strongest promise comes first, those without one last.
    """
    found: dict[tuple[float, float, str], list[int]] = {}
    for index, one in enumerate(series):
        if one.epsilon is not None and one.delta is not None and math.isfinite(one.epsilon):
            near = (asked_epsilon(one), one.delta, one.adjacency)
            home = next((key for key in found if _same(key, near)), near)
            found.setdefault(home, []).append(index)
    named = [
        PrivacyLevel(_heading(key), tuple(sorted(own, key=lambda i: rank(series[i]))))
        for key, own in sorted(found.items())
    ]
    inside = {index for level in named for index in level.series}
    running = tuple(i for i, s in enumerate(series) if s.epsilon is None)
    unbounded = tuple(i for i in range(len(series)) if i not in inside and i not in running)
    others = (("No guarantee (ε = ∞)", unbounded), ("Not finished", running))
    return named + [PrivacyLevel(heading, own) for heading, own in others if own]


def asked_epsilon(one: RunSeries) -> float:
    """Return the epsilon that was asked for, or the one that was reached where that is more.

    Only in `certified` is what was asked a promise; the documents' epsilon is a setting of noise.
    """
    reached = one.epsilon or 0.0
    if not one.mode.startswith("certified"):
        return reached
    asked = as_number(one.entries[0].settings.get("epsilon"))
    return asked if math.isfinite(asked) and asked >= reached else reached


def rank(one: RunSeries) -> float:
    """Return a number that is smaller the better the headline metric of a series is."""
    if one.spread.mean is None:
        return math.inf
    return -one.spread.mean if is_share(one.metric) else one.spread.mean


def _same(first: tuple[float, float, str], second: tuple[float, float, str]) -> bool:
    return first[1:] == second[1:] and abs(first[0] - second[0]) <= SAME_EPSILON * first[0]


def _heading(promise: tuple[float, float, str]) -> str:
    epsilon, delta, adjacency = promise
    stated = f"Every client: ε ≤ {format_bound(epsilon)} at δ = {format_bound(delta, 6)}"
    return f"{stated}, {adjacency}" if adjacency else stated


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
