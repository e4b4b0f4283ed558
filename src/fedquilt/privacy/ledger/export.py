"""The ledger as plain data: a dictionary for JSON, rows for CSV.

Infinity is written as the text "inf", which every reader of JSON accepts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from fedquilt.privacy.ledger.files import SCHEMA_VERSION
from fedquilt.privacy.ledger.population import Population
from fedquilt.privacy.ledger.rows import ClientRow
from fedquilt.privacy.ledger.store import Store


def export_ledger(
    store: Store, populations: Iterable[Population], *, clients: bool = True
) -> dict[str, Any]:
    """Return everything the ledger says that is not a cohort, ready for `json.dump`."""
    with store.reading():
        store.check()
        return {
            "schema_version": SCHEMA_VERSION,
            "head": store.head()[1].hex(),
            "unit": "squared GDP units (mu^2), under each population's adjacency",
            "populations": [_population(population, clients) for population in populations],
            "entries": list(_history(store)),
        }


def csv_rows(population: Population) -> Iterator[list[str]]:
    """Yield a header, then one row for each client; None is an empty cell."""
    yield [field.name for field in dataclasses.fields(ClientRow)]
    for row in population.rows():
        values = dataclasses.astuple(row)
        yield ["" if value is None else str(value) for value in values]


def _population(population: Population, clients: bool) -> dict[str, Any]:
    data = _plain(dataclasses.asdict(population.summary()))
    data["num_clients"] = population.info.num_clients
    data["allowance_mu2"] = population.info.allowance_mu2
    data["runs"] = [
        {"run": run.name, "epsilon": run.epsilon, "budget_mu2": run.budget_mu2}
        for run in population.runs()
    ]
    if clients:
        data["client_rows"] = [_plain(dataclasses.asdict(row)) for row in population.rows()]
    return data


def _history(store: Store) -> Iterator[dict[str, Any]]:
    columns = ("seq", "kind", "time", "population", "run", "round", "reservation", "name", "digest")
    for row in store.select(f"SELECT {', '.join(columns)}, hash FROM entries ORDER BY seq"):
        said = {key: value for key, value in zip(columns, row, strict=False) if value is not None}
        yield {**said, "hash": bytes(row[-1]).hex()}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {key: "inf" if value == math.inf else value for key, value in record.items()}
