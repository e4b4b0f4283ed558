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

from fedquilt.common.spread import client_spread
from fedquilt.config.modes import MODE_TABLE
from fedquilt.report.clients import client_groups
from fedquilt.report.runs import RunSeries, differences, entry_of_view, group_by_config, levels
from fedquilt.report.series import shorts

SCRIPTS = (
    *("dom.js", "chart.js", "roster.js", "clients.js", "sections.js"),
    *("ledger.js", "live.js", "main.js"),
)
PRIVATE_WARNING = (
    "PRIVATE: this page shows raw measurements and what clients hold. No statement covers them. "
    "It is for the owner of the run: do not pass it on."
)
LEDGER_WARNING = (
    "FOR THE OPERATOR: this page names clients and says when they were charged. Do not pass it on."
)
_PALETTE = ("blue", "vermilion", "green", "purple", "orange", "sky", "grey")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


def html_page(view: Mapping[str, Any], *, title: str | None = None, live: bool = False) -> str:
    """Return the page of what `fedquilt.report.views` has read.

    `live` allows the page to talk to the server it came from, and to nobody else.
    """
    ready = "ledger" in view or "series" in view
    data = dict(view) if ready else with_comparison(view)
    script = f'(() => {{\n"use strict";\n{"".join(_asset(name) for name in SCRIPTS)}}})();'
    style = _asset("page.css")
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
        if run.get("measured"):
            run["measured"] = _measured(run["measured"], run["joins"])
    looks = _styles(series)
    return {
        **view,
        "runs": runs,
        "series": [{**_plain(one), **look} for one, look in zip(series, looks, strict=True)],
        "levels": [{"heading": one.heading, "series": list(one.series)} for one in levels(series)],
        "pairs": _pairs(series),
    }


def _measured(found: Mapping[str, Any], joins: Sequence[int]) -> dict[str, Any]:
    """Return the accuracy of each client on its own samples, and its spread over groups."""
    rows = found["rows"]
    everybody = {"all clients": client_spread([row.get("accuracy") for row in rows], "mean")}
    groups = {**everybody, **client_groups(rows, joins)}
    return {
        "rounds": found["rounds"],
        "clients": {str(row["client"]): _five(row.get("accuracy")) for row in rows},
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


def _styles(series: Sequence[RunSeries]) -> list[dict[str, str]]:
    """Give each series a colour and a dash of its own: a mode's colour where it is alone."""
    modes = [one.mode for one in series]
    alone = len(set(modes)) == len(modes) and all(mode in MODE_TABLE for mode in modes)
    styles = []
    for place, one in enumerate(series):
        name = MODE_TABLE[one.mode].color if alone else _PALETTE[place % len(_PALETTE)]
        turn = place % len(_DASHES) if alone else (place // len(_PALETTE)) % len(_DASHES)
        styles.append({"color": name, "dash": _DASHES[turn]})
    return styles


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
        return f"{runs[0]['dataset']}, {runs[0]['mode']}, seed {runs[0]['seed']}"
    return f"{len(runs)} runs on {', '.join(sorted({run['dataset'] for run in runs}))}"


def _warning(data: Mapping[str, Any]) -> str:
    """Return the red line of a page that is not for everybody."""
    if not data.get("private"):
        return ""
    text = LEDGER_WARNING if "ledger" in data else PRIVATE_WARNING
    return f'<p class="warning" role="alert">{text}</p>'


def _claims(data: Mapping[str, Any]) -> str:
    """Return the claims for a reader without scripts."""
    said = []
    for run in data.get("runs", ()):
        claim = run["claim"]
        stated = html.escape(str(claim.get("text") or claim["headline"]))
        said.append(f"<h2>{html.escape(run['name'])}</h2><pre>{stated}</pre>")
    return "".join(said)


def _asset(name: str) -> str:
    return (resources.files("fedquilt.report") / "assets" / name).read_text(encoding="utf-8")
