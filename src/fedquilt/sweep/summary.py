"""What a sweep found: each setting over its seeds, differences on equal seeds, and the looks.

Every run that has released anything has looked at its clients' data once, finished or not.
Picking the best of them by its results is tuning by looking, which no run's own statement covers:
the summary says how often it was done and what all looks together may have cost a client.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquilt.common.formatting import format_bound
from fedquilt.report.runs import Paired, Spread, paired, spread
from fedquilt.report.views.claim import composed_epsilon
from fedquilt.sweep.plan import Plan
from fedquilt.sweep.table import DONE, FAILED, REFUSED


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
    label = ", ".join(f"{name}={_shown(value)}" for name, value in zip(axes, key, strict=True))
    return Setting(
        label,
        dict(zip(axes, key, strict=True)),
        by_seed,
        spread(list(by_seed.values()), share=metric == "accuracy"),
        max(claimed, default=math.inf),
        sum(row["state"] == REFUSED for row in rows),
        sum(row["state"] == FAILED for row in rows),
    )


def _shown(value: Any) -> str:
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
