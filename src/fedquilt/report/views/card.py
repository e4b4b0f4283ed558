"""A model card: what a run made, for whoever finds the model, with Hugging Face's metadata.

Written from `result.json` alone, and of that from the task, the options, what was measured at the
end and the statement: no path, no id of a client, nothing that only the owner may see.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from fedquilt.common.formatting import format_bound, printable
from fedquilt.privacy.statement import ADJACENCIES, Statement
from fedquilt.record.result import lifetime_of
from fedquilt.report.views.claim import without_place

_OWN = "custom"
_TRUSTED = {
    "off": "The server, with everything but the claim: it saw each client's update before the "
    "noise, drew the noise and kept the ledger.",
    "simulated": "Whoever ran it, with everything: secure aggregation was computed without keys, "
    "to see what it would release.",
    "protocol": "Clients noised their own updates under masks, of which a server learns the sum "
    "alone. The run's clients and server were in one process, which its operator saw.",
}
_UNTOLD = "Nobody had to be: nothing is claimed. Whoever ran it saw every client's update."


def model_card(result: Mapping[str, Any]) -> str:
    """Return the card of a finished run, from the content of its result.json."""
    statement = Statement.from_json(result["statement"])
    metadata = result["metadata"]
    options: Mapping[str, Any] = metadata["hyperparameters"]
    final = {key: value for key, value in metadata["final"].items() if value is not None}
    data = "data of the user's own" if options["dataset"] == _OWN else options["dataset"]
    model = "a model of the user's own" if options["model"] == _OWN else options["model"]
    lifetime = lifetime_of(result, statement)
    front = _front(options, statement, final, lifetime)
    lines = ["---", *front, "---", "", "# Model card", ""]
    lines += [
        f"Trained by {_clients(options)} in {result['rounds']} rounds of federated learning "
        "with [fedquilt](https://pypi.org/project/fedquilt/).",
        "",
        "| | |",
        "|---|---|",
        f"| model | {printable(model)} |",
        f"| data | {printable(data)} |",
        f"| loss | {printable(metadata.get('loss', options['loss']))} |",
        f"| mode, method | {options['mode']}, {options['method']} |",
        *(f"| test {printable(name)} | {value:.6g} |" for name, value in final.items()),
        "",
        "## What is claimed",
        "",
        *_claim(statement, lifetime),
        "",
    ]
    if statement.is_bounded:
        meaning = ADJACENCIES.get(statement.adjacency, "")
        lines += [
            f"The unit is one {statement.unit}, everything it holds. Adjacency is "
            f"{statement.adjacency}: {meaning}. It covers every client of the run and "
            f"{len(statement.covered)} trained tensors: {_names(statement.covered)}.",
            "",
        ]
    place = (result.get("ledger") or {}).get("ledger")
    trusted = _TRUSTED[options.get("secure_aggregation", "off")]
    lines += [
        "## Who was trusted",
        "",
        trusted if statement.is_bounded else _UNTOLD,
        "",
        "## What is not claimed",
        "",
        *(f"- left without clip or noise: `{printable(name)}`" for name in statement.uncovered),
        "- nothing about what a frozen part of the model learned before, nor about test data",
        "- nothing about several clients that hold the same person's data, beyond each by itself",
        *(f"- {printable(without_place(note, place))}" for note in statement.notes),
        "",
        "## How to load it",
        "",
        "```python",
        "import fedquilt",
        "",
        *_loading(options["model"] == _OWN),
        "```",
        "",
    ]
    return "\n".join(lines)


def _clients(options: Mapping[str, Any]) -> str:
    """Say how many clients there were."""
    count = options.get("num_clients")
    return "clients" if count is None else f"{count} clients"


def _front(
    options: Mapping[str, Any],
    statement: Statement,
    final: Mapping[str, float],
    lifetime: float | None,
) -> list[str]:
    """Return the metadata; what JSON writes is YAML too, but for numbers such as 1e-05.

    Bounds are those of the sentences, rounded up.
    """
    record = statement.as_json()
    spent = {"epsilon": statement.epsilon_max}
    spent |= {} if lifetime is None else {"lifetime_epsilon": lifetime}
    bounds = {key: _bound(value) for key, value in spent.items()}
    claim = {key: record[key] for key in ("unit", "adjacency", "delta")}
    front: dict[str, Any] = {
        "library_name": "fedquilt",
        "tags": ["federated-learning", "differential-privacy", "fedquilt"],
        "metrics": list(final),
        "privacy": {**bounds, **claim, "covered": len(statement.covered)},
    }
    if not statement.is_bounded:
        front["tags"].remove("differential-privacy")
    if options["dataset"] != _OWN:
        front["datasets"] = [options["dataset"]]
    lines = [f"{key}: {json.dumps(value)}" for key, value in front.items()]
    return [re.sub(r"(: \d+)(e[-+]\d+)", r"\1.0\2", line) for line in lines]


def _bound(epsilon: float) -> float | str:
    return float(format_bound(epsilon)) if math.isfinite(epsilon) else "inf"


def _claim(statement: Statement, lifetime: float | None) -> list[str]:
    """Return the claim, the one over all runs of a shared ledger first."""
    if lifetime is None or not statement.is_bounded:
        return [_sentence(statement.claim)]
    whole = f"epsilon <= {format_bound(lifetime)} at delta {format_bound(statement.delta, 6)}"
    said = "over all runs of its ledger until this one ended"
    return [
        _sentence(f"every {statement.unit}, {said}: {whole}"),
        "",
        f"This run alone: {statement.claim}.",
    ]


def _sentence(text: str) -> str:
    return f"**{text[0].upper()}{text[1:]}.**"


def _names(names: tuple[str, ...], most: int = 6) -> str:
    shown = ", ".join(f"`{printable(name)}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _loading(own: bool) -> list[str]:
    if own:
        return ['done = fedquilt.load("RUN", model)  # the model that the run began with']
    return ['done = fedquilt.load("RUN")', "scores = done.model(inputs)"]
