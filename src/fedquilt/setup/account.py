"""Opening a run's account in a ledger: which population, which clients, and what is refused."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.formatting import format_bound, printable
from fedquilt.config import MODE_TABLE, Claim, RunConfig
from fedquilt.data.holdings import salted_digest
from fedquilt.privacy.accounting import Adjacency
from fedquilt.privacy.ledger import (
    Ledger,
    LedgerError,
    Population,
    PopulationInfo,
    is_ledger,
    population_name,
)
from fedquilt.privacy.ledger.entries import UNKNOWN, alike
from fedquilt.privacy.ledger.population import check_name
from fedquilt.privacy.run_account import EvaluationShare, RunAccount, Witness, has_charges
from fedquilt.privacy.statement import weak_epsilon
from fedquilt.record.checkpoint import Checkpoint
from fedquilt.record.folder import RunFolder
from fedquilt.setup.mechanism import check_untouched
from fedquilt.setup.own_parts import held_digest
from fedquilt.setup.task import FederatedTask

# Names at least so alike are taken for one name and a slip of the keyboard.
_ALIKE = 0.8


def needs_account(config: RunConfig, problem: FederatedTask) -> bool:
    """Tell whether a run is entered into a ledger: whoever claims a bound, others if asked."""
    return config.ledger is not None or is_bounded(config, problem)


def open_account(
    config: RunConfig,
    problem: FederatedTask,
    path: Path,
    run_id: str,
    *,
    resumed: bool = False,
    witness: Witness | None = None,
) -> RunAccount:
    """Open the ledger at `path` and start, or resume, the run in it.

    A run that may claim a bound gets a budget of `epsilon`; any other is entered
    without one, and each of its releases puts its clients at infinity.
    """
    if config.population is None and config.ledger is not None and problem.roster.name is None:
        raise InvalidValueError(
            "population must be named when your own data meet a ledger that outlives the run: "
            "a name is how the same clients are known again"
        )
    if not resumed:
        _check_new_run(config, problem)
    if config.ledger is not None and not resumed:
        _check_new_ledger(config, path)
    if resumed and not path.exists():
        raise _forgotten(f"{path} of this run is missing: it was deleted, rolled back")
    made = not resumed and not path.exists()
    ledger = Ledger.open(path, create=not resumed)
    try:
        if witness is not None:
            witness.check(ledger)
        # The ledger of a run folder, which has a witness, is of this run alone.
        if witness is not None and not resumed and has_charges(ledger):
            raise RunFolderError(f"ledger {path} has charges of another run: {_RESTORE}")
        ledger.populations()  # a long ledger is hashed here, while nobody has to wait
        with ledger.transaction():
            account = _start(ledger, config, problem, run_id, resumed, witness)
        if witness is not None:
            witness.note(account.run.head)
        return account
    except BaseException:
        ledger.close()
        if made:
            _remove_unused(path)
        raise


def _forgotten(found: str) -> RunFolderError:
    return RunFolderError(
        f"ledger {found} or exchanged. Restore the newest copy; a run must not go on with a ledger "
        "that has forgotten charges"
    )


def _remove_unused(path: Path) -> None:
    """Remove the ledger that a refused run has made, unless somebody has used it since."""
    # Whoever waits for the lock meanwhile finds the file gone and writes nothing.
    with (
        contextlib.suppress(LedgerError, OSError),
        Ledger.open(path) as ledger,
        ledger.transaction(),
    ):
        if not ledger.populations():
            path.unlink()


def _start(
    ledger: Ledger,
    config: RunConfig,
    problem: FederatedTask,
    run_id: str,
    resumed: bool,
    witness: Witness | None,
) -> RunAccount:
    """Find or make the population and start or resume the run, in a transaction."""
    if resumed:
        population = _population_of_run(ledger, config, run_id)
    else:
        known = {other.info.name for other in ledger.populations()}
        population = _population(ledger, config, problem)
        if population.info.name in known and not config.allow_unbounded:
            _check_bound_kept(population, config, problem)
    run = population.start_run(
        run_id,
        epsilon=config.epsilon if is_bounded(config, problem) else None,
        if_exhausted=config.if_exhausted,
        client_ids=problem.roster.ids if population.info.named else None,
        allow_alike=config.new_population,
    )
    account = RunAccount(
        ledger,
        population,
        run,
        reproducible=config.noise_seed is not None,
        adjacency=Adjacency.of(config.adjacency),
        seen=None if witness is None else witness.note,
        evaluations=EvaluationShare(
            config.evaluation_share, config.num_releases, config.releases_per_evaluation
        ),
    )
    if account.is_bounded and problem.selector.secret:
        check_untouched(account)
    return account


def _check_bound_kept(population: Population, config: RunConfig, problem: FederatedTask) -> None:
    """Refuse to put clients that have a bound at infinity, unless it was said.

    It was, too, where only runs without a bound were begun and nothing has been released yet:
    one of them made the population, or had the user's word, and was stopped at its start.
    """
    runs = population.runs()
    meant = runs and all(run.epsilon is None for run in runs) and not population.spent().any()
    if meant or is_bounded(config, problem):
        return
    bounded = np.isfinite(population.spent())
    if population.info.named and problem.roster.ids is not None:
        numbers = population.numbers(problem.roster.ids)
        bounded = bounded[numbers[numbers != UNKNOWN]]
    at_stake = int(bounded.sum())
    if at_stake:
        raise InvalidValueError(
            f"mode={config.mode!r} claims nothing, so that whoever joins gives away everything, "
            f"for ever: {at_stake} of {len(problem.task.clients)} clients of this run have a bound "
            f"in population {population.info.name!r}. Use a mode that keeps it (certified), leave "
            "the ledger out, or say allow_unbounded=True (--allow-unbounded)"
        )


def _check_new_run(config: RunConfig, problem: FederatedTask) -> None:
    """Refuse a run that no ledger can take, before there is one."""
    if config.population is not None:
        check_name("population", config.population)
    if config.allowance is None or not is_bounded(config, problem):
        return
    if config.epsilon > config.allowance:
        raise InvalidValueError(
            f"epsilon={config.epsilon!r} of a run must be <= allowance={config.allowance!r}, what "
            "each client may give away in its life"
        )


def _population_of_run(ledger: Ledger, config: RunConfig, run_id: str) -> Population:
    """Return the population in which a run was begun, whatever it would be called today."""
    found = ledger.population_of(run_id)
    if found is None:
        raise _forgotten(f"{ledger.path} does not contain the run {run_id!r}: it was rolled back")
    return ledger.population(
        found.info.name, epsilon=config.allowance, delta=config.delta, adjacency=config.adjacency
    )


_RESTORE = (
    "restore ledger.json, which its owner alone may read (mode 0600), from a backup or from the "
    "folder that this one is a copy of; or start a new run"
)


def check_account_not_lost(config: RunConfig, problem: FederatedTask, folder: RunFolder) -> None:
    """Refuse a run without ledger.json, unless it was stopped before it had an account.

    What it released would be left out of its claim.  And a ledger that only a configuration
    names is none that the user has named: the folder may be a stranger's.
    """
    if config.ledger is not None:
        raise RunFolderError(
            f"run folder {str(folder.path)!r} is of a run on the ledger {config.ledger!r} and has "
            f"no ledger.json, by which that ledger knows it: {_RESTORE}"
        )
    if folder.checkpoint_head() or (needs_account(config, problem) and folder.has_released()):
        raise RunFolderError(
            f"run folder {str(folder.path)!r} has rounds and no ledger.json, so that what they "
            f"cost cannot be counted: {_RESTORE}"
        )


def check_same_clients(problem: FederatedTask, entered: dict[str, Any], folder: Path) -> None:
    """Refuse other clients than those a run was begun with; an older folder does not say."""
    if entered.get("clients", problem.roster.digest) != problem.roster.digest:
        raise RunFolderError(
            f"run folder {str(folder)!r} was begun with other clients: their number, order, ids "
            "and samples must be the same when it is resumed"
        )


def identity_of(
    problem: FederatedTask, salt: bytes | None = None, begins: str = ""
) -> dict[str, str]:
    """Return, for the owner, what tells these clients, data and first weights from others."""
    salt = salt or secrets.token_bytes(32)
    seen = problem.data.get("test") or problem.data["training"]
    return {
        "clients": problem.roster.digest,
        "salt": salt.hex(),
        "held": held_digest(problem.flat.module, problem.own.brought),
        "begins": begins or first_weights(problem),
        "tested": salted_digest([seen.inputs, seen.targets], b""),
        **problem.data_digests(salt),
    }


def first_weights(problem: FederatedTask) -> str:
    """Return the digest of the weights that a run begins with, as checkpoints hold them.

    It is that of another run's last checkpoint where this run goes on with its model.
    """
    return salted_digest(problem.flat.module.state_dict(), b"")


def check_identity(problem: FederatedTask, folder: RunFolder) -> None:
    """Refuse to resume with other clients or other data; an older folder does not say."""
    kept = folder.read_clients()
    if kept is None:
        if folder.load_checkpoint() is None:  # killed before it was written: nothing was trained
            folder.write_clients(identity_of(problem))
        return
    check_same_clients(problem, kept, folder.path)
    try:
        digests = problem.data_digests(bytes.fromhex(kept["salt"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder.path / 'clients.json'} lacks or spoils {error}") from error
    for name in ("training", "test", "validation"):
        if digests.get(name) != kept.get(name):
            raise RunFolderError(
                f"run folder {str(folder.path)!r} was begun with other {name} data: what a "
                "sample holds must be the same when it is resumed. For other data start a new run"
            )


def check_account_of(saved: Checkpoint, account: RunAccount) -> None:
    """Refuse the account of another run, and a ledger that lost an entry which this one has seen.

    What a checkpoint has released is charged to the run that it names and counted nowhere else.
    """
    run_id, head = account.run.info.name, saved.ledger_head
    if saved.run_id not in ("", run_id):
        raise RunFolderError(
            f"ledger.json names the run {run_id!r} of ledger {account.ledger.path}, and the "
            f"checkpoint beside it is of {printable(saved.run_id)[:200]!r}: {_RESTORE}"
        )
    if head and account.ledger.missing_heads([head]):
        lacks = f"does not contain the entry {head[:16]}... that this run has seen"
        raise _forgotten(f"{account.ledger.path} {lacks}: it was rolled back")


def is_bounded(config: RunConfig, problem: FederatedTask) -> bool:
    """Ask the configuration, given what its noise covers of this model."""
    if MODE_TABLE[config.mode].claim is not Claim.IF_COVERED:
        return config.is_bounded(covered=True)
    covered = {segment.name for segment in problem.flat.matching(config.patterns("noise_layers"))}
    return config.is_bounded(covered=covered >= set(problem.flat.names))


def account_notes(
    record: dict[str, Any], *, shared: bool, resumed: bool, witnessed: bool
) -> tuple[str, ...]:
    """Return what a statement says about the ledger, given the run's `ledger` record.

    Parameters
    ----------
    shared
        The ledger outlives the run.
    resumed
        The run went on after it had been stopped.
    witnessed
        How far it has come was noted outside its folder.
    """
    if not shared:
        copies = "any copy of that folder released: no note of the run could be kept outside it"
        if witnessed:
            copies = (
                "a copy of that folder released that was resumed by another user, on another "
                "machine or with another state folder"
            )
        alone = f"resumed with the ledger in its own folder: this claim leaves out what {copies}"
        return (alone,) if resumed else ()
    where = f"ledger {record['ledger']}, population {record['population']!r}"
    worst = record["lifetime_epsilon_max"]
    lifetime = f"lifetime: over all runs of {where}, "
    if worst == "inf":
        notes = [lifetime + "some client has no bound (epsilon inf)"]
    else:
        notes = [f"{lifetime}every client has epsilon <= {format_bound(worst)}"]
        notes += weak_epsilon(worst, "lifetime epsilon")
    if record["created"] is not None:
        notes.append(
            f"new: this {record['created']} begins with this run; what its clients gave away "
            "before is not counted"
        )
    else:
        notes.append(
            "other runs: the ledger keeps what they were charged; what they took on trust of parts "
            "of somebody's own is in their statements"
        )
    if record["created"] is None and record["enrolled"]:
        notes.append(
            f"new: {record['enrolled']} of the clients were charged in no run before this one; "
            "what they gave away elsewhere is not counted"
        )
    return tuple(notes)


def _population(ledger: Ledger, config: RunConfig, problem: FederatedTask) -> Population:
    """Find the clients in the ledger, or enter them with their lifetime allowance."""
    roster, count = problem.roster, len(problem.task.clients)
    known = {population.info.name: population.info for population in ledger.populations()}
    name = config.population or roster.name or f"{config.dataset}-{count}"
    older = _older_name(config, count)
    if config.population is None and older in known:
        name = older
    allowance, ids = config.allowance, roster.ids
    if name not in known:
        if not config.new_population:
            _check_new_name(ledger, config, name, known)
            if ids is not None and not roster.given:
                _check_not_by_number(config.dataset, count, name, known.values())
            if roster.name is None:
                _check_not_beside_numbers(ledger, name, known.values())
            _check_not_elsewhere(ledger, name, ids or ())
        allowance = config.epsilon if allowance is None else allowance
    elif not known[name].named and not roster.given:
        ids = None  # made when clients were known by number only, and goes on so
    population = ledger.population(
        name,
        num_clients=count if ids is None else None,
        client_ids=ids,
        epsilon=allowance,
        delta=config.delta,
        adjacency=config.adjacency,
    )
    if ids is not None and population.info.named and not config.new_population:
        _check_somebody_known(population, ids)
        joining = population.numbers(ids) == UNKNOWN
        _check_not_elsewhere(ledger, name, itertools.compress(ids, joining))
    return population


def _check_new_name(ledger: Ledger, config: RunConfig, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is nearly one of those that are there."""
    near = [] if config.population is None else _near(name, known)
    if near:
        raise _not_there(
            f"population {name!r} is not in the ledger {ledger.path}, and {near[0]!r} is"
        )


def _check_not_elsewhere(ledger: Ledger, name: str, joining: Iterable[str]) -> None:
    """Refuse to open a second account for a client whom the ledger knows elsewhere."""
    new = {alike(value): value for value in joining}
    for other in ledger.populations() if new else ():
        if other.info.name == name:
            continue
        found = next((value for value in other.ids() if alike(value) in new), None)
        if found is not None:
            raise _not_there(
                f"client {new[alike(found)]!r} is not in population {name!r} of the ledger "
                f"{ledger.path}, and is in {other.info.name!r} (--population "
                f"{other.info.name})"
            )


# The form of a name that fedquilt gave to the clients of a split.
_SPLIT_NAME = re.compile(r".+-\d+-[0-9a-f]{16}")


def _check_not_by_number(
    dataset: str, count: int, name: str, known: Iterable[PopulationInfo]
) -> None:
    """Refuse a new population of a split when one without ids may be of the same clients.

    Ledgers of schema 1 knew the clients of a split by number: under a name that somebody
    gave, or one that changed with options which the split ignores.  So any of them that has
    as many clients may be these, unless its name is that of another data set's split.
    """
    for info in known:
        others = _SPLIT_NAME.fullmatch(info.name) and not info.name.startswith(f"{dataset}-")
        if not info.named and info.num_clients == count and not others:
            raise _not_there(
                f"population {name!r} is not in the ledger, and {info.name!r} is, which knows its "
                f"{count} clients by number: they may be those of this run (then say --population "
                f"{info.name})"
            )


def _check_not_beside_numbers(ledger: Ledger, name: str, known: Iterable[PopulationInfo]) -> None:
    """Refuse a new population of one's own clients beside one that knows nobody by id.

    Who joins or leaves such a population cannot be said, and under a new name all who stay
    would begin anew; nothing in the ledger could show it.
    """
    for info in known:
        if not info.named and not _SPLIT_NAME.fullmatch(info.name):
            refused = _not_there(
                f"population {name!r} is not in the ledger {ledger.path}, and {info.name!r} is, "
                f"whose {info.num_clients} clients, known by number, may be among those of this run"
            )
            raise InvalidValueError(
                f"{refused}. To let clients join or leave {info.name!r}, say once who they are, "
                "Ledger.open(...).population(...).adopt_ids([...]), and give ids in every run"
            )


def _check_somebody_known(population: Population, ids: tuple[str, ...]) -> None:
    """Refuse clients of whom the population knows nobody: they would all begin anew."""
    if (population.numbers(ids) == UNKNOWN).all():
        raise InvalidValueError(
            f"none of the {len(ids)} clients of this run is among the "
            f"{population.info.num_clients} of population {population.info.name!r} (the first "
            f"is {ids[0]!r}; a split dealt otherwise makes other clients). Name another "
            "population, or say that they are to join this one: new_population=True "
            "(--new-population)"
        )


def _check_new_ledger(config: RunConfig, path: Path) -> None:
    """Refuse to make a ledger beside one of nearly the same name, unless it is meant."""
    if config.new_population or path.exists() or not path.parent.is_dir():
        return
    beside = [file for file in sorted(path.parent.glob("[!.]*")) if file.is_file()]
    for near in _near(path.stem, {_plain(file.stem) for file in beside}):
        # Settings, lists and journals may have the same stem: only ledgers count.
        alike_files = (file for file in beside if _plain(file.stem) == near)
        found = [file.name for file in alike_files if is_ledger(file)]
        if found:
            raise _not_there(f"ledger {path} does not exist, and {found[0]!r} does")


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are nearly this one, the nearest first."""
    plain = {_plain(other): other for other in known}
    count = max(1, len(plain))
    near = difflib.get_close_matches(_plain(name), plain, n=count, cutoff=_ALIKE)
    return [plain[other] for other in near]


def _plain(name: str) -> str:
    return name.strip().casefold()


def _not_there(found: str) -> InvalidValueError:
    return InvalidValueError(
        f"{found}: a new one would give its clients a fresh allowance. If it is meant to be new, "
        "say new_population=True (--new-population)"
    )


def _older_name(config: RunConfig, count: int) -> str:
    """Return what a ledger of schema 1 called the clients of these options."""
    split = {
        "kind": config.partition,
        "alpha": config.dirichlet_alpha,
        "classes": config.classes_per_client,
    }
    return population_name(config.dataset, split, config.seed, count)
