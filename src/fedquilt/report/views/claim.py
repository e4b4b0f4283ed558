"""What may be claimed: of a run, of all runs of its ledger, of all runs of a sweep.

A client that was in several runs has given away more than any of them says.  Wherever that is
known, the headline is the figure of all of them together.

A model card (`model_card`) says what a run made, for whoever finds the model, with Hugging Face's
metadata.  It is written from `result.json` alone, and of that from the task, the options, what was
measured at the end and the statement: no path, no id of a client, nothing that only the owner may
see.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import format_bound, printable
from fedquilt.config import RunConfig
from fedquilt.privacy.accounting import gaussian_mu
from fedquilt.privacy.ledger.entries import allowance_mu2, epsilon_spent
from fedquilt.privacy.statement import ADJACENCIES, Statement
from fedquilt.record.result import CUSTOM, lifetime_of
from fedquilt.report.runs import earlier_runs
from fedquilt.report.series import upward

_UNFINISHED = "No statement yet"
_NOTHING = "No guarantee: ε = ∞"
_LARGER = 1 + 1e-6
_ROUNDED = 1 + 2e-4  # figures of a page are rounded up
_GO_ON = "the runs that go on from one another"
_UNTIL_THEN = ("lifetime: over all runs", "lifetime when this run ended: over all runs until then")


def claim_view(
    result: Mapping[str, Any] | None,
    rounds: int,
    config: RunConfig,
    total: Mapping[str, Any] | None = None,
    private: bool = False,
) -> dict[str, Any]:
    """Return headline, explanation, facts and notes of the statement of a run.

    `total` is what the ledger says of all runs of the run's clients (`spend.total`).  Where
    the ledger lies on somebody's machine is said with `private` only.
    """
    if result is None:
        return {
            "bounded": False,
            "finished": False,
            "headline": _UNFINISHED,
            "explained": f"{rounds} of {config.num_releases} rounds are over. What may be claimed "
            "is said when the run ends; until then the ledger's charges are what is known.",
            "facts": [],
            "notes": [],
            "epsilon_max": None,
            "delta": None,
            "figure": "ε: no statement yet",
            "lifetime": _plain(_lifetime(None, math.inf, total, config)),
        }
    try:
        statement = Statement.from_json(dict(result["statement"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"the statement of a run lacks or spoils {error}") from error
    record = statement.as_json()
    hidden = None if private else (result.get("ledger") or {}).get("ledger")
    lifetime = _lifetime(result, statement.epsilon_max, total, config)
    whole = statement.epsilon_max if lifetime is None else lifetime["epsilon"]
    stated = float((result.get("ledger") or {}).get("lifetime_epsilon_max", math.inf))
    notes = statement.notes
    if lifetime is not None and lifetime["epsilon"] > stated * _ROUNDED:  # later runs were charged
        notes = tuple(note.replace(*_UNTIL_THEN) for note in notes)
    return {
        "bounded": statement.is_bounded and math.isfinite(whole),
        "finished": True,
        "headline": _headline(statement, whole, lifetime),
        "explained": _explained(statement, whole, config, shared=lifetime is not None),
        "facts": [*_alone(statement, lifetime), *_facts(statement), *_begun(statement, config)],
        "notes": [without_place(note, hidden) for note in notes],
        "figure": f"ε ≤ {format_bound(whole)}" if math.isfinite(whole) else "ε = ∞",
        "epsilon_max": record["epsilon_max"],
        "delta": record["delta"],
        "adjacency": record["adjacency"],
        "lifetime": _plain(lifetime),
        "text": without_place(dataclasses.replace(statement, notes=notes).as_text(), hidden),
    }


def _lifetime(
    result: Mapping[str, Any] | None,
    own: float,
    total: Mapping[str, Any] | None,
    config: RunConfig,
) -> dict[str, Any] | None:
    """Return what all runs of the ledger together have cost; None where this run is all.

    A ledger that is gone is quoted from the run's own record.
    """
    if total is not None:
        if total["runs"] < 2:
            return None
        return {"epsilon": float(total["epsilon"]), "runs": total["runs"]}
    record = (result or {}).get("ledger") or {}
    stated = float(record.get("lifetime_epsilon_max", 0.0))
    if config.ledger is None or config.amplification or stated <= own * _LARGER:
        return None
    return {"epsilon": stated, "runs": None}


def _plain(lifetime: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if lifetime is None else {**lifetime, "epsilon": upward(lifetime["epsilon"])}


def guess_sentence(epsilon: float, delta: float, adjacency: str, *, gaussian: bool) -> str:
    """Say what a bound means to somebody who guesses.

    Of two equally likely worlds, a Gaussian mechanism of parameter μ lets the best guess be right
    with probability Φ(μ/2) (Dong, Roth, Su); any mechanism of (ε, δ), with probability
    (e^ε + δ)/(1 + e^ε) at most.

    >>> guess_sentence(6.0, 1e-5, "zero-out", gaussian=True)
    "Who guesses whether a client's data were used is right at most 74.4 times in 100, not 50."
    """
    if gaussian:
        right = 0.5 * (1 + math.erf(gaussian_mu(epsilon, delta) / (2 * math.sqrt(2))))
    else:
        right = (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon))
    which = {
        "zero-out": "whether a client's data were used",
        "replace-one": "which of two sets of data a client holds",
    }.get(adjacency, "which of two neighbouring worlds is the true one")
    times = format_bound(min(100.0, 100 * right))
    return f"Who guesses {which} is right at most {times} times in 100, not 50."


def composed_epsilon(
    epsilons: Sequence[float], deltas: Sequence[float | None], *, amplified: bool
) -> tuple[float, float | None]:
    """Return what a client that was in every one of some runs may have given away.

    Squared GDP units add up over runs (`privacy.ledger.entries`).  Where a run claims nothing
    there is no bound, nor where the runs' deltas differ, nor under a secret coin, whose
    releases are not described by one unit.
    """
    if not epsilons or len(set(deltas)) != 1 or deltas[0] is None or amplified:
        return math.inf, None
    delta = float(deltas[0])
    try:
        total = sum(allowance_mu2(float(epsilon), delta) for epsilon in epsilons)
    except (InvalidValueError, OverflowError, ValueError):
        return math.inf, delta
    return float(epsilon_spent(np.asarray([total]), delta)[0]), delta


def together_view(
    runs: Sequence[Mapping[str, Any]], sweeps: Mapping[str, Sequence[int]]
) -> list[dict[str, Any]]:
    """Return what runs that share clients may claim together, and which runs (`members`) those are.

    They share a ledger, are points of one sweep (`sweeps` names their places), or one goes on
    with the model of another.  Whatever is charged to one shared ledger is bounded by that; of
    other runs the claims are composed.
    """
    ledgers: dict[tuple[str, str], list[int]] = {}
    for place, run in enumerate(runs):
        population = (run.get("spend") or {}).get("population")
        if run["claim"].get("lifetime") is not None and population:
            ledgers.setdefault((run.get("account", ""), population), []).append(place)
    found = []
    for (_, population), members in ledgers.items():
        worst = max((runs[i] for i in members), key=_given_away)
        where, lifetime = f"the runs of the ledger's population {population!r}", worst["claim"]
        given = lifetime["lifetime"]["runs"], lifetime["lifetime"]["epsilon"]
        spend = worst["spend"]
        found.append((members, _shared(where, *given, spend["delta"], spend["adjacency"])))
    sharing = [(f"the runs of the sweep {name!r}", members) for name, members in sweeps.items()]
    sharing += [(_GO_ON, members) for members in _chains(runs)]
    for where, places in sharing:
        own = [i for i in places if runs[i]["rounds"] or runs[i]["finished"]]
        if len(own) > 1 and not any(set(own) <= set(charged) for charged in ledgers.values()):
            found.append((own, _composed(where, runs, own, list(ledgers.values()))))
    return [{**one, "members": members} for members, one in found]


def _chains(runs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the places of runs that go on from one another."""
    earlier = earlier_runs([(run.get("begins", ""), run.get("ends", "")) for run in runs])
    chains: list[set[int]] = []
    for place, before in enumerate(earlier):
        if before:
            joined = [chain for chain in chains if chain & before]
            chains = [chain for chain in chains if chain not in joined]
            chains.append({place, *before}.union(*joined))
    return [sorted(chain) for chain in chains]


def _composed(
    where: str,
    runs: Sequence[Mapping[str, Any]],
    own: Sequence[int],
    ledgers: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Compose what some runs have cost; all that is charged to one ledger counts once."""
    groups = [set(own) & set(members) for members in ledgers]
    groups += [{place} for place in set(own).difference(*groups)]
    parts = [max((runs[i] for i in group), key=_given_away) for group in groups if group]
    epsilon, delta = composed_epsilon(
        [_given_away(run) for run in parts],
        [_delta(run) for run in parts],
        amplified=any(runs[place]["roster_is"] == "available" for place in own),
    )
    adjacency = runs[own[0]]["claim"].get("adjacency") or "zero-out"
    made = _shared(where, len(own), upward(epsilon), delta, adjacency)
    if where == _GO_ON:
        made["text"] += " Earlier runs that are not shown here are not counted."
    return made


def _given_away(run: Mapping[str, Any]) -> float:
    """Return what a client may have lost: the claim, over all runs where that is known.

    Before the end of a run it is its budget.
    """
    claim, budget = run["claim"], (run.get("spend") or {}).get("budget", math.inf)
    own = float(budget if claim["epsilon_max"] is None else claim["epsilon_max"])
    return max(own, float((claim.get("lifetime") or {}).get("epsilon", 0.0)))


def _delta(run: Mapping[str, Any]) -> float | None:
    found = run["claim"]["delta"]
    return found if found is not None else (run.get("spend") or {}).get("delta")


def _shared(
    where: str, runs: int | None, epsilon: Any, delta: float | None, adjacency: str
) -> dict[str, Any]:
    looks = "" if runs is None else f" {runs} looks were taken at the clients' data."
    bounded = math.isfinite(float(epsilon)) and delta is not None
    if bounded:
        stated = f"ε ≤ {format_bound(float(epsilon))} at δ = {format_bound(delta or 0.0, 6)}"
        headline = f"Every client, over {where}: {stated}"
    else:
        headline = f"{_NOTHING} over {where}"
    chosen = " What is chosen by looking at results is not covered by a single run's claim."
    return {
        "where": where,
        "runs": runs,
        "epsilon": epsilon,
        "delta": delta,
        "bounded": bounded,
        "figure": f"ε ≤ {format_bound(float(epsilon))}" if bounded else "ε = ∞",
        "guess": guess_sentence(float(epsilon), delta or 0.0, adjacency, gaussian=True)
        if bounded
        else "",
        "headline": headline,
        "text": f"A client that was in all of {where} has given away that much.{looks}{chosen}",
    }


def without_place(text: str, path: str | None) -> str:
    """Return a text in which a file has its name only."""
    return text if path is None else text.replace(path, Path(path).name)


def _headline(statement: Statement, whole: float, lifetime: Mapping[str, Any] | None) -> str:
    if not statement.is_bounded or not math.isfinite(whole):
        return _NOTHING
    stated = f"ε ≤ {format_bound(whole)} at δ = {format_bound(statement.delta, 6)}"
    if lifetime is None:
        return f"Every {statement.unit}: {stated}"
    return f"Every {statement.unit}, over all runs of its ledger: {stated}"


def _explained(statement: Statement, whole: float, config: RunConfig, *, shared: bool) -> str:
    if not statement.is_bounded:
        return (
            "Nothing that depends on the clients' data may be published under a privacy claim: "
            "not the model, and not what this page shows of it."
        )
    if not math.isfinite(whole):
        return "Some client was in a run of the same ledger that bounds nothing."
    guess = guess_sentence(
        whole, statement.delta, statement.adjacency, gaussian=not config.amplification
    )
    holds = "all runs of the ledger" if shared else "all rounds"
    return f"{guess} It holds for {holds} together, and for the {statement.unit} that joined most."


def _alone(statement: Statement, lifetime: Mapping[str, Any] | None) -> list[list[str]]:
    if lifetime is None:
        return []
    return [["This run alone", f"ε ≤ {format_bound(statement.epsilon_max)}"]]


def _begun(statement: Statement, config: RunConfig) -> list[list[str]]:
    """Say that nobody knows here what made the first weights of a user's own model."""
    if config.model != CUSTOM or config.ledger is not None or not statement.is_bounded:
        return []
    said = "a model of the user's own: what clients gave away for it in earlier runs is not counted"
    return [["Began with", said]]


def _facts(statement: Statement) -> list[list[str]]:
    median = format_bound(statement.epsilon_median)
    compared = ADJACENCIES.get(statement.adjacency, "")
    bounded = [
        [f"Median {statement.unit}", f"ε ≤ {median}"],
        ["Adjacency", f"{statement.adjacency}: {compared}"],
    ]
    return [
        *(bounded if statement.is_bounded else []),
        ["Covered", ", ".join(statement.covered) or "nothing"],
        ["Not covered", ", ".join(statement.uncovered) or "nothing"],
        ["Noise from", statement.noise_source],
    ]


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
