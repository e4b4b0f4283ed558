"""One HTML file of plain data: nothing is fetched, nothing in the data can become a script.

The data go into a block of JSON whose `<`, `>` and `&` are escaped; text reaches the page through
`textContent` and attributes only.  The policy in the page names its one style and its one script
by their hashes, so that even a mistake in that could run nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from fedquilt.common.colors import DARK, LIGHT, identities
from fedquilt.common.formatting import format_bound
from fedquilt.common.spread import LOWER_IS_BETTER, client_spread
from fedquilt.config.modes import mode_colors
from fedquilt.report.clients import client_groups, headline_of_clients
from fedquilt.report.runs import (
    RunSeries,
    asked_epsilon,
    differences,
    entry_of_view,
    group_by_config,
    is_share,
    levels,
    rank,
)
from fedquilt.report.series import shorts

SCRIPTS = (
    *("dom.js", "chart.js", "roster.js", "clients.js", "sections.js"),
    *("ledger.js", "live.js", "main.js"),
)
UNSEEN = (
    "The model grew from that of an earlier run, which is not on this page: what clients gave "
    "away there is not counted."
)
PRIVATE_WARNING = (
    "PRIVATE: this page shows raw measurements and what clients hold. No statement covers them. "
    "It is for the owner of the run: do not pass it on."
)
LEDGER_WARNING = (
    "FOR THE OPERATOR: this page names clients and says when they were charged. Do not pass it on."
)


def html_page(view: Mapping[str, Any], *, title: str | None = None, live: bool = False) -> str:
    """Return the page of what `fedquilt.report.views` has read.

    `live` allows the page to talk to the server it came from, and to nobody else.
    """
    ready = "ledger" in view or "series" in view
    data = dict(view) if ready else with_comparison(view)
    script = f'(() => {{\n"use strict";\n{"".join(_asset(name) for name in SCRIPTS)}}})();'
    style = _palette() + _asset("page.css")
    named = title or _title(data)
    parts = {
        "policy": content_policy(style, script, live=live),
        "title": html.escape(named),
        "style": style,
        "warning": _warning(data),
        "claims": _claims(data),
        "data": embedded(data),
        "script": script,
    }
    pieces = _asset("page.html").split("{{")
    # One pass from left to right: nothing that was put in is looked at again.
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def content_policy(style: str, script: str, *, live: bool) -> str:
    """Return the Content-Security-Policy of a page with this one style and this one script."""
    talks = "; connect-src 'self'" if live else ""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"img-src data:; base-uri 'none'; form-action 'none'{talks}"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON that cannot end the block it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def with_comparison(view: Mapping[str, Any]) -> dict[str, Any]:
    """Add the series, the levels of equal promise and the paired differences to a page's data."""
    entries = [entry_of_view(run) for run in view["runs"]]
    series = group_by_config(entries)
    runs = [dict(run) for run in view["runs"]]
    for place, one in enumerate(series):
        for index in one.members:
            runs[index]["series"] = place
    for run in runs:
        if run.get("tiers"):
            run["tiers"] = {**run["tiers"], "looks": _styles(list(run["tiers"]["widths"]))}
        if run.get("measured"):
            run["measured"] = _measured(run["measured"], run["joins"], run["evaluation"]["metric"])
    looks = _styles([one.looks_as for one in series])
    return {
        **view,
        "runs": runs,
        "series": [{**_plain(one), **look} for one, look in zip(series, looks, strict=True)],
        "levels": [{"heading": one.heading, "series": list(one.series)} for one in levels(series)],
        "pairs": _pairs(series),
        "figures": _figures(view, runs, series) if series else [],
        "tradeoff": _tradeoff(series, looks),
        "lead": _lead(series).members[0] if series else None,
    }


def _figures(
    view: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], series: Sequence[RunSeries]
) -> list[dict[str, str]]:
    """Return the three large figures of a page: how good, how private, who joined."""
    lead = _lead(series)
    own = [runs[member] for member in lead.members]
    named = f"{lead.label}: " if len(series) > 1 else ""
    together, mine = view.get("together") or (), set(lead.members)
    claim = _claim_figure(together, lead.members, own, named)
    related = mine.union(*(one["members"] for one in together if mine & set(one["members"])))
    if claim["kind"] == "kept" and any(runs[place].get("unseen") for place in related):
        claim["text"] += f" {UNSEEN}"
        claim["kind"] = "open"
    return [_metric_figure(lead, own, named), claim, _joined_figure(own, named)]


def _lead(series: Sequence[RunSeries]) -> RunSeries:
    """Return whom the first screen speaks of: the best series that bounds anything, or the best."""
    bounded = [s for s in series if s.epsilon is not None and math.isfinite(s.epsilon)]
    ended = [s for s in series if s.epsilon is not None]
    return min(bounded or ended or series, key=rank)


def _metric_figure(one: RunSeries, own: Sequence[Mapping[str, Any]], named: str) -> dict[str, str]:
    found = one.spread
    digits = ".4f" if is_share(one.metric) else ".4g"
    shown = "-" if found.mean is None else f"{found.mean:{digits}}"
    seeds = f"mean of {found.count} seeds" if found.count > 1 else "one seed"
    spread = "" if found.sd is None else f" ±\u00a0{found.sd:{digits}} (standard deviation)"
    first = own[0]
    done = f"{first['rounds']} rounds"
    if not first.get("finished", True):
        done = f"round {first['rounds']} of {first['planned']}"
    text = f"{named}{seeds}{spread}, after {done}"
    name = f"Test {in_sentence(one.metric_name)}"
    if not any(entry.history.get(entry.metric) for entry in one.entries):
        name, text = "Not measured", f"{named}no measure on test data, after {done}"
    return {
        "name": name,
        "figure": shown,
        "text": text,
        "kind": "",
    }


def in_sentence(name: str) -> str:
    """Return the name of a metric inside a sentence: accuracy, but MSE."""
    return name.lower() if name[1:].islower() or " " in name else name


def _claim_figure(
    together: Sequence[Mapping[str, Any]],
    members: Sequence[int],
    own: Sequence[Mapping[str, Any]],
    named: str,
) -> dict[str, str]:
    """Return what may be claimed of these runs: together with those that they share clients with.

    What other runs of the page claim together says nothing of them.
    """
    whole = _worst_together([one for one in together if set(members) & set(one["members"])])
    inside = () if whole is None else whole["members"]
    alone = [run["claim"] for i, run in zip(members, own, strict=True) if i not in inside]
    claim = max(alone or [run["claim"] for run in own], key=_given_away)
    if whole is not None and (not alone or float(whole["epsilon"]) >= _given_away(claim)):
        text = f"over all of {whole['where']} together. {whole['guess']}"
        kind = "kept" if whole["bounded"] else "none"
        return {"name": "Every client", "figure": whole["figure"], "text": text, "kind": kind}
    found = _own_claim_figure(claim, own, named)
    others = _worst_together(together)
    if others is not None:
        found["text"] += f" For {others['where']} together it is {others['figure']}: see below."
    return found


def _worst_together(together: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return max(together, key=lambda one: float(one["epsilon"]), default=None)


def _own_claim_figure(
    claim: Mapping[str, Any], own: Sequence[Mapping[str, Any]], named: str
) -> dict[str, str]:
    spent = ((own[0].get("spend") or {}).get("rounds") or {}).get("max")
    if not claim["finished"] and spent:
        text = f"{named}spent so far by the client that spent most; the claim is made at the end"
        return {
            "name": "Privacy",
            "figure": f"ε ≤ {_bound(spent[-1])}",
            "text": text,
            "kind": "open",
        }
    kind = "kept" if claim["bounded"] else "none" if claim["finished"] else "open"
    at = f"at δ = {format_bound(claim['delta'], 6)}. " if claim["bounded"] else ""
    text = f"{named}{at}{claim['explained']}"
    return {"name": "Every client", "figure": claim["figure"], "text": text, "kind": kind}


def _bound(epsilon: float | str) -> str:
    return format_bound(float(epsilon))


def _given_away(claim: Mapping[str, Any]) -> float:
    lifetime = claim.get("lifetime") or {}
    given = lifetime.get("epsilon", claim["epsilon_max"])
    return math.inf if given is None else float(given)


def _joined_figure(own: Sequence[Mapping[str, Any]], named: str) -> dict[str, str]:
    """Return who joined: of the first run, and which one that is where there are several."""
    run = own[0]
    named += f"seed {run['seed']}: " if len(own) > 1 else ""
    joins, rounds = run["joins"], max(1, run["rounds"])
    joined = sum(count > 0 for count in joins)
    did = "were available" if run["roster_is"] == "available" else "joined"
    mean = sum(joins) / max(1, len(joins)) / rounds
    parts = [f"{named}{did} at least once, on average in {100 * mean:.0f} % of the rounds"]
    out = [n for n in run["per_round"].get("without_allowance") or () if n is not None]
    if out and out[-1]:
        parts.append(f"{out[-1]} had nothing left to pay with at the end")
    figure = f"{joined} of {len(joins)}"
    return {"name": "Clients", "figure": figure, "text": "; ".join(parts), "kind": ""}


def _tradeoff(
    series: Sequence[RunSeries], looks: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Return the metric against the epsilon that was asked, where settings differ in that alone.

    Of runs that also differ otherwise, as those of a comparison of modes, it says nothing.
    """
    families: dict[str, list[int]] = {}
    for place, one in enumerate(series):
        if one.epsilon is not None and math.isfinite(one.epsilon) and one.spread.mean is not None:
            rest = [part for part in one.label.split(", ") if not part.startswith("epsilon=")]
            families.setdefault(", ".join(rest), []).append(place)
    if any(len({asked_epsilon(series[i]) for i in own}) < 2 for own in families.values()):
        return []
    found = []
    for name, places in families.items():
        places.sort(key=lambda place: asked_epsilon(series[place]))
        own = [series[place] for place in places]
        finals = [[v for v in one.by_seed.values() if v is not None] for one in own]
        found.append(
            {
                **looks[places[0]],
                "name": name,
                "x": shorts(asked_epsilon(one) for one in own),
                "y": shorts(one.spread.mean for one in own),
                "low": shorts(min(values) for values in finals),
                "high": shorts(max(values) for values in finals),
            }
        )
    return found


def _measured(found: Mapping[str, Any], joins: Sequence[int], metric: str) -> dict[str, Any]:
    """Return what each client measured on its own samples, and the spread of the headline."""
    rows = found["rows"]
    key = headline_of_clients(rows, (metric,))
    names = dict.fromkeys((key, *(name for row in rows for name in row)))
    shown = [name for name in names if any(isinstance(row.get(name), float) for row in rows)]
    falls, values = key in LOWER_IS_BETTER, [row.get(key) for row in rows]
    everybody = {"all clients": client_spread(values, "mean", lower_is_better=falls)}
    groups = {**everybody, **client_groups(rows, joins, key)}
    return {
        "rounds": found["rounds"],
        "metrics": shown,
        "clients": {str(r["client"]): {name: _five(r.get(name)) for name in shown} for r in rows},
        "groups": [
            {
                "name": name,
                "mean": _five(values.get("mean")),
                "worst": _five(values.get("mean_worst_decile")),
                "gini": _five(values.get("mean_gini")),
            }
            for name, values in groups.items()
        ],
    }


def _plain(one: RunSeries) -> dict[str, Any]:
    epsilon = one.epsilon
    return {
        "label": one.label,
        "mode": one.mode,
        "runs": one.members,
        "mean": _five(one.spread.mean),
        "sd": _five(one.spread.sd),
        "low": _five(one.spread.low),
        "high": _five(one.spread.high),
        "epsilon": "inf" if epsilon == float("inf") else epsilon,
        "claim": one.claim,
        "metric": one.metric_name,
        "share": is_share(one.metric),
        "curve": _curve(one),
    }


def _curve(one: RunSeries) -> dict[str, list[Any]]:
    """Return mean, lowest and highest of the metric and the mean loss, where all seeds have it."""
    rounds, values, _ = one.curve()
    at, losses, _ = one.curve("test_loss")
    loss = dict(zip(at.tolist(), losses.T.tolist(), strict=True))
    columns = values.T.tolist()
    return {
        "rounds": shorts(rounds.tolist()),
        "mean": shorts(float(np.mean(seeds)) for seeds in columns),
        "low": shorts(float(np.min(seeds)) for seeds in columns),
        "high": shorts(float(np.max(seeds)) for seeds in columns),
        "loss": shorts(float(np.mean(loss.get(number, math.nan))) for number in rounds.tolist()),
    }


def _five(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _styles(modes: Sequence[str]) -> list[dict[str, str]]:
    """Return how each series looks: colour, dash and marker."""
    looks = identities(modes, mode_colors())
    return [
        {"color": one.color, "dash": " ".join(map(str, one.dash)), "marker": one.marker}
        for one in looks
    ]


def _palette() -> str:
    """Return the colours of series as variables of the style: light, dark, and light on paper."""

    def lines(colors: Mapping[str, str]) -> str:
        return " ".join(f"--{name}: {value};" for name, value in colors.items())

    dark, light = lines(DARK), lines(LIGHT)
    return (
        f":root {{ {light} }}\n"
        "@media (prefers-color-scheme: dark) { "
        f':root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
        '@media print { :root, :root:not([data-theme="light"]), '
        f':root[data-theme="dark"] {{ {light} }} }}\n'
    )


def _pairs(series: Sequence[RunSeries]) -> list[dict[str, Any]]:
    return [
        {
            "label": f"{series[first].label} minus {series[second].label}",
            "mean": _five(found.spread.mean),
            "low": _five(found.spread.low),
            "high": _five(found.spread.high),
            "p": _five(found.p),
            "seeds": len(found.seeds),
        }
        for first, second, found in differences(series)
    ]


def _title(data: Mapping[str, Any]) -> str:
    if "ledger" in data:
        return f"Ledger {data['ledger']['name']}"
    runs = data["runs"]
    if len(runs) == 1:
        run = runs[0]
        method = {"full": "", "condense": "condensation, "}.get(run["method"], f"{run['method']}, ")
        return f"{run['dataset']}, {method}{run['mode']}, seed {run['seed']}"
    return f"{len(runs)} runs on {', '.join(sorted({run['dataset'] for run in runs}))}"


def _warning(data: Mapping[str, Any]) -> str:
    """Return the red line of a page that is not for everybody."""
    if not data.get("private"):
        return ""
    text = LEDGER_WARNING if "ledger" in data else PRIVATE_WARNING
    return f'<p class="warning" role="alert">{text}</p>'


def _claims(data: Mapping[str, Any]) -> str:
    """Return the claims for a reader without scripts."""
    said = [
        f"<h2>{html.escape(one['headline'])}</h2><p>{html.escape(one['text'])}</p>"
        for one in data.get("together", ())
    ]
    for run in data.get("runs", ()):
        claim = run["claim"]
        head = f"<h2>{html.escape(run['name'])}</h2><p>{html.escape(claim['headline'])}</p>"
        said.append(f"{head}<pre>{html.escape(claim.get('text') or '')}</pre>")
    return "".join(said)


def _asset(name: str) -> str:
    return (resources.files("fedquilt.report") / "assets" / name).read_text(encoding="utf-8")
