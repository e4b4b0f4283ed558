"""What a run's clients have given away in all runs of a ledger, before it and round by round."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.privacy.ledger import Charge, Population, RunInfo
from fedquilt.privacy.ledger.members import roster_digest
from fedquilt.privacy.ledger.units import epsilon_spent
from fedquilt.report.views.compact import upward

LEVELS = {"max": 1.0, "high": 0.75, "median": 0.5, "low": 0.25}

Amounts = NDArray[np.float64]
Places = NDArray[np.int64]


def levels_of(ordered: Amounts) -> Amounts:
    """Return the levels of ascending amounts; one between two clients is the upper one's."""
    last = ordered.size - 1
    return ordered[[min(last, int(np.ceil(q * last))) for q in LEVELS.values()]]


def as_epsilons(reached: Amounts, delta: float) -> dict[str, list[Any]]:
    """Return the epsilons of levels, by their names, from rows of amounts.

    Epsilon grows with what was charged, so the level of the epsilons is the epsilon of
    the level.
    """
    epsilons = epsilon_spent(reached.ravel(), delta).reshape(reached.shape)
    return {
        name: [upward(float(value)) for value in epsilons[:, place]]
        for place, name in enumerate(LEVELS)
    }


def places_of_run(
    population: Population, run: RunInfo, num_clients: int, same: bool
) -> Places | None:
    """Return the numbers that the run's clients have in its population, in the run's order.

    The ledger keeps a digest of who took part, in order: what fits it is the order.  None
    where no simple order does.
    """
    size = population.info.num_clients
    if run.roster is None:
        return np.arange(num_clients) if same and num_clients <= size else None
    names = population.ids()
    inside = np.setdiff1d(np.arange(size), run.sits_out)
    first = int(inside[0]) if inside.size else 0
    for tried in (np.arange(size), inside, np.arange(first, size)):
        places = tried[:num_clients]
        if places.size == num_clients and roster_digest([names[i] for i in places]) == run.roster:
            return places
    return None


def lifetime_view(
    population: Population, run: RunInfo, places: Places, rounds: int
) -> dict[str, Any] | None:
    """Return what the run's clients have spent in all runs; None for the first of a ledger.

    The first entry of every level is what was spent before the run's first release, the
    others after each of its rounds, other runs in between included.  `before` is each
    client's amount at the start, in units that add up; None where other runs were charged
    in between, so that nobody adds this run's charges to it and gets too little.
    """
    info, charges = population.info, population.charges()
    spent = np.zeros(info.num_clients)
    ends = {one.round_index: place + 1 for place, one in enumerate(charges) if one.run == run.key}
    own = (place for place, one in enumerate(charges) if one.run == run.key)
    began = counted = next(own, len(charges))
    _add(spent, charges[:counted])
    before = spent[places]
    if not before.any():
        return None
    reached = [levels_of(np.sort(before))]
    for index in range(rounds):
        upto = max(counted, ends.get(index, 0))
        _add(spent, charges[counted:upto])
        counted = upto
        reached.append(levels_of(np.sort(spent[places])))
    alone = all(one.run == run.key for one in charges[began:counted])
    shown = as_epsilons(np.asarray(reached), info.delta)
    return {**shown, "before": _plain(before) if alone else None}


def _add(spent: Amounts, charges: list[Charge]) -> None:
    for one in charges:
        spent[one.clients] += one.charges_mu2


def _plain(amounts: Amounts) -> list[Any]:
    return [upward(float(amount), 4) if amount else 0 for amount in amounts]
