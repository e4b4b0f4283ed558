"""A ledger for its operator: populations, who is near the end, runs, a client's history, a plan.

It names clients and says when they were charged: it is for whoever keeps the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt._version import __version__
from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.privacy.ledger import Charge, Population, open_ledger
from fedquilt.privacy.ledger.entries import allowance_mu2, epsilon_spent, falls_short
from fedquilt.privacy.ledger.files import read_names
from fedquilt.privacy.ledger.rows import NEAR_END, payable_epsilons
from fedquilt.report.series import short, upward

_MOST_HISTORY = 500
_MOST_NAMED = 20


def ledger_view(path: str | Path) -> dict[str, Any]:
    """Return all populations of a ledger as plain data."""
    place = Path(path)
    with open_ledger(place) as ledger:
        names = read_names(place)
        populations = [_population(one, names) for one in ledger.populations()]
        head = ledger.head()
    return {
        "fedquilt": __version__,
        "private": True,
        "ledger": {"name": place.name, "head": head, "populations": populations},
    }


def _population(population: Population, names: Mapping[str, str]) -> dict[str, Any]:
    info, summary, rows = population.info, population.summary(), list(population.rows())
    charges = population.charges()
    used = np.asarray([row.mu2_spent for row in rows])
    return {
        "name": info.name,
        "num_clients": info.num_clients,
        "joined": summary.joined,
        "allowance": upward(info.epsilon),
        "delta": info.delta,
        "adjacency": info.adjacency.replace("_", "-"),
        "epsilon_max": upward(summary.epsilon_max),
        "epsilon_median": upward(summary.epsilon_median),
        "near_end": summary.near_end,
        "exhausted": summary.exhausted,
        "unbounded": summary.unbounded,
        "open_reservations": summary.open_reservations,
        "payable": short(summary.largest_run_epsilon, 4),
        "near_share": NEAR_END,
        "ids": [_shown(row.client_id, names) for row in rows] if info.named else None,
        "joins": [row.joins for row in rows],
        "epsilons": [upward(row.epsilon_spent) for row in rows],
        "left": [short(row.epsilon_left, 4) for row in rows],
        "shares": [_share(float(mu2), info.allowance_mu2) for mu2 in used],
        "last": [
            None if row.last_round is None else f"{row.last_run}, round {row.last_round + 1}"
            for row in rows
        ],
        "runs": _runs(population, charges),
    }


def _shown(value: str | None, names: Mapping[str, str]) -> str | None:
    """Return a client's name where it has one, otherwise its id."""
    return None if value is None else names.get(value, value)


def _share(spent: float, allowance: float) -> float | None:
    """Return the share of the allowance that is spent, in the units that add up."""
    return short(min(1.0, spent / allowance), 4) if math.isfinite(spent) else 1


def _runs(population: Population, charges: list[Charge]) -> list[dict[str, Any]]:
    """Return the runs, newest first, with how many releases they made and of whom."""
    found = []
    for run in reversed(population.runs()):
        own = [one for one in charges if one.run == run.key]
        members = {int(client) for one in own for client in one.clients}
        found.append(
            {
                "name": run.name,
                "epsilon": None if run.epsilon is None else upward(run.epsilon),
                "releases": len(own),
                "clients": len(members),
                "sits_out": int(run.sits_out.size),
                "first": own[0].time if own else None,
                "last": own[-1].time if own else None,
            }
        )
    return found


def client_history(path: str | Path, population: str, client: int) -> dict[str, Any]:
    """Return every release that a client was part of, and its epsilon after each."""
    with open_ledger(Path(path)) as ledger:
        chosen = ledger.population(population)
        info = chosen.info
        checks.integer("client", client, at_least=0, at_most=info.num_clients - 1)
        names = {run.key: run.name for run in chosen.runs()}
        name = _shown(chosen.ids()[client], read_names(path)) if info.named else None
        spent, records = 0.0, []
        for one in chosen.charges():
            place = int(np.searchsorted(one.clients, client))
            if place >= one.clients.size or one.clients[place] != client:
                continue
            spent += float(one.charges_mu2[place])
            records.append((one, float(one.charges_mu2[place]), spent))
        after = epsilon_spent(np.asarray([amount for *_, amount in records]), info.delta)
    rows = [
        {
            "run": names.get(one.run, "?"),
            "round": one.round_index + 1,
            "time": one.time,
            "charge": upward(paid, 4),
            "epsilon": upward(float(epsilon)),
        }
        for (one, paid, _), epsilon in zip(records, after, strict=True)
    ]
    shown = rows[-_MOST_HISTORY:]
    return {"client": client, "id": name, "count": len(rows), "rows": shown}


def planned_cost(path: str | Path, population: str, epsilon: float) -> dict[str, Any]:
    """Return what a run that asks this epsilon of everybody would find and leave.

    Amounts are squared GDP units, which add up; epsilons do not.
    """
    wanted = checks.number("epsilon", epsilon, above=0)
    with open_ledger(Path(path)) as ledger:
        chosen = ledger.population(population)
        touched, left = chosen.touched()  # the others have all of it, and may be very many
        info, ids, payable = chosen.info, chosen.ids(), chosen.largest_run_epsilon()
    whole = info.allowance_mu2
    try:
        cost = allowance_mu2(wanted, info.delta)
    except InvalidValueError as error:
        raise InvalidValueError(f"epsilon={wanted:g} cannot be planned: {error}") from error
    short_of = falls_short(cost, left, whole)
    unable, cannot = touched[short_of], int(short_of.sum())
    if falls_short(cost, np.array(whole), whole):
        unable, cannot = np.arange(min(info.num_clients, _MOST_NAMED)), info.num_clients
    can_pay = info.num_clients - cannot
    least = left[~short_of].min(initial=whole)
    after = payable_epsilons(np.maximum([least - cost], 0.0), info)
    return {
        "epsilon": wanted,
        "can_pay": can_pay,
        "cannot": cannot,
        "who": [ids[i] if ids else str(i) for i in unable[:_MOST_NAMED].tolist()],
        "left_after": short(float(after[0]), 4) if can_pay else None,
        "runs": int(np.floor(least / cost + 1e-9)) if can_pay else 0,
        "payable": short(payable, 4),
    }
