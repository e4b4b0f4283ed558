"""What a run has charged its clients, round by round, and all runs of its ledger before it.

Charges depend on participation only and are public (`record.schema.RESULT_KEYS`); when they were
made, and what clients are called, is not shown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.errors import FedquiltError
from fedquilt.privacy.ledger import Charge, Ledger, Population, RunInfo, open_ledger
from fedquilt.privacy.ledger.entries import ids_digest
from fedquilt.privacy.ledger.rows import bounded_epsilons
from fedquilt.privacy.ledger.units import allowance_mu2, epsilon_spent
from fedquilt.record.folder import RunFolder
from fedquilt.report.series import short, upward

MOST_CHARGES = 120_000
"""More single charges than this are left out of a page: it stays small, and its sums stay."""
_CURVE = 256

LEVELS = {"max": 1.0, "high": 0.75, "median": 0.5, "low": 0.25}

Cohorts = Sequence[Sequence[int]]
Amounts = NDArray[np.float64]
Places = NDArray[np.int64]


def spend_view(
    folder: RunFolder, cohorts: Cohorts, num_clients: int, *, private: bool = False
) -> dict[str, Any] | None:
    """Return the spend of a run's clients, None for a run without a ledger.

    A ledger that cannot be read gives the reason under `missing` and nothing else.  With
    `private` the names that the ledger has for the clients are there too.
    """
    try:
        account = folder.read_account()
        if account is None:
            return None
        with open_ledger(Path(account["ledger"])) as ledger:
            return _spend(ledger, account["run_id"], folder, cohorts, num_clients, private)
    except (FedquiltError, OSError) as error:
        return {"missing": f"the ledger could not be read: {error}"}


def _spend(
    ledger: Ledger,
    run_id: str,
    folder: RunFolder,
    cohorts: Cohorts,
    num_clients: int,
    private: bool,
) -> dict[str, Any]:
    population = ledger.population_of(run_id)
    run = None if population is None else _named(population, run_id)
    if population is None or run is None:
        return {"missing": f"the ledger does not know the run {run_id!r}"}
    info, charges = population.info, population.charges(run)
    paid = [one for one in charges if np.isfinite(one.charges_mu2).all()]
    same = _same_numbers(paid, cohorts, num_clients)
    places = places_of_run(population, run, num_clients, same)
    lifetime = None if places is None else lifetime_view(population, run, places, len(cohorts))
    epsilon = info.epsilon if run.epsilon is None else run.epsilon
    return {
        "population": info.name,
        "allowance": upward(info.epsilon),
        "budget": upward(epsilon),
        "delta": info.delta,
        "adjacency": info.adjacency.replace("_", "-"),
        "unbounded": len(charges) - len(paid),
        "rounds": _by_round(paid, len(cohorts), num_clients, info.delta),
        **_by_client(paid, population, folder, num_clients, same, epsilon),
        "charges": _single(paid, cohorts, same),
        "lifetime": lifetime,
        "ids": _ids(population, places) if private else None,
        "curve": _curve(epsilon if lifetime is None else info.epsilon, info.delta),
        "total": _total(population, places),
        "settled": len({one.round_index for one in charges}),
    }


def _total(population: Population, places: Places | None) -> dict[str, Any]:
    """Return the worst client's epsilon over all runs of the ledger, and how many released.

    Where the run's clients cannot be told from others, it is the worst of the population.
    """
    epsilons = population.epsilons()
    own = epsilons if places is None else epsilons[places]
    charged = {one.run for one in population.charges()}
    return {"epsilon": upward(float(own.max(initial=0.0))), "runs": len(charged)}


def _named(population: Population, run_id: str) -> RunInfo | None:
    return next((run for run in population.runs() if run.name == run_id), None)


def _ids(population: Population, places: NDArray[np.int64] | None) -> list[str] | None:
    """Return what the ledger calls the clients of a run; None where it has numbers only."""
    if places is None or not population.info.named:
        return None
    names = population.ids()
    return [names[place] for place in places.tolist()]


def _same_numbers(paid: Sequence[Charge], cohorts: Cohorts, num_clients: int) -> bool:
    """Tell whether the ledger and the run number the clients alike."""
    for one in paid:
        if one.clients.size and one.clients[-1] >= num_clients:
            return False
        if one.round_index < len(cohorts):
            joined = np.sort(np.asarray(cohorts[one.round_index], dtype=np.int64))
            if not np.array_equal(joined, one.clients):
                return False
    return True


def _by_round(
    paid: Sequence[Charge], rounds: int, num_clients: int, delta: float
) -> dict[str, list[Any]]:
    """Return levels of the clients' epsilons after every round."""
    size = max([num_clients, *(int(one.clients[-1]) + 1 for one in paid if one.clients.size)])
    spent = np.zeros(size)
    reached = np.zeros((rounds, len(LEVELS)))
    by_round: dict[int, list[Charge]] = {}
    for one in paid:
        by_round.setdefault(one.round_index, []).append(one)
    for index in range(rounds):
        for one in by_round.get(index, ()):
            spent[one.clients] += one.charges_mu2
        reached[index] = levels_of(np.sort(spent)[-num_clients:])
    return as_epsilons(reached, delta)


def _by_client(
    paid: Sequence[Charge],
    population: Population,
    folder: RunFolder,
    num_clients: int,
    same: bool,
    epsilon: float,
) -> dict[str, list[Any] | None]:
    """Return each client's epsilon in this run and its share of the budget, in the run's order.

    Shares are of squared GDP units, which add up; None where charges are not known by client.
    """
    spent: NDArray[np.float64] | None = None
    if same:
        spent = np.zeros(num_clients)
        for one in paid:
            spent[one.clients] += one.charges_mu2
    else:
        saved = folder.load_checkpoint()
        spent = None if saved is None else saved.state.get("account.spent")
    if spent is None or spent.size != num_clients:
        return {"epsilons": None, "shares": None}
    budget = allowance_mu2(epsilon, population.info.delta)
    return {
        "epsilons": [upward(float(value)) for value in bounded_epsilons(spent, population.info)],
        "shares": [short(min(1.0, float(value) / budget), 4) for value in spent],
    }


def _single(paid: Sequence[Charge], cohorts: Cohorts, same: bool) -> list[Any] | None:
    """Return the charges of every round, clients in order; one number where all are equal."""
    if not same or sum(one.clients.size for one in paid) > MOST_CHARGES:
        return None
    charges: list[Any] = [0] * len(cohorts)
    seen: set[int] = set()
    for one in paid:
        if one.round_index >= len(cohorts):
            continue
        if one.round_index in seen:  # a round that ran again after a crash has two lists
            return None
        seen.add(one.round_index)
        equal = one.charges_mu2.size and np.all(one.charges_mu2 == one.charges_mu2[0])
        values = one.charges_mu2[:1] if equal else one.charges_mu2
        listed = [upward(float(value), 4) for value in values]
        charges[one.round_index] = listed[0] if equal else listed
    return charges


def _curve(epsilon: float, delta: float) -> dict[str, list[Any]]:
    """Return amounts up to a budget and what they mean, for a page to look up (upward)."""
    top = allowance_mu2(epsilon, delta)
    amounts = top * (np.arange(1, _CURVE + 1) / _CURVE) ** 2
    epsilons = np.minimum(epsilon_spent(amounts, delta), epsilon)
    return {
        "mu2": [short(value, 6) for value in amounts],
        "epsilon": [upward(float(value)) for value in epsilons],
    }


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
        if places.size == num_clients and ids_digest([names[i] for i in places]) == run.roster:
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
