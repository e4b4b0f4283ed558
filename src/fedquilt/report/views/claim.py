"""What a run claims, in words for a reader who was not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.common.bounds import format_bound
from fedquilt.common.errors import RunFolderError
from fedquilt.privacy.statement import ADJACENCIES, Statement

_UNFINISHED = "No statement yet"


def claim_view(
    result: Mapping[str, Any] | None, rounds: int, planned: int, *, private: bool = False
) -> dict[str, Any]:
    """Return headline, explanation, facts and notes of the statement of a run.

    Where the ledger lies on somebody's machine is said with `private` only.
    """
    if result is None:
        return {
            "bounded": False,
            "finished": False,
            "headline": _UNFINISHED,
            "explained": f"{rounds} of {planned} rounds are over. What may be claimed is said when "
            "the run ends; until then the ledger's charges are what is known.",
            "facts": [],
            "notes": [],
            "epsilon_max": None,
            "delta": None,
        }
    try:
        statement = Statement.from_json(dict(result["statement"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"the statement of a run lacks or spoils {error}") from error
    record = statement.as_json()
    hidden = None if private else (result.get("ledger") or {}).get("ledger")
    return {
        "bounded": statement.is_bounded,
        "finished": True,
        "headline": _headline(statement),
        "explained": _explained(statement),
        "facts": _facts(statement),
        "notes": [_without_place(note, hidden) for note in statement.notes],
        "epsilon_max": record["epsilon_max"],
        "delta": record["delta"],
        "adjacency": record["adjacency"],
        "text": _without_place(statement.as_text(), hidden),
    }


def _without_place(text: str, path: str | None) -> str:
    """Return a text in which a file has its name only."""
    return text if path is None else text.replace(path, Path(path).name)


def _headline(statement: Statement) -> str:
    if not statement.is_bounded:
        return "No guarantee: ε = ∞"
    epsilon, delta = format_bound(statement.epsilon_max), format_bound(statement.delta, 6)
    return f"Every {statement.unit}: ε ≤ {epsilon} at δ = {delta}"


def _explained(statement: Statement) -> str:
    if not statement.is_bounded:
        return (
            "Nothing that depends on the clients' data may be published under a privacy claim: "
            "not the model, and not what this page shows of it."
        )
    meaning = ADJACENCIES.get(statement.adjacency, statement.adjacency)
    return (
        "Whoever sees everything this run has released, and knows all about everybody else, can "
        f"tell two worlds of one {statement.unit} apart ({meaning}) no better than this bound "
        f"says. It holds for all rounds together, also for the {statement.unit} that joined most."
    )


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
