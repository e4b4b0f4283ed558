"""Which points a sweep has: a grid over options, or draws from ranges, times the seeds."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import shortened
from fedquilt.common.randomness import generator
from fedquilt.common.schema import COUNT, NAME, Anything, ListOf, Object, check
from fedquilt.common.storage import check_own_folder, write_file
from fedquilt.common.untrusted import TABLE_BYTES, read_json
from fedquilt.config import CondenseConfig, RunConfig, option_fields, plain_config
from fedquilt.config.files import method_defaults, require_two_clients
from fedquilt.config.option import CLIENTS, SPLIT, kinds_of
from fedquilt.config.run import old_names
from fedquilt.config.uses import reject_unused
from fedquilt.record.schema import check_schema, readable

SCHEMA_VERSION = 1
SPEC_FILE = "sweep.json"
RUNS = "points"
_OWN = ("seed", "output_dir")
_MOST_POINTS = 100_000


@dataclass(frozen=True)
class SweepAxis:
    """An option and its values, or the range it is drawn from (`scale` linear, log or int)."""

    key: str
    values: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    scale: str = "linear"

    @property
    def is_range(self) -> bool:
        """Whether values are drawn."""
        return self.low is not None

    def draw(self, source: np.random.Generator) -> Any:
        """Return one value."""
        if not self.is_range:
            return self.values[int(source.integers(len(self.values)))]
        assert self.low is not None
        assert self.high is not None
        if self.scale == "int":
            return int(source.integers(int(self.low), int(self.high) + 1))
        share = float(source.random())
        if self.scale == "log":
            return float(math.exp(math.log(self.low) + share * math.log(self.high / self.low)))
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    number: int
    settings: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """Its folder below the sweep's."""
        return f"{RUNS}/{self.number:05d}"


@dataclass(frozen=True)
class Plan:
    """A sweep before anything runs: the common configuration, the axes, the points."""

    base: dict[str, Any]
    axes: tuple[str, ...]
    points: tuple[Point, ...]

    def config(self, point: Point, folder: Path) -> RunConfig:
        """Return the configuration of a point that runs below a sweep's folder."""
        own = {"seed": point.seed, "output_dir": str(folder / point.name)}
        return plain_config({**self.base, **point.settings, **own})

    def write(self, folder: Path) -> None:
        """Write the plan into the sweep's folder."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "base": self.base,
            "axes": list(self.axes),
            "points": [[p.settings, p.seed] for p in self.points],
        }
        write_file(folder / SPEC_FILE, json.dumps(content, indent=1).encode())

    def ledgers(self, points: Iterable[Point]) -> list[str]:
        """Return the ledgers that outlive the runs of these points, each once."""
        named = [{**self.base, **point.settings}.get("ledger") for point in points]
        return list(dict.fromkeys(ledger for ledger in named if isinstance(ledger, str)))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read the plan of a sweep's folder, which somebody else may have written."""
        path = folder / SPEC_FILE
        with readable(folder):
            there = path.is_file()
        if not there:
            raise RunFolderError(f"sweep {str(folder)!r} must be a folder with a {SPEC_FILE}")
        content = read_json(path, RunFolderError, TABLE_BYTES)
        check_schema(content, path, SCHEMA_VERSION)
        check(content, _PLAN, path, RunFolderError)
        axes = tuple(content["axes"])
        if len(set(axes)) < len(axes) or not set(axes) <= _AXES:
            raise RunFolderError(f"{path}: axes={shortened(axes)} must be options, each once")
        if not 1 <= len(content["points"]) <= _MOST_POINTS:
            raise RunFolderError(f"{path}: points must be 1 to {_MOST_POINTS}")
        points = [
            _point(number, entry, axes, path) for number, entry in enumerate(content["points"])
        ]
        return cls(content["base"], axes, tuple(points))


_AXES = {*option_fields(CondenseConfig), *old_names(CondenseConfig)} - {*_OWN}
_PLAN = Object({"base": Object({}), "axes": ListOf(NAME), "points": ListOf(ListOf(Anything()))})
_PARTS = ("settings", "seed", "baselines")  # the last one of older versions, and ignored
_POINT = Object({"settings": Object({}), "seed": COUNT}, {"baselines": ListOf(NAME)})


def _point(number: int, entry: list[Any], axes: Sequence[str], path: Path) -> Point:
    """Return a point as the plan's file has it: settings and seed."""
    where = f"{path}: point {number}"
    parts = dict(zip(_PARTS, entry, strict=False))
    check(parts, _POINT, where, RunFolderError)
    if len(entry) > len(_PARTS) or not {*axes} <= parts["settings"].keys():
        raise RunFolderError(f"{where} must have settings of all axes, and a seed")
    return Point(number, parts["settings"], parts["seed"])


def begun_runs(place: Path) -> list[Path]:
    """Return the folders of runs that were begun for a point, all of them the sweep's own."""
    for folder in (place.parent, place):
        check_own_folder(folder)
    with readable(place):
        begun = sorted(path.parent for path in place.glob("*/config.toml"))
    for folder in begun:
        check_own_folder(folder)
    return begun


def parse_axis(text: str, kind: type[RunConfig] = RunConfig) -> SweepAxis:
    """Read `key=a,b,c`, or `key=low:high`, `key=low:high:log`, `key=low:high:int`.

    >>> parse_axis("epsilon=1,2.5").values
    (1.0, 2.5)
    >>> parse_axis("learning_rate=0.01:1:log").scale
    'log'
    """
    key, sign, rest = text.partition("=")
    key = key.strip().replace("-", "_")
    fields = option_fields(kind)
    key = old_names(kind).get(key, key)
    checks.choice("key of the sweep", key, [name for name in fields if name not in _OWN])
    if not sign or not rest.strip():
        raise InvalidValueError(f"{text!r} must be key=value,value or key=low:high")
    kinds = kinds_of(kind)[key]
    if ":" in rest and kinds & {int, float}:
        return _range(key, rest, whole=float not in kinds)
    values = tuple(_value(key, part.strip(), kinds) for part in rest.split(","))
    if len(set(map(str, values))) != len(values):
        raise InvalidValueError(f"{text!r} must not repeat a value")
    return SweepAxis(key, values)


def _range(key: str, text: str, *, whole: bool) -> SweepAxis:
    low, _, rest = text.partition(":")
    high, _, scale = rest.partition(":")
    scale = checks.choice(f"scale of {key}", scale or ("int" if whole else "linear"), _SCALES)
    try:
        first, last = float(low), float(high)
    except ValueError:
        raise InvalidValueError(f"{key}={text!r} must be low:high") from None
    if not first < last or (scale == "log" and first <= 0):
        raise InvalidValueError(f"{key}={text!r} must rise, and a log scale begins above 0")
    return SweepAxis(key, low=first, high=last, scale=scale)


_SCALES = ("linear", "log", "int")
_TRUTH = {"true": True, "false": False}


def _value(key: str, text: str, kinds: frozenset[type]) -> Any:
    """Read a value as the option's type wants it."""
    if text.lower() == "none" and type(None) in kinds:
        return None
    if bool in kinds:
        return _TRUTH[checks.choice(key, text.lower(), list(_TRUTH))]
    try:
        if int in kinds and not (float in kinds and "." in text):
            return int(text)
        return float(text) if float in kinds else text
    except ValueError:
        raise InvalidValueError(f"{key}={text!r} must be a number") from None


def make_plan(
    base: Mapping[str, Any],
    axes: Sequence[SweepAxis],
    seeds: Sequence[int],
    *,
    samples: int | None = None,
    sweep_seed: int = 0,
    said: Collection[str] = (),
) -> Plan:
    """Return the points of a grid or, with `samples`, of so many draws, each with every seed.

    Every point's configuration is checked here, before anything runs.

    Parameters
    ----------
    base
        The settings that all points share, complete; those of axes are not looked at.
    axes
        What is varied: each must do something in at least one point.
    seeds
        Of the runs.
    samples, sweep_seed
        How many points to draw instead of all of the grid, and with which seed.
    said
        Options that somebody named: a point whose method is another than the base's has its
        method's own defaults (`method_defaults`) for the rest, as `fedquilt run` would.
    """
    keys = [axis.key for axis in axes]
    chosen = [
        {**_of_method(base, settings, {*said, *keys}), **settings}
        for settings in choose(axes, samples, sweep_seed)
    ]
    checks.integer("points", len(chosen) * len(seeds), at_least=1, at_most=_MOST_POINTS)
    plain = {key: value for key, value in base.items() if key not in (*_OWN, *keys)}
    pairs = [(settings, seed) for settings in chosen for seed in seeds]
    points = [Point(i, settings, seed) for i, (settings, seed) in enumerate(pairs)]
    runs = []
    for settings in chosen:
        config = plain_config({**plain, **settings, "seed": seeds[0]})
        require_two_clients(config)
        runs.append({**config.as_dict(), CLIENTS: SPLIT})
    reject_unused({axis.key: axis.values or (axis.low, axis.high) for axis in axes}, runs)
    return Plan(plain, tuple(keys), tuple(points))


def _of_method(
    base: Mapping[str, Any], settings: Mapping[str, Any], said: Collection[str]
) -> dict[str, Any]:
    """Return a point's defaults by its method that are not the base's."""
    whole = {**base, **settings}
    own = method_defaults(whole.get("method"), whole.get("mode"))
    return {k: v for k, v in own.items() if k not in said and base.get(k) != v}


def choose(
    axes: Sequence[SweepAxis], samples: int | None = None, sweep_seed: int = 0
) -> list[dict[str, Any]]:
    """Return what differs between the points: every combination, or so many draws."""
    keys = [axis.key for axis in axes]
    if not axes or len(set(keys)) != len(keys):
        raise InvalidValueError(f"axes={keys!r} must name at least one option, each once")
    if samples is None:
        drawn = [axis.key for axis in axes if axis.is_range]
        if drawn:
            raise InvalidValueError(f"{drawn[0]} is a range: say how many samples to draw")
        count = math.prod(len(axis.values) for axis in axes)
        checks.integer("points", count, at_most=_MOST_POINTS)
        combined = itertools.product(*(axis.values for axis in axes))
        return [dict(zip(keys, values, strict=True)) for values in combined]
    checks.integer("samples", samples, at_least=1, at_most=_MOST_POINTS)
    source = generator(sweep_seed, "sweep")
    return [{axis.key: axis.draw(source) for axis in axes} for _ in range(samples)]
