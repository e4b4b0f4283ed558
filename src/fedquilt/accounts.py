"""Opening a run's account: which ledger, which population, how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedquilt.config import RunConfig
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.privacy.account import Account
from fedquilt.privacy.accounting import Adjacency
from fedquilt.privacy.ledger import Ledger, Population, population_name
from fedquilt.problem import Problem


def needs_account(config: RunConfig, problem: Problem) -> bool:
    """Tell whether a run is entered into a ledger: whoever claims a bound, others if asked."""
    return config.ledger is not None or is_bounded(config, problem)


def open_account(config: RunConfig, problem: Problem, path: Path, run_id: str) -> Account:
    """Open the ledger at `path` and start, or resume, the run in it.

    A run that may claim a bound gets a budget of `epsilon`; any other is entered
    without one, and each of its releases puts its clients at infinity.
    """
    if config.population is None and config.ledger is not None and config.dataset == "custom":
        raise InvalidValueError(
            "population must be named when your own data meet a ledger that outlives the run: "
            "a name is how the same clients are known again"
        )
    ledger = Ledger.open(path, create=True)
    try:
        population = _population(ledger, config, problem)
        run = population.start_run(
            run_id,
            epsilon=config.epsilon if is_bounded(config, problem) else None,
            on_short=config.on_short,
        )
        return Account(
            ledger,
            population,
            run,
            reproducible=config.noise_seed is not None,
            adjacency=Adjacency.of(config.adjacency),
        )
    except BaseException:
        ledger.close()
        raise


def check_not_rolled_back(account: Account, head: str | None) -> None:
    """Refuse to go on when the ledger has lost an entry that this run has seen."""
    if head and account.ledger.missing_heads([head]):
        raise RunFolderError(
            f"ledger {account.ledger.path} does not contain the entry {head[:16]}... that this run "
            "has seen: it was rolled back or exchanged. Restore the newest copy; a run must not go "
            "on with a ledger that has forgotten charges"
        )


def is_bounded(config: RunConfig, problem: Problem) -> bool:
    """Tell whether charges are known in advance: certified, or fixed_dp over everything."""
    if config.mode == "certified":
        return True
    if config.mode != "fixed_dp" or config.noise_seed is not None:
        return False
    covered = {segment.name for segment in problem.flat.matching(config.patterns("noise_layers"))}
    return covered >= set(problem.flat.names)


def _population(ledger: Ledger, config: RunConfig, problem: Problem) -> Population:
    """Find the clients in the ledger, or enter them with their lifetime allowance."""
    count = len(problem.task.clients)
    name = config.population or _default_name(config, count)
    known = {population.info.name for population in ledger.populations()}
    allowance = config.allowance
    if name not in known and allowance is None:
        allowance = config.epsilon
    return ledger.population(name, num_clients=count, epsilon=allowance, delta=config.delta)


def _default_name(config: RunConfig, count: int) -> str:
    """Name the clients by how they were made; nothing in it depends on what they hold."""
    split: dict[str, Any] = {
        "kind": config.partition,
        "alpha": config.dirichlet_alpha,
        "classes": config.classes_per_client,
    }
    return population_name(config.dataset, split, config.seed, count)
